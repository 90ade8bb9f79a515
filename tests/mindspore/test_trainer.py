"""Training as trainers of large models do it: losses, norms, and what every checkpoint holds, against one process;
resumed on other ranks than those that saved. `tests.torch.test_trainer` is the same for torch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import checkpoint
from hyper_parallel.checkpoint import distributed
from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import device_mesh
from tests.mindspore.nets import whole
from tests.mindspore.trainer import Trainer, trained
from tests.support.trainer_setups import PAIRS, SETUPS, Setup

SAVED = (2, 4, 6) if everything() else (2, 4)
STEPS = SAVED[-1]


class Renamed:
    """The functions of torch.distributed.checkpoint, with the import lines exchanged."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def save(self, states: dict[str, Any], path: str) -> None:
        distributed.save(states, checkpoint_id=path, process_group=self.mesh)

    def async_save(self, states: dict[str, Any], path: str) -> Any:
        return distributed.async_save(states, checkpoint_id=path, process_group=self.mesh)

    def load(self, states: dict[str, Any], path: str) -> None:
        distributed.load(states, checkpoint_id=path, process_group=self.mesh)


class Own(Renamed):
    """This library's functions, which take cells and optimizers."""

    @staticmethod
    def _whole(states: dict[str, Any]) -> dict[str, Any]:
        found = {**states, "model": states["model"].model}
        return found if "optimizer" not in states else {**found, "optimizer": states["optimizer"].each}

    def save(self, states: dict[str, Any], path: str) -> None:
        checkpoint.save(self._whole(states), path, mesh=self.mesh)

    def async_save(self, states: dict[str, Any], path: str) -> Any:
        return checkpoint.async_save(self._whole(states), path, mesh=self.mesh)

    def load(self, states: dict[str, Any], path: str) -> None:
        checkpoint.load(self._whole(states), path, mesh=self.mesh)


KINDS: dict[str, type[Renamed]] = {"renamed": Renamed, "own": Own}


def values(trainer: Trainer) -> dict[str, Any]:
    """All that a checkpoint is to hold, whole; the model's part is of the state dict that was taken first."""
    found: dict[str, Any] = {name: whole(p).copy() for name, p in trainer.wrapper.state_dict().items()}
    for name, x in trainer.optimizers.state_dict().items():
        found[name] = whole(x).copy() if hasattr(x, "asnumpy") else x
    return {**found, **trainer.state_dict()}


def compare(got: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    assert got.keys() == wanted.keys(), (what, got.keys() ^ wanted.keys())
    for name, x in wanted.items():
        if isinstance(x, np.ndarray):
            same(got[name], x, f"{what}: {name}", 1e-6)
        else:
            assert got[name] == (pytest.approx(x, rel=1e-6) if isinstance(x, float) else x), (what, name, got[name], x)


def compare_steps(got: Trainer, wanted: list[Any], what: str) -> None:
    assert got.history == [pytest.approx(row, rel=1e-7) for row in wanted], f"{what}: {got.history}, not {wanted}"


@functools.cache
def single() -> tuple[list[Any], list[dict[str, Any]]]:
    """Losses and norms of one process that trains to the end, and all it had after each step."""
    trainer = Trainer(Setup(), None)
    had = [values(trainer)]
    trained(trainer, STEPS, lambda t: had.append(values(t)))
    return trainer.history, had


def saves(setup: Setup, mesh: Any, kind: str, folder: str) -> None:
    """A job that begins with a seed checkpoint, and saves every two steps while it goes on."""
    io, (history, had) = KINDS[kind](mesh), single()
    io.save({"model": Trainer(Setup(), None).wrapper}, f"{folder}/seed")
    trainer = Trainer(setup, mesh, seed=3)
    io.load({"model": trainer.wrapper}, f"{folder}/seed")
    compare(values(trainer), had[0], "loaded from the seed checkpoint")
    under_way: list[Any] = [None]

    def save(trainer: Trainer) -> None:
        if trainer.step not in SAVED:
            return
        if under_way[0] is not None:
            under_way[0].result()
        how = io.save if trainer.step == STEPS else io.async_save
        under_way[0] = how(trainer.states(), f"{folder}/{trainer.step}")

    trained(trainer, STEPS, save)
    compare_steps(trainer, history, "a job that saves")
    for step in SAVED:
        reader = Trainer(Setup(), None, seed=4)
        io.load(reader.states(), f"{folder}/{step}")
        compare(values(reader), had[step], f"saved after {step} steps")


def resumes(setup: Setup, mesh: Any, kind: str, folder: str) -> None:
    """A job on other ranks goes on where that one was after two steps, and is saved at the end."""
    io, (history, had) = KINDS[kind](mesh), single()
    trainer = Trainer(setup, mesh, seed=5)
    io.load(trainer.states(), f"{folder}/2")
    compare(values(trainer), had[2], "loaded")
    trained(trainer, 2)
    io.load(trainer.states(), f"{folder}/2")  # back, with an optimizer that has stepped
    trainer.history.clear()
    trained(trainer, STEPS - 2)
    compare_steps(trainer, history[2:], "a job that goes on")
    compare(values(trainer), had[STEPS], "at the end")
    io.save(trainer.states(), f"{folder}/end")
    reader = Trainer(Setup(), None, seed=6)
    io.load(reader.states(), f"{folder}/end")
    compare(values(reader), had[STEPS], "saved at the end")


def one_after_the_other(first: str, second: str, kind: str, folder: str) -> None:
    for name, job in ((first, saves), (second, resumes)):
        mesh = SETUPS[name].mesh()
        if mesh is not None:
            job(SETUPS[name], mesh, kind, folder)
        Collective(device_mesh(4)).gather(None)  # all ranks have come


ROWS = [(*pair, kind) for kind in KINDS for pair in PAIRS]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [pytest.param(*row.values[0], marks=row.marks) for row in in_gate(ROWS, [ROWS[0]])],
)
def test_trainer(pool: Any, tmp_path: Path, first: str, second: str, kind: str) -> None:
    pool.run(4, one_after_the_other, first, second, kind, str(tmp_path))
