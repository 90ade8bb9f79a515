"""Training as trainers of large models do it, with torch's own checkpoints and with this library's: losses, norms, and
what every checkpoint holds, against one process; resumed on other ranks than those that saved."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel import checkpoint
from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import device_mesh
from tests.support.trainer_setups import PAIRS, SETUPS, Setup
from tests.torch.support import close, full
from tests.torch.trainer import Optimizers, Trainer, trained

SAVED = (2, 4, 6) if everything() else (2, 4)
STEPS = SAVED[-1]


#: Groups for the threads that save, which communicate beside the training; by the number of ranks.
_GROUPS: dict[int, Any] = {}


class Torchs:
    """torch.distributed.checkpoint."""

    helpers_of = "torch.distributed.checkpoint.state_dict"

    def __init__(self, mesh: Any) -> None:
        self.module: Any = import_module("torch.distributed.checkpoint")
        self.helpers, self.group = import_module(self.helpers_of), _GROUPS[mesh.size()]

    def save(self, states: dict[str, Any], path: str) -> None:
        self.module.save(states, checkpoint_id=path, process_group=self.group)

    def async_save(self, states: dict[str, Any], path: str) -> Any:
        return self.module.async_save(states, checkpoint_id=path, process_group=self.group)

    def load(self, states: dict[str, Any], path: str) -> None:
        self.module.load(states, checkpoint_id=path, process_group=self.group)


class Renamed:
    """The same with the import lines exchanged."""

    helpers_of = "hyper_parallel.checkpoint.state_dict"

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.module = mesh, import_module("hyper_parallel.checkpoint.distributed")
        self.helpers = import_module(self.helpers_of)

    def save(self, states: dict[str, Any], path: str) -> None:
        self.module.save(states, checkpoint_id=path, process_group=self.mesh)

    def async_save(self, states: dict[str, Any], path: str) -> Any:
        return self.module.async_save(states, checkpoint_id=path, process_group=self.mesh)

    def load(self, states: dict[str, Any], path: str) -> None:
        self.module.load(states, checkpoint_id=path, process_group=self.mesh)


class Own(Renamed):
    """This library's functions, which take modules and optimizers."""

    @staticmethod
    def whole(states: dict[str, Any]) -> dict[str, Any]:
        found = {**states, "model": states["model"].model}
        if isinstance(states.get("optimizer"), Optimizers):
            found["optimizer"] = states["optimizer"].each
        return found

    def save(self, states: dict[str, Any], path: str) -> None:
        checkpoint.save(self.whole(states), path, mesh=self.mesh)

    def async_save(self, states: dict[str, Any], path: str) -> Any:
        return checkpoint.async_save(self.whole(states), path, mesh=self.mesh)

    def load(self, states: dict[str, Any], path: str) -> None:
        checkpoint.load(self.whole(states), path, mesh=self.mesh)


KINDS: dict[str, Any] = {"torch's": Torchs, "renamed": Renamed, "own": Own}


def values(trainer: Trainer) -> dict[str, Any]:
    """All that a checkpoint is to hold, whole; the model's part is of the wrapper that was made first."""
    found = {name: full(p).clone() for name, p in trainer.wrapper.state_dict().items()}
    for name, x in trainer.optimizers.state_dict().items():
        found[name] = full(x).clone() if isinstance(x, torch.Tensor) else x
    found["schedulers"] = trainer.schedulers.state_dict()
    found["position"], found["step"] = trainer.loader.position, trainer.step
    return found


def same(got: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    assert got.keys() == wanted.keys(), (what, got.keys() ^ wanted.keys())
    for name, x in wanted.items():
        if isinstance(x, torch.Tensor):
            close(got[name], x, f"{what}: {name}", 1e-9)
        elif isinstance(x, float):
            assert isinstance(got[name], float) and got[name] == pytest.approx(x, rel=1e-9, abs=1e-12), (
                what,
                name,
                got[name],
                x,
            )
        else:
            assert got[name] == x, (what, name)


def compare_steps(got: Trainer, wanted: list[Any], what: str) -> None:
    assert got.history == [pytest.approx(row, rel=1e-9) for row in wanted], f"{what}: {got.history}, not {wanted}"


def single(kind: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    """One process that trains to the end, and all it had after each step."""
    trainer, had = Trainer(Setup(), None, import_module(kind.helpers_of)), []
    had.append(values(trainer))
    trained(trainer, STEPS, lambda t: had.append(values(t)))
    return trainer, had


def saves(setup: Setup, mesh: Any, kind: Any, folder: str) -> None:
    """A job that begins with a seed checkpoint, and saves every two steps while it goes on."""
    io, (reference, had) = kind(mesh), single(kind)
    same(values(Trainer(setup, mesh, io.helpers)), had[0], "weights as one process draws them")
    seed = Trainer(Setup(), None, io.helpers)
    io.save({"model": seed.wrapper}, f"{folder}/seed")
    trainer = Trainer(setup, mesh, io.helpers, seed=3)
    io.load({"model": trainer.wrapper}, f"{folder}/seed")
    same(values(trainer), had[0], "loaded from the seed checkpoint")
    under_way: list[Any] = [None]

    def save(trainer: Trainer) -> None:
        if trainer.step not in SAVED:
            return
        if under_way[0] is not None:
            under_way[0].result()
        last = trainer.step == STEPS
        under_way[0] = (io.save if last else io.async_save)(trainer.states(), f"{folder}/{trainer.step}")

    trained(trainer, STEPS, save)
    compare_steps(trainer, reference.history, "a job that saves")
    for step in SAVED:
        reader = Trainer(Setup(), None, io.helpers, seed=4)
        io.load(reader.states(), f"{folder}/{step}")
        same(values(reader), had[step], f"saved after {step} steps")


def resumes(setup: Setup, mesh: Any, kind: Any, folder: str) -> None:
    """A job on other ranks goes on where that one was after two steps, and is saved at the end."""
    io, (reference, had) = kind(mesh), single(kind)
    trainer = Trainer(setup, mesh, io.helpers, seed=5)
    io.load(trainer.states(), f"{folder}/2")
    same(values(trainer), had[2], "loaded")
    trained(trainer, 2)
    io.load(trainer.states(), f"{folder}/2")  # back, with an optimizer that has stepped
    trainer.history.clear()
    trained(trainer, STEPS - 2)
    compare_steps(trainer, reference.history[2:], "a job that goes on")
    same(values(trainer), had[STEPS], "at the end")
    io.save(trainer.states(), f"{folder}/end")
    reader = Trainer(Setup(), None, io.helpers, seed=6)
    io.load(reader.states(), f"{folder}/end")
    same(values(reader), had[STEPS], "saved at the end")


def one_after_the_other(first: str, second: str, kind: str, folder: str) -> None:
    for name, job in ((first, saves), (second, resumes)):
        mesh, ranks = SETUPS[name].mesh(), SETUPS[name].ranks
        if ranks not in _GROUPS:
            _GROUPS[ranks] = dist.new_group([*range(ranks)], backend="gloo")
        if mesh is not None:
            job(SETUPS[name], mesh, KINDS[kind], folder)
        Collective(device_mesh(4)).gather(None)  # all ranks have come


ROWS = [(*pair, kind) for kind in KINDS for pair in PAIRS]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [pytest.param(*row.values[0], marks=row.marks) for row in in_gate(ROWS, [ROWS[0]])],
)
def test_trainer(pool: Any, tmp_path: Path, first: str, second: str, kind: str) -> None:
    pool.run(4, one_after_the_other, first, second, kind, str(tmp_path))
