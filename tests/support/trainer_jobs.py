"""Two jobs of a trainer, one that saves and one that goes on, against one process. The trainer is a framework's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from hyper_parallel import checkpoint
from hyper_parallel.checkpoint import distributed
from hyper_parallel.testing.extent import everything
from tests.support.trainer_setups import Setup

__all__ = ["SAVED", "STEPS", "Jobs", "Own", "Renamed"]

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
    """The functions of this library, which take modules and optimizers."""

    @staticmethod
    def _objects(states: dict[str, Any]) -> dict[str, Any]:
        optimizer = states.get("optimizer")
        found = {**states, "model": states["model"].model, "optimizer": getattr(optimizer, "each", optimizer)}
        return {name: found[name] for name in states}

    def save(self, states: dict[str, Any], path: str) -> None:
        checkpoint.save(self._objects(states), path, mesh=self.mesh)

    def async_save(self, states: dict[str, Any], path: str) -> Any:
        return checkpoint.async_save(self._objects(states), path, mesh=self.mesh)

    def load(self, states: dict[str, Any], path: str) -> None:
        checkpoint.load(self._objects(states), path, mesh=self.mesh)


@functools.cache
def single(make: Callable[..., Any], values: Callable[..., Any], trained: Callable[..., None]) -> tuple[Any, Any]:
    """Losses and norms of one process that trains to the end, and all it had after each step; see `Jobs`."""
    trainer = make(Setup(), None, None)
    had = [values(trainer)]
    trained(trainer, STEPS, lambda t: had.append(values(t)))
    return trainer.history, had


class Jobs(NamedTuple):
    """The jobs of one trainer.

    Args:
        make: trainer of a setup, a mesh (None for one process), and a seed (None for that of the first weights).
        values: all that a checkpoint is to hold, whole.
        compare: two of these; the third argument names their origin.
        trained: train a trainer so many steps, with a function to call after each.
        precision: relative difference that losses and norms may have.
        io: functions that save and load.
    """

    make: Callable[[Setup, Any, int | None], Any]
    values: Callable[[Any], dict[str, Any]]
    compare: Callable[[dict[str, Any], dict[str, Any], str], None]
    trained: Callable[..., None]
    precision: float
    io: Any

    def saves(self, setup: Setup, mesh: Any, folder: str) -> None:
        """A job that begins with a seed checkpoint, and saves every two steps while it goes on."""
        io, (history, had) = self.io, single(self.make, self.values, self.trained)
        self._holds(self.make(setup, mesh, None), had[0], "weights as one process draws them")
        io.save({"model": self.make(Setup(), None, None).wrapper}, f"{folder}/seed")
        trainer = self.make(setup, mesh, 3)
        io.load({"model": trainer.wrapper}, f"{folder}/seed")
        self._holds(trainer, had[0], "loaded from the seed checkpoint")
        under_way: list[Any] = [None]

        def save(trainer: Any) -> None:
            if trainer.step not in SAVED:
                return
            if under_way[0] is not None:
                under_way[0].result()
            how = io.save if trainer.step == STEPS else io.async_save
            under_way[0] = how(trainer.states(), f"{folder}/{trainer.step}")

        self.trained(trainer, STEPS, save)
        self._stepped(trainer, history, "a job that saves")
        for step in SAVED:
            self._saved(f"{folder}/{step}", had[step], f"saved after {step} steps")

    def resumes(self, setup: Setup, mesh: Any, folder: str) -> None:
        """A job on other ranks goes on where that one was after two steps, and is saved at the end."""
        io, (history, had) = self.io, single(self.make, self.values, self.trained)
        trainer = self.make(setup, mesh, 5)
        io.load(trainer.states(), f"{folder}/2")
        self._holds(trainer, had[2], "loaded")
        self.trained(trainer, 2)
        io.load(trainer.states(), f"{folder}/2")  # back, with an optimizer that has stepped
        trainer.history.clear()
        self.trained(trainer, STEPS - 2)
        self._stepped(trainer, history[2:], "a job that goes on")
        self._holds(trainer, had[STEPS], "at the end")
        io.save(trainer.states(), f"{folder}/end")
        self._saved(f"{folder}/end", had[STEPS], "saved at the end")

    def _holds(self, trainer: Any, wanted: dict[str, Any], what: str) -> None:
        self.compare(self.values(trainer), wanted, what)

    def _saved(self, path: str, wanted: dict[str, Any], what: str) -> None:
        """One process reads it."""
        reader = self.make(Setup(), None, 4)
        self.io.load(reader.states(), path)
        self._holds(reader, wanted, what)

    def _stepped(self, trainer: Any, wanted: list[Any], what: str) -> None:
        got, near = trainer.history, [pytest.approx(row, rel=self.precision) for row in wanted]
        assert got == near, f"{what}: {got}, not {wanted}"
