"""Checkpoints of stacked experts: each placement of experts is loaded into every other placement, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import ExpertParallel, PackedShard, Replicate, Shard, fully_shard, parallelize_module
from hyper_parallel.checkpoint import load, save
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.conformance.test_checkpoint import digests, optimizer_of
from hyper_parallel.testing.conformance.test_experts import FEATURES, HIDDEN
from hyper_parallel.testing.extent import in_gate

COUNT = 5
INSIDE = {"input_layout": Replicate(), "tp_dim": "tp", "inside": {"gate_up": PackedShard(2, 2), "down": Shard(1)}}
#: Way in which the experts lie -> shape and names of a mesh.
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "ep=4": ((4,), ("ep",)),
    "ep=2, sharded over rest=2": ((2, 2), ("rest", "ep")),
    "ep=2, cut inside over tp=2": ((2, 2), ("ep", "tp")),
    "alone": ((1,), ("ep",)),
}


def laid_out(name: str, seed: int) -> Any:
    """Return the mesh, or None on ranks outside it, and a module with an optimizer that took a step."""
    shape, names = LAYOUTS[name]
    mesh = spmd.device_mesh(*shape, names=names)
    if mesh is None:
        return None, None, None
    adapter = get_adapter()
    module = adapter.load(adapter.RoutedExperts(COUNT, FEATURES, HIDDEN), np.random.default_rng(seed))
    if name != "alone":
        parallelize_module(module, mesh["ep"], ExpertParallel(**(INSIDE if "tp" in names else {})))
    if "rest" in names:
        fully_shard(module, mesh=mesh["rest"])
    optimizer, step = optimizer_of(module, mesh.platform)
    places = np.arange(COUNT).reshape(-1, 1)

    def loss_of(x: Any) -> Any:
        y = adapter.call(module, x, adapter.tensor(places), adapter.tensor(np.ones(places.shape, np.float32)))
        return adapter.sum(adapter.square(y)), None

    x = np.random.default_rng(seed).standard_normal((COUNT, FEATURES)).astype(np.float32)
    step(adapter.model_value_and_grads(module, loss_of, x)[2])
    return mesh, module, optimizer


def state_of(module: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": module} if optimizer is None else {"model": module, "optimizer": optimizer}


def save_job(name: str, directory: str) -> Any:
    mesh, module, optimizer = laid_out(name, 5)
    if mesh is None:
        return None
    save(state_of(module, optimizer), directory, mesh=mesh)
    return digests(module, optimizer, mesh.platform)


def load_job(name: str, directory: str) -> Any:
    mesh, module, optimizer = laid_out(name, 6)
    if mesh is None:
        return None
    load(state_of(module, optimizer), directory, mesh=mesh)
    return digests(module, optimizer, mesh.platform)


@pytest.mark.parametrize("name", in_gate(LAYOUTS, ["ep=2, sharded over rest=2", "ep=2, cut inside over tp=2"]))
def test_experts_of_each_layout_in_each_other(pool: Any, tmp_path: Path, name: str) -> None:
    directory = str(tmp_path / "saved")
    saved = pool.run(4, save_job, name, directory)[0]
    assert len(saved) > 1
    for other in LAYOUTS:
        if other != name:
            assert all(loaded in (None, saved) for loaded in pool.run(4, load_job, other, directory)), other
