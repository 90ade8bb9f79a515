"""Fast paths of linear layers on plain tensors: the results are the same as on the general path."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    get_platform,
    parallelize_module,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.conformance.test_dtensor import split_counts
from hyper_parallel.testing.extent import on_ranks

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def both(mesh: Any) -> tuple[Any, Any]:
    """Return a model and its parallelised copy."""
    adapter = get_adapter()
    single, sharded = (adapter.load(adapter.Mlp(6, 12), np.random.default_rng(5)) for _ in range(2))
    return single, parallelize_module(sharded, mesh, PLAN)


@spmd.on_mesh()
def identity(mesh: Any) -> None:
    adapter = get_adapter()
    single, sharded = both(mesh)
    x = adapter.tensor(floats(3, 6))
    wanted = adapter.numpy(adapter.call(single, x))
    assert isinstance(sharded.up, type(single.up))
    assert type(sharded.up).__name__ == type(single.up).__name__
    assert get_platform().is_linear_module(sharded.up)

    # A copy computes with its own parameters.
    other = copy.deepcopy(sharded)
    adapter.load(sharded, np.random.default_rng(9))
    same(adapter.numpy(adapter.call(other, x)), wanted, "output of the copy")
    assert np.abs(adapter.numpy(adapter.call(sharded, x)) - wanted).max() > 0.01

    # Hooks see the caller's arguments and results.
    seen: list[Any] = []
    get_platform().register_forward_pre_hook(other.up, lambda module, args: seen.append(args[0]))
    get_platform().register_forward_hook(other.up, lambda module, args, output: seen.append(output))
    same(adapter.numpy(adapter.call(other, x)), wanted, "output with hooks")
    assert len(seen) == 2
    assert not any(isinstance(value, DTensor) for value in seen)


@on_ranks(1, 2)
def test_module_stays_what_it_is(pool: Any, world_size: int) -> None:
    """Check copies, classes and hooks of a module with a fast path."""
    pool.run(world_size, identity)


@spmd.on_mesh()
def gradients_of_gradients(mesh: Any) -> None:
    adapter = get_adapter()
    single, sharded = both(mesh)
    weights = adapter.tensor(floats(3, 6) + 1)

    def loss(model: Any) -> Callable[[Any], Any]:
        return lambda x: adapter.weighted_sum(adapter.tanh(adapter.call(model, x)), weights)

    def combine(gradient: Any) -> Any:
        return adapter.weighted_sum(gradient, gradient)

    (wanted,) = adapter.second_order(loss(single), combine, [floats(3, 6)])
    (found,) = adapter.second_order(loss(sharded), combine, [floats(3, 6)])
    same(found, wanted, "gradient of the squared gradient")


@on_ranks(1, 2, 3, 4)
def test_gradients_of_gradients(pool: Any, world_size: int) -> None:
    """Check that the collectives of backward are differentiable."""
    pool.run(world_size, gradients_of_gradients)


@spmd.on_mesh()
def mixed_calls(mesh: Any) -> None:
    """Check alternating plain and distributed inputs of one module. The fast path and the general path share
    collectives."""
    adapter = get_adapter()
    single, sharded = both(mesh)
    x = adapter.tensor(floats(3, 6))
    wanted = adapter.numpy(adapter.call(single, x))
    many = {"all_reduce": 1} if mesh.size() > 1 else {}
    for given in (x, DTensor.from_local(x, mesh, [Replicate()]), x):
        with CommDebugMode() as comm:
            y = adapter.call(sharded, given)
        same(adapter.numpy(y), wanted, "output")
        assert comm.get_comm_counts() == many


@on_ranks(1, 2, 3, 4)
def test_plain_and_distributed_inputs(pool: Any, world_size: int) -> None:
    """Check that one module accepts both kinds of inputs."""
    pool.run(world_size, mixed_calls)


@spmd.on_mesh()
def styled_and_not(mesh: Any) -> None:
    """Check a styled layer and a user's operation that read one tensor: backward has one all-reduce for both."""
    adapter = get_adapter()
    single, sharded = both(mesh)
    weight = floats(8, 6)

    def loss(model: Any, wrap: Callable[[Any], Any], w: Any) -> Callable[[Any], Any]:
        def function(x: Any) -> tuple[Any, Any]:
            y = adapter.call(model.up, x)
            z = adapter.square(adapter.linear(wrap(x), w))
            total = adapter.sum(adapter.square(y)) + (
                adapter.sum(z).full_tensor() if isinstance(z, DTensor) else adapter.sum(z)
            )
            return total, y

        return function

    _, (wanted,) = adapter.value_and_grads(loss(single, lambda x: x, adapter.tensor(weight)), [floats(3, 6)])
    w = distribute_tensor(adapter.tensor(weight), mesh, [Shard(0)])
    whole = loss(sharded, lambda x: DTensor.from_local(x, mesh, [Replicate()]), w)
    _, (found,), _, backward = split_counts(whole, [floats(3, 6)])
    same(found, wanted, "gradient of the input")
    assert backward == ({"all_reduce": 1} if mesh.size() > 1 else {})


@on_ranks(1, 2, 4)
def test_styled_and_not(pool: Any, world_size: int) -> None:
    pool.run(world_size, styled_and_not)


@spmd.on_mesh()
def norm_along_the_shards(mesh: Any) -> None:
    """Check that a norm over a sharded dimension is dispatched, because it cannot run on shards."""
    adapter = get_adapter()
    single, sharded = (adapter.load(adapter.norm_module(12), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, SequenceParallel(sequence_dim=-1))
    array = floats(3, 12)
    wanted = adapter.numpy(adapter.call(single, adapter.tensor(array)))
    part = array[get_layout(mesh, (Shard(1),), array.shape).local_index()]
    for x in (adapter.tensor(part), DTensor.from_local(adapter.tensor(part), mesh, [Shard(1)])):
        same(adapter.numpy(adapter.call(sharded, x).full_tensor()), wanted, "output")


@on_ranks(1, 2, 3)
def test_norm_along_the_shards(pool: Any, world_size: int) -> None:
    """Check values for plain and distributed inputs."""
    pool.run(world_size, norm_along_the_shards)
