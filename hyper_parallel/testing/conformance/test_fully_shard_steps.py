"""`fully_shard` in double and single precision: values, gradients, clipping and five optimizer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import ColwiseParallel, DTensor, RowwiseParallel, fully_shard, parallelize_module
from hyper_parallel.platform.contract import Platform
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import in_gate

ROWS, STEPS, NORM = 3, 5, 0.05
#: name -> shape and names of a mesh. Those called tp are for tensor parallelism.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "dp=2": ((2,), ("dp",)),
    "dp=3": ((3,), ("dp",)),
    "dp=4": ((4,), ("dp",)),
    "dp=2, tp=2": ((2, 2), ("dp", "tp")),
    "replicate=2, shard=2": ((2, 2), ("dp_replicate", "dp_shard")),
    "replicate=2, shard=1, tp=2": ((2, 1, 2), ("dp_replicate", "dp_shard", "tp")),
}
SIZES = {"even": (12, 24), "uneven": (5, 7)}
OPTIMIZERS = ("momentum", "adamw")
#: dtype -> how far values, gradients and parameters may be from those of the single device.
TOLERANCES: dict[Any, float] = {np.float64: 1e-6, np.float32: 1e-5}
#: In single precision Adam makes much of a small difference: how far it may be, of the way that a parameter has gone.
OF_THE_WAY = 1e-3


def near(got: Any, wanted: Any, what: str, tolerance: float, measure: Any = None) -> None:
    """Raise AssertionError unless the norm of the difference is small relative to the norm of ``measure``.

    None stands for ``wanted``.
    """
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, what
    error = np.linalg.norm(got - wanted)
    scale = np.linalg.norm(wanted if measure is None else measure)
    assert error <= tolerance * scale, f"{what}: {error:.2e} of {scale:.2e}"


def five_steps(name: str, sizes: tuple[int, int], optimizer: str) -> None:
    """Train for five steps in each precision that the device supports."""
    shape, names = MESHES[name]
    mesh = spmd.device_mesh(*shape, names=names)
    if mesh is None:
        return
    for dtype in TOLERANCES:
        if dtype is np.float32 or mesh.device_type == "cpu":  # accelerators leave double precision out
            train(mesh, sizes, optimizer, dtype)


def train(mesh: Any, sizes: tuple[int, int], optimizer: str, dtype: Any) -> None:
    """Train a sharded MLP and an unsharded one for five steps, and compare them."""
    adapter, tolerance = get_adapter(), TOLERANCES[dtype]
    dp = mesh if "tp" not in mesh.mesh_dim_names else mesh[tuple(n for n in mesh.mesh_dim_names if n != "tp")]
    single, sharded = (adapter.load(adapter.Mlp(*sizes), np.random.default_rng(5), dtype) for _ in range(2))
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(sharded, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (sharded.up, sharded.down, sharded):
        fully_shard(module, mesh=dp)
    size, rank = dp.size(), int(np.argwhere(dp.ranks.reshape(-1) == mesh.get_rank())[0][0])
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    knows_optimizers = type(mesh.platform).is_optimizer is not Platform.is_optimizer
    takes = [step_of(adapter, module, optimizer, knows_optimizers) for module in (single, sharded)]
    started = {path: adapter.numpy(p) + 0 for path, p in held(single, mesh).items()}

    def loss_of(module: Any, target: np.ndarray, rows: int) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(module, x)
            return adapter.sum(adapter.square(y - adapter.tensor(target))) * (1.0 / rows), y

        return loss

    for step in range(STEPS):
        what, rng = f"{optimizer} in {dtype.__name__}, step {step}", np.random.default_rng(step)
        x, target = (rng.standard_normal((size * ROWS, sizes[0])).astype(dtype) for _ in range(2))
        y, grad_x, grads = adapter.model_value_and_grads(single, loss_of(single, target, size * ROWS), x)
        got_y, got_grad_x, got = adapter.model_value_and_grads(sharded, loss_of(sharded, target[mine], ROWS), x[mine])
        # Rounding that Adam magnifies shows in everything after its first step.
        exact = optimizer != "adamw" or dtype is np.float64 or step == 0
        allowed = tolerance if exact else OF_THE_WAY
        near(adapter.numpy(got_y), adapter.numpy(y)[mine], f"output, {what}", allowed)
        near(got_grad_x / size, grad_x[mine], f"gradient of the input, {what}", allowed)
        if knows_optimizers:
            compare(adapter, got, grads, f"gradient, {what}", allowed)
            grads, got = adapter.clip(single, grads, NORM), adapter.clip(sharded, got, NORM)
        compare(adapter, got, grads, f"gradient that was clipped, {what}", allowed)
        if knows_optimizers:
            total = sum(np.linalg.norm(adapter.numpy(g)) ** 2 for g in grads.values()) ** 0.5
            assert abs(total - NORM) < 1e-4, "nothing was clipped"
        for take, its_grads in zip(takes, (grads, got), strict=True):
            take(its_grads)
    ends = held(sharded, mesh)
    for path, p in held(single, mesh).items():
        way = adapter.numpy(p) - started[path]
        assert np.linalg.norm(way) > 0, path
        what = f"{path} after {STEPS} steps, {optimizer} in {dtype.__name__}"
        if optimizer == "adamw" and dtype is np.float32:
            near(adapter.numpy(ends[path]), adapter.numpy(p), what, OF_THE_WAY, way)
        else:
            near(adapter.numpy(ends[path]), adapter.numpy(p), what, tolerance)


def step_of(adapter: Any, module: Any, optimizer: str, knows_optimizers: bool) -> Any:
    """Return the function that takes a step: plain gradient descent if the framework has no optimizers."""
    return adapter.optimizer(module, optimizer, 1e-2)[1] if knows_optimizers else adapter.sgd(module, 1e-2)


def compare(adapter: Any, got: dict[str, Any], wanted: dict[str, Any], what: str, tolerance: float) -> None:
    """Check that gradients are DTensors with the wanted values."""
    for name, g in wanted.items():
        assert isinstance(got[name], DTensor), name
        near(adapter.numpy(got[name]), adapter.numpy(g), f"{name}: {what}", tolerance)


def held(module: Any, mesh: Any) -> dict[str, Any]:
    """Return the parameters of a module by path."""
    platform = mesh.platform
    found = [(path, *p) for path, sub in platform.named_modules(module) for p in platform.named_parameters(sub)]
    return {f"{path}.{name}": p for path, name, p in found}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sizes", in_gate(SIZES, ["uneven"]))
@pytest.mark.parametrize("mesh", in_gate(MESHES, ["dp=3", "dp=2, tp=2", "replicate=2, shard=2"]))
def test_five_steps(pool: Any, mesh: str, sizes: str, optimizer: str) -> None:
    pool.run(int(np.prod(MESHES[mesh][0])), five_steps, mesh, SIZES[sizes], optimizer)
