"""Ranks with empty shards: all ranks issue the same collectives, and gradients equal the single device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, Replicate, SequenceParallel, Shard, check_ranks, manual_seed, parallelize_module
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import block_plan, floats, same
from hyper_parallel.testing.extent import in_gate

#: ranks, length of a sequence that leaves some of them without elements
PLACES = [(2, 1), (3, 4), (4, 9), (4, 1)]


def compare(mesh: Any, build: Callable[[Any], Any], plan: Any, array: np.ndarray, before: Any = None) -> None:
    """Compare forward and backward of a model on an unevenly sharded sequence with a run on the full sequence."""
    adapter = get_adapter()
    manual_seed(0, mesh)  # earlier jobs may have drawn on some of the ranks, which `check_ranks` would notice
    single, sharded = (adapter.load(build(adapter), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, plan)
    weights = floats(*array.shape)

    def reference(x: Any) -> Any:
        y = adapter.call(single, x if before is None else before(adapter, x))
        return adapter.weighted_sum(y, adapter.tensor(weights)), y

    def distributed(x: Any) -> Any:
        x = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        y = adapter.call(sharded, x if before is None else before(adapter, x))
        if not isinstance(y, DTensor):
            y = DTensor.from_local(y, mesh, [Shard(1)], shape=array.shape)
        given = DTensor.from_local(adapter.tensor(weights), mesh)
        return adapter.weighted_sum(y, given).full_tensor(), y

    y, grad_x, grads = adapter.model_value_and_grads(single, reference, array)
    with check_ranks(mesh):
        got_y, got_grad_x, got_grads = adapter.model_value_and_grads(sharded, distributed, array)
        got_y, got_grads = adapter.numpy(got_y), {name: adapter.numpy(g) for name, g in got_grads.items()}
    same(got_y, adapter.numpy(y), "output")
    same(got_grad_x, grad_x, "gradient of the input")
    for name, g in grads.items():
        same(got_grads[name], adapter.numpy(g), f"gradient of {name}")


@spmd.on_mesh()
def norm(mesh: Any, length: int, name: str, use_local_output: bool) -> None:
    plan = {"": SequenceParallel(use_local_output=use_local_output)}
    build = {"norm": lambda adapter: adapter.norm_module(6), "own": lambda adapter: adapter.RmsNorm(6)}[name]
    compare(mesh, build, plan, floats(2, length, 6))


@pytest.mark.parametrize("use_local_output", [True, False])
@pytest.mark.parametrize("name", ["norm", "own"])
@pytest.mark.parametrize(("world", "length"), in_gate(PLACES, [(3, 4), (4, 1)], unpack=True))
def test_norms(pool: Any, world: int, length: int, name: str, use_local_output: bool) -> None:
    """Check norms under `SequenceParallel`: the framework's, and a user-defined one."""
    pool.run(world, norm, length, name, use_local_output)


@spmd.on_mesh()
def registered_norm(mesh: Any, length: int) -> None:
    """Check a registered norm class. Its own forward runs on the local tensors if no rank's shard is empty."""
    platform = mesh.platform
    cls = type(get_adapter().RmsNorm(6))
    platform.register_norm_module(cls)
    try:
        compare(mesh, lambda adapter: adapter.RmsNorm(6), {"": SequenceParallel()}, floats(2, length, 6))
    finally:
        del platform.norm_kinds[cls]


@pytest.mark.parametrize(("world", "length"), in_gate([*PLACES, (2, 4)], [(3, 4), (4, 1), (2, 4)], unpack=True))
def test_registered_norms(pool: Any, world: int, length: int) -> None:
    pool.run(world, registered_norm, length)


@spmd.on_mesh()
def block(mesh: Any, length: int, local_between: bool) -> None:
    compare(mesh, lambda adapter: adapter.Block(24, 36, 2), block_plan(local_between), floats(2, length, 24))


@pytest.mark.parametrize(("world", "length", "local_between"), [(3, 4, True), (4, 9, False)])
def test_blocks(pool: Any, world: int, length: int, local_between: bool) -> None:
    """Check a block with sequence parallelism.

    On plain tensors, MindSpore's own gradients of attention are wrong after a sequence of length 1.
    """
    pool.run(world, block, length, local_between)


@spmd.on_mesh()
def masked(mesh: Any, length: int) -> None:
    """Compare results that require no gradient on any rank, and gradients that are empty."""

    def before(adapter: Any, x: Any) -> Any:
        positive = x > 0.0
        return adapter.where(positive, x, x * 0.5) * adapter.sum(adapter.where(positive, x, x * 2.0), 1, True)

    compare(mesh, lambda adapter: adapter.norm_module(6), {"": SequenceParallel()}, floats(2, length, 6), before)


@pytest.mark.parametrize(("world", "length"), in_gate(PLACES, [(4, 9), (4, 1)], unpack=True))
def test_masks(pool: Any, world: int, length: int) -> None:
    pool.run(world, masked, length)


@spmd.on_mesh()
def _second_order_of_a_look_up(mesh: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    adapter, ids, weight = get_adapter(), np.arange(3) % 2, floats(2, 3)

    def spread(table: Any) -> Any:
        local = adapter.tensor(ids.astype(adapter.TARGET_DTYPE)[_part(mesh, ids.shape)])
        rows = DTensor.from_local(local, mesh, [Shard(0)], shape=ids.shape)
        found = adapter.embedding(rows, DTensor.from_local(table, mesh, [Replicate()]))
        return (found * found * found).sum().full_tensor()

    def single(table: Any) -> Any:
        found = adapter.embedding(adapter.tensor(ids.astype(adapter.TARGET_DTYPE)), table)
        return (found * found * found).sum()

    def combine(grad: Any) -> Any:
        return (grad * grad).sum()

    return adapter.second_order(spread, combine, [weight]), adapter.second_order(single, combine, [weight])


def _part(mesh: Any, shape: tuple[int, ...]) -> Any:
    return get_layout(mesh, (Shard(0),), shape).local_index()


def test_second_order_of_a_look_up(pool: Any) -> None:
    """Check that a rank without ids takes part in the collectives of the second backward."""
    for got, wanted in pool.run(4, _second_order_of_a_look_up):
        same(got[0], wanted[0], "gradient of the gradient")


#: Functions whose gradient is zero everywhere, by which some frameworks lead nothing back.
FLAT: dict[str, Callable[[Any, Any], Any]] = {
    "sign": lambda adapter, x: adapter.sign(x),
    "detach": lambda adapter, x: adapter.detach(x),
}


@spmd.on_mesh()
def _flat_function(mesh: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    adapter, array, weight = get_adapter(), floats(2, 3), floats(3)

    def spread(w: Any) -> Any:
        x = DTensor.from_local(adapter.tensor(array[_part(mesh, array.shape)]), mesh, [Shard(0)], shape=array.shape)
        w = DTensor.from_local(w, mesh, [Replicate()])
        y = FLAT[name](adapter, x * w)
        return (y * w).sum().full_tensor(), y

    def single(w: Any) -> Any:
        y = FLAT[name](adapter, adapter.tensor(array) * w)
        return (y * w).sum(), y

    return adapter.value_and_grads(spread, [weight])[1][0], adapter.value_and_grads(single, [weight])[1][0]


@pytest.mark.parametrize("name", FLAT)
def test_functions_without_gradient(pool: Any, name: str) -> None:
    """Check functions whose results have no gradient, with empty shards on some ranks.

    Backward has the same collectives on all ranks.
    """
    for got, wanted in pool.run(4, _flat_function, name):
        same(got, wanted, "gradient")
