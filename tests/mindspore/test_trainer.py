"""Training as trainers of large models do it: losses, norms, and the contents of every checkpoint, against one process.
It is resumed on other ranks than those that saved. `tests.torch.test_trainer` is the same for torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import device_mesh
from tests.mindspore.nets import whole
from tests.mindspore.trainer import Trainer, trained
from tests.support.trainer_jobs import Jobs, Own, Renamed
from tests.support.trainer_setups import PAIRS, SETUPS, Setup

KINDS: dict[str, type[Renamed]] = {"renamed": Renamed, "own": Own}


def make(setup: Setup, mesh: Any, seed: int | None) -> Trainer:
    return Trainer(setup, mesh) if seed is None else Trainer(setup, mesh, seed=seed)


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


def one_after_the_other(first: str, second: str, kind: str, folder: str) -> None:
    for name, job in ((first, Jobs.saves), (second, Jobs.resumes)):
        mesh = SETUPS[name].mesh()
        if mesh is not None:
            job(Jobs(make, values, compare, trained, 1e-7, KINDS[kind](mesh)), SETUPS[name], mesh, folder)
        Collective(device_mesh(4)).gather(None)  # all ranks have come


ROWS = [(*pair, kind) for kind in KINDS for pair in PAIRS]


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [pytest.param(*row.values[0], marks=row.marks) for row in in_gate(ROWS, [ROWS[0]])],
)
def test_trainer(pool: Any, tmp_path: Path, first: str, second: str, kind: str) -> None:
    pool.run(4, one_after_the_other, first, second, kind, str(tmp_path))
