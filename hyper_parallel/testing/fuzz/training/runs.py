"""Runs of training programs on one device and distributed, and their outcomes."""

from __future__ import annotations

import math
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.core.communication.errors import RankMismatchError
from hyper_parallel.core.data_parallel.agreement import agreement_of
from hyper_parallel.testing import spmd
from hyper_parallel.testing.fuzz.exchange import AskedError, installed
from hyper_parallel.testing.fuzz.training import models
from hyper_parallel.testing.fuzz.training.job import WrongError
from hyper_parallel.testing.fuzz.training.programs import Program, unit_order
from hyper_parallel.testing.fuzz.training.trainer import Trainer, clear

__all__ = ["Reference", "on_one_device", "run", "told"]

_TOLERANCE = {"float64": 1e-9, "float32": 2e-4}


@dataclass(frozen=True)
class Reference:
    """Results of a program on a single device.

    Attributes:
        program: the program.
        seen: the compared values by name, or None.
        problem: reason why there are no results; empty if there are.
    """

    program: Program
    seen: dict[str, np.ndarray | None] = field(default_factory=dict)
    problem: str = ""


def on_one_device(program: Program, shaken: int = 0) -> Reference:
    """Run a program with plain tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = Trainer(program, shaken=shaken)
            trainer.run()
        except Exception as error:
            return Reference(program, problem=told(error))
    return Reference(program, trainer.seen)


def told(error: Exception) -> str:
    """Return the class, message and place of an error, for reports."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}"[:300] + f" ({frame.name}:{frame.lineno})"


def run(reference: Reference) -> tuple[str, str] | None:
    """Run a program and return the verdict of this rank; None for a rank outside the mesh."""
    program = reference.program
    used = {0, *(a[1] for a in program.actions if a[0] == "resume")}
    # A job finds its setup by value, and two setups may be equal.
    meshes = [models.meshes_of(s) if s in [program.setups[i] for i in used] else None for s in program.setups]
    everyone = spmd.device_mesh(max(math.prod(program.setups[i].shape) for i in used))
    if everyone is None:
        return None
    compare = Comparison(reference)
    trainer = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = Trainer(program, meshes, everyone, compare)
            trainer.run()
        except WrongError as error:
            return "wrong", str(error)
        except Exception as error:
            if isinstance(error, (RankMismatchError, AskedError)) and differs(trainer):
                return "right", ""
            return "plain refused" if reference.problem else "refused", told(error)
        finally:
            if program.actions[-1][0] == "differ":  # ranks that were in a collective do not know that other ranks asked
                for mesh in (mesh for mesh in meshes if mesh is not None and mesh[1] is not None):
                    for agreement in (agreement_of(mesh[1], dim) for dim in range(mesh[1].ndim)):
                        if agreement is not None:
                            agreement.begin_anew()
            if spmd.rank == 0:
                clear(program)
    if reference.problem:
        return "accepted", reference.problem
    if differs(trainer):
        return "wrong", "ranks ran different units, without an error"
    return "right", ""


def differs(trainer: Trainer | None) -> bool:
    """Return whether, at the end of the program, ranks that share this rank's shards run different units."""
    if trainer is None or not trainer.takes_part or trainer.dp is None or installed() is None:
        return False
    setup, (word, *orders) = trainer.now, trainer.program.actions[-1]
    if word != "differ" or "shard" not in setup.names:
        return False
    size = setup.shape[setup.names.index("shard")]
    first = trainer.rank // size * size
    return len({tuple(unit_order(setup, order)) for order in orders[first : first + size]}) > 1


class Comparison:
    """Comparison of a rank's values with a reference.

    Args:
        reference: results of the single device.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._slack: list[dict[str, np.ndarray | None]] | None = None
        self._tolerance = _TOLERANCE[
            "float32"
            if any(a == ("cast", "float32") for a in reference.program.actions)
            else reference.program.model.dtype
        ]

    def __call__(self, what: str, got: np.ndarray | None, part: Any) -> None:
        """Raise `WrongError` if a value differs from its part of the reference."""
        if self._reference.problem:
            return
        if what not in self._reference.seen:
            raise WrongError(f"{what}, which is not there on a single device")
        wanted = self._reference.seen[what]
        if (got is None) != (wanted is None):
            raise WrongError(f"{what}: {got} in place of {wanted}"[:300])
        if got is None or wanted is None:
            return
        wanted = np.asarray(wanted[part])
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise WrongError(f"{what}: {got.dtype}{list(got.shape)} in place of {wanted.dtype}{list(wanted.shape)}")
        error, scale = np.abs(got - wanted), 1 + np.abs(wanted)
        if np.isnan(wanted).any() or np.array_equal(got, wanted) or (error <= self._tolerance * scale).all():
            return
        if not (error <= self._tolerance * scale + self._rounding(what)[part]).all():
            raise WrongError(f"{what}: off by {np.max(error):.1e}: {got.tolist()} in place of {wanted.tolist()}"[:500])

    def _rounding(self, what: str) -> np.ndarray:
        """Return ten times the change of a value if all values of the program have small random errors.

        Loaded values have errors too.
        """
        if self._slack is None:
            runs = [on_one_device(self._reference.program, shaken) for shaken in range(1, 4)]
            self._slack = [run.seen for run in runs if not run.problem]
        wanted = self._reference.seen[what]
        assert wanted is not None
        # Values are shaken by 1e-6, which is many rounding errors of float64.
        scale = 10 if self._tolerance > 1e-6 else 1e-5
        found = [np.abs(np.asarray(seen[what]) - wanted) for seen in self._slack]
        return np.max(found, axis=0) * scale if found else np.zeros_like(wanted)
