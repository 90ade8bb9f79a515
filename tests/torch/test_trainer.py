"""Training as trainers of large models do it, with torch's own checkpoints and with this library's. Losses, norms, and
the contents of every checkpoint are compared with one process. It is resumed on other ranks than those that saved."""

from __future__ import annotations

import functools
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import device_mesh
from tests.support.trainer_jobs import Jobs, Own, Renamed
from tests.support.trainer_setups import PAIRS, SETUPS, Setup
from tests.torch.support import close, full
from tests.torch.trainer import Trainer, trained

#: Groups for the threads that save, which communicate parallel to the training; by the number of ranks.
_GROUPS: dict[int, Any] = {}


class Torchs:
    """torch.distributed.checkpoint."""

    def __init__(self, mesh: Any) -> None:
        self.module: Any = import_module("torch.distributed.checkpoint")
        self.group = _GROUPS[mesh.size()]

    def save(self, states: dict[str, Any], path: str) -> None:
        self.module.save(states, checkpoint_id=path, process_group=self.group)

    def async_save(self, states: dict[str, Any], path: str) -> Any:
        return self.module.async_save(states, checkpoint_id=path, process_group=self.group)

    def load(self, states: dict[str, Any], path: str) -> None:
        self.module.load(states, checkpoint_id=path, process_group=self.group)


KINDS: dict[str, Any] = {"torch's": Torchs, "renamed": Renamed, "own": Own}
#: The module of functions that give and take state dicts.
HELPERS = {
    "torch's": "torch.distributed.checkpoint.state_dict",
    "renamed": "hyper_parallel.checkpoint.state_dict",
    "own": "hyper_parallel.checkpoint.state_dict",
}


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


@functools.cache
def maker(helpers: str) -> Any:
    def make(setup: Setup, mesh: Any, seed: int | None) -> Trainer:
        module = import_module(helpers)
        return Trainer(setup, mesh, module) if seed is None else Trainer(setup, mesh, module, seed=seed)

    return make


def one_after_the_other(first: str, second: str, kind: str, folder: str) -> None:
    for name, job in ((first, Jobs.saves), (second, Jobs.resumes)):
        mesh, ranks = SETUPS[name].mesh(), SETUPS[name].ranks
        if ranks not in _GROUPS:
            _GROUPS[ranks] = dist.new_group([*range(ranks)], backend="gloo")
        if mesh is not None:
            job(Jobs(maker(HELPERS[kind]), values, same, trained, 1e-9, KINDS[kind](mesh)), SETUPS[name], mesh, folder)
        Collective(device_mesh(4)).gather(None)  # all ranks have come


ROWS = [(*pair, kind) for kind in KINDS for pair in PAIRS]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [pytest.param(*row.values[0], marks=row.marks) for row in in_gate(ROWS, [ROWS[0]])],
)
def test_trainer(pool: Any, tmp_path: Path, first: str, second: str, kind: str) -> None:
    pool.run(4, one_after_the_other, first, second, kind, str(tmp_path))
