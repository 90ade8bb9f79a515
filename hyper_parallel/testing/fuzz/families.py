"""Kinds of random programs: functions that generate a program from a seed, run the program, and reduce it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.fuzz import compare, reductions, stacks
from hyper_parallel.testing.fuzz.program import Limits, generate
from hyper_parallel.testing.fuzz.training import programs as training_programs
from hyper_parallel.testing.fuzz.training import reductions as training_reductions
from hyper_parallel.testing.fuzz.training import runs as training_runs
from hyper_parallel.testing.fuzz.training import sequences

__all__ = ["FAMILIES", "Family", "limits", "training_limits"]

#: One in this many seeds of the family of operations makes a stack of modules.
STACKS = 20


@dataclass(frozen=True)
class Family:
    """A kind of random programs.

    Attributes:
        generate: makes the program of a seed.
        on_one_device: runs a program with plain tensors, and returns the reference.
        run: runs the program of a reference distributed, and returns the verdict of this rank.
        smaller: yields smaller variants of a program, the most promising first.
    """

    generate: Callable[[int], Any]
    on_one_device: Callable[[Any], Any]
    run: Callable[[Any], tuple[str, str] | None]
    smaller: Callable[[Any], Iterator[Any]]


def limits() -> Limits:
    """Return the features that chains of operations may use with the framework in use."""
    return Limits(**get_adapter().FUZZ_LIMITS)


def training_limits() -> training_programs.TrainingLimits:
    """Return the features that training programs may use with the framework in use."""
    return training_programs.TrainingLimits(**get_adapter().TRAINING_LIMITS)


def _operations(seed: int) -> Any:
    """Return the program of a seed: a chain of operations, or the seed itself for a stack of modules."""
    return generate(seed, limits()) if seed % STACKS else seed


#: Families by the name that the command takes.
FAMILIES = {
    "operations": Family(
        _operations,
        lambda program: stacks.on_one_device(program) if isinstance(program, int) else compare.on_one_device(program),
        lambda wanted: stacks.run(wanted) if isinstance(wanted, stacks.Reference) else compare.run(wanted),
        reductions.smaller,
    ),
    "training": Family(
        lambda seed: training_programs.generate(seed, training_limits()),
        training_runs.on_one_device,
        training_runs.run,
        training_reductions.smaller,
    ),
    "sequences": Family(
        lambda seed: sequences.generate(seed, training_limits().dtypes, get_adapter().CHECKPOINTS),
        sequences.on_one_device,
        sequences.run,
        sequences.smaller,
    ),
}
