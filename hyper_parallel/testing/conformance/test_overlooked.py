"""Regression tests for faults that all other checks missed: each fails if one line of the library changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, same, slices_of
from hyper_parallel.testing.extent import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def part(x: np.ndarray, mesh: Any, placement: Any) -> np.ndarray:
    return np.ascontiguousarray(x[slices_of(placement, x.shape, mesh)])


# ---------------------------------------------------------------------- operands without dimensions
@spmd.on_mesh()
def scaled(mesh: Any, placement: Any, distributed: bool) -> None:
    """Check a 0-d scale, such as `logit_scale` of CLIP: each rank computes a partial gradient of it."""
    adapter = get_adapter()
    whole, scale = floats(5, 4), np.array(1.5, np.float32)
    weights = floats(5, 4)[::-1].copy()

    def loss(x: Any, s: Any) -> Any:
        if distributed:
            s = DTensor.from_local(s, mesh, [R])
        y = DTensor.from_local(x, mesh, [placement], shape=whole.shape) * s
        return adapter.weighted_sum(y, DTensor.from_local(adapter.tensor(weights), mesh, [R])).full_tensor(), y

    is_sum = placement.is_partial()
    mine = whole / mesh.size() if is_sum else part(whole, mesh, placement)
    y, grads = adapter.value_and_grads(loss, [mine, scale])
    same(adapter.numpy(y), 1.5 * whole, "product")
    same(grads[0], 1.5 * (weights if is_sum else part(weights, mesh, placement)), "gradient of the tensor")
    same(grads[1], np.sum(whole * weights), "gradient of the scale")


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("placement", [S0, S1, Partial(), R], ids=str)
@on_ranks(2, 3)
def test_gradient_of_a_scale_without_dimensions(pool: Any, world_size: int, placement: Any, distributed: bool) -> None:
    pool.run(world_size, scaled, placement, distributed)


# ---------------------------------------------------------------------- calls that came before
@spmd.on_mesh()
def normalised(mesh: Any) -> None:
    """Check calls that differ only in a number passed by keyword. Each runs twice, so that it is cached."""
    adapter = get_adapter()
    whole, weight, bias = floats(6, 4), floats(4) + 2.0, floats(4)
    x = distribute_tensor(adapter.tensor(whole), mesh, [S0])
    w, b = (distribute_tensor(adapter.tensor(array), mesh, [R]) for array in (weight, bias))
    centred = whole - whole.mean(-1, keepdims=True)
    for epsilon in (1e-5, 0.5, 1e-5, 3.0, 0.5):
        wanted = centred / np.sqrt(whole.var(-1, keepdims=True) + epsilon) * weight + bias
        same(adapter.numpy(adapter.layer_norm(x, w, b, epsilon)), wanted, f"layer norm with epsilon {epsilon}")


@on_ranks(1, 2)
def test_epsilon_of_a_remembered_call(pool: Any, world_size: int) -> None:
    pool.run(world_size, normalised)


# ---------------------------------------------------------------------- caches of a tensor, and writes into it
@spmd.on_mesh()
def written_after_it_was_gathered(mesh: Any) -> None:
    """Check a write to a tensor after an all-gather for two kinds of consumers.

    The second kind must see the new values.
    """
    adapter = get_adapter()
    whole, weight, factor = floats(6, 4), floats(8, 4), floats(6, 4)[::-1] + 2.0
    weights = floats(6, 8)

    def loss(x: Any, w: Any) -> Any:
        y = DTensor.from_local(x, mesh, [S0], shape=whole.shape).redistribute(placements=[R])
        y = adapter.IN_PLACE["mul_"][0](y, DTensor.from_local(adapter.tensor(factor.astype(np.float32)), mesh, [R]))
        # Each rank computes some columns, and a part of the gradient of y.
        z = adapter.linear(y, DTensor.from_local(w, mesh, [S0], shape=weight.shape))
        return adapter.weighted_sum(z, DTensor.from_local(adapter.tensor(weights), mesh, [R])).full_tensor(), z

    z, grads = adapter.value_and_grads(loss, [part(whole, mesh, S0), part(weight, mesh, S0)])
    same(adapter.numpy(z), (whole * factor) @ weight.T, "output", 1e-4)
    same(grads[0], part((weights @ weight) * factor, mesh, S0), "gradient of the gathered tensor", 1e-4)
    same(grads[1], part(weights.T @ (whole * factor), mesh, S0), "gradient of the weight", 1e-4)


@on_ranks(2, 3)
def test_write_after_gathering(pool: Any, world_size: int) -> None:
    pool.run(world_size, written_after_it_was_gathered)


@spmd.on_mesh()
def hooked_after_it_was_gathered(mesh: Any) -> None:
    """Check hooks of a gathered tensor whose consumer computes a part of its gradient on each rank.

    A hook gets the full gradient, and changes it. After such a consumer, a hook is refused.
    """
    adapter = get_adapter()
    whole, weight, weights = floats(6, 4), floats(8, 4), floats(6, 8)
    seen: list[Any] = []

    def loss(x: Any, w: Any) -> Any:
        y = DTensor.from_local(x, mesh, [S0], shape=whole.shape).redistribute(placements=[R])
        y.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
        z = adapter.linear(y, DTensor.from_local(w, mesh, [S0], shape=weight.shape))
        if mesh.size() > 1:
            late = DTensor.from_local(x, mesh, [S0], shape=whole.shape).redistribute(placements=[R])
            z = z + adapter.linear(late, DTensor.from_local(w, mesh, [S0], shape=weight.shape)) * 0.0
            with pytest.raises(
                ValueError, match=r"^register_hook\(\) asks for the gradient of a DTensor of shape \(6, 4\)"
            ):
                late.register_hook(lambda gradient: gradient)
        return adapter.weighted_sum(z, DTensor.from_local(adapter.tensor(weights), mesh, [R])).full_tensor(), z

    _, grads = adapter.value_and_grads(loss, [part(whole, mesh, S0), part(weight, mesh, S0)])
    assert [g.placements for g in seen] == [(R,)]
    same(adapter.numpy(seen[0]), weights @ weight, "gradient that the hook gets", 1e-4)
    same(grads[0], 2 * part(weights @ weight, mesh, S0), "gradient that the hook changed", 1e-4)
    same(grads[1], part(weights.T @ whole, mesh, S0), "gradient of the weight", 1e-4)


@on_ranks(1, 2, 3)
def test_hooks_of_a_gathered_tensor(pool: Any, world_size: int) -> None:
    if not hasattr(get_platform().Tensor, "register_hook"):
        pytest.skip("tensors of this framework have no hooks")
    pool.run(world_size, hooked_after_it_was_gathered)


@spmd.on_mesh()
def written_between_two_layers(mesh: Any, shape: tuple[int, ...]) -> None:
    """Check a plain tensor that is written between reads by two column-parallel layers.

    Each layer reads it through a cached view. The view of the first layer must not be used by the second.
    """
    adapter = get_adapter()
    whole = floats(*shape)
    single, sharded = (adapter.load(adapter.linear_module(shape[-1], 6), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, ColwiseParallel())
    kept = []

    def run(module: Any) -> Any:
        def loss(x: Any) -> Any:
            h = x * 1.0
            kept.append(adapter.call(module, h))  # as long as this lives, the view may
            h = adapter.IN_PLACE["mul_"][0](h, adapter.tensor(np.full(shape, 3.0, np.float32)))
            y = adapter.call(module, h)
            return adapter.sum(adapter.square(y)), y

        return loss

    wanted, (wanted_grad,) = adapter.value_and_grads(run(single), [whole])
    got, (grad,) = adapter.value_and_grads(run(sharded), [whole])
    same(adapter.numpy(got), part(adapter.numpy(wanted), mesh, Shard(len(shape) - 1)), "output")
    same(grad, wanted_grad, "gradient of the input")


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 6)], ids=str)
@on_ranks(1, 2, 3)
def test_write_between_two_layers(pool: Any, world_size: int, shape: tuple[int, ...]) -> None:
    pool.run(world_size, written_between_two_layers, shape)


# ---------------------------------------------------------------------- reductions
@spmd.on_mesh()
def tied(mesh: Any, op: str, target: Any) -> None:
    """Check that ranks whose largest values are equal get equal parts of the gradient, for any number of ranks."""
    adapter = get_adapter()
    size, rank = mesh.size(), mesh.get_local_rank()
    parts = np.random.default_rng(1).integers(-1, 2, (size, 5, 4)).astype(np.float32)
    parts[:, 0] = 1.0  # all of them
    weights = floats(5, 4)
    best = parts.max(0) if op == "max" else parts.min(0)
    chosen = parts == best
    assert {1, size} <= set(chosen.sum(0).ravel().tolist())

    def loss(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [Partial(op)]).redistribute(placements=[target])
        return adapter.weighted_sum(y.to_local(), adapter.tensor(part(weights, mesh, target))), y

    y, (grad,) = adapter.value_and_grads(loss, [parts[rank]])
    same(adapter.numpy(y), best, "value")
    same(grad, weights * chosen[rank] / chosen.sum(0), "gradient")


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("target", [R, S0], ids=str)
@on_ranks(2, 3)
def test_ties(pool: Any, world_size: int, op: str, target: Any) -> None:
    pool.run(world_size, tied, op, target)


@spmd.on_mesh()
def added_to_an_average(mesh: Any) -> None:
    """Check an addition to an average, which divides the addend into n equal parts.

    The gradient of each part is 1/n of the full one.
    """
    adapter = get_adapter()
    size, rank = mesh.size(), mesh.get_local_rank()
    parts = np.random.default_rng(1).standard_normal((size, 4, 3)).astype(np.float32)
    bias, weights = floats(4, 3), floats(4, 3)[::-1].copy()

    def loss(x: Any, b: Any) -> Any:
        y = DTensor.from_local(x, mesh, [Partial("avg")]) + DTensor.from_local(b, mesh, [R])
        assert y.placements == (Partial("avg"),)
        return adapter.weighted_sum(y.redistribute(placements=[R]).to_local(), adapter.tensor(weights)), y

    y, grads = adapter.value_and_grads(loss, [parts[rank], bias])
    same(adapter.numpy(y), parts.mean(0) + bias, "sum")
    same(grads[0], weights / size, "gradient of a part of the average")
    same(grads[1], weights, "gradient of the added tensor")


@on_ranks(2, 3)
def test_what_is_added_to_an_average(pool: Any, world_size: int) -> None:
    pool.run(world_size, added_to_an_average)


# ---------------------------------------------------------------------- embedding and attention
@spmd.on_mesh()
def padded(mesh: Any, padding: int, placement: Any) -> None:
    """Check that the row of the padding index gets no gradient, for positive and negative indices, on any rank."""
    adapter = get_adapter()
    vocabulary = 7
    weight, weights = floats(vocabulary, 4), floats(2, 9, 4)
    ids = np.array([[0, 6, 1, 5, 2, 4, 3, 6, 0], [3, 5, 5, 1, 6, 0, 2, 2, 4]], np.int64)
    wanted = np.zeros_like(weight)
    np.add.at(wanted, ids, weights)
    wanted[padding] = 0.0

    def loss(w: Any) -> Any:
        table = DTensor.from_local(w, mesh, [placement], shape=weight.shape)
        y = adapter.padded_embedding(DTensor.from_local(adapter.tensor(ids), mesh, [R]), table, padding)
        return adapter.weighted_sum(y, DTensor.from_local(adapter.tensor(weights), mesh, [R])).full_tensor(), y

    y, (grad,) = adapter.value_and_grads(loss, [part(weight, mesh, placement)])
    same(adapter.numpy(y), weight[ids], "rows")
    same(grad, part(wanted, mesh, placement), "gradient of the weight")


@pytest.mark.parametrize("padding", [0, 3, -1, -7])
@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
@on_ranks(2, 3)
def test_padding_from_either_end(pool: Any, world_size: int, placement: Any, padding: int) -> None:
    pool.run(world_size, padded, padding, placement)


@spmd.on_mesh()
def few_heads(mesh: Any, dim: int) -> Any:
    """Check attention with fewer heads, or fewer batch elements, than ranks."""
    adapter = get_adapter()
    arrays = [np.random.default_rng(i).standard_normal((2, 2, 5, 4)).astype(np.float32) for i in range(4)]
    *inputs, weights = arrays

    def reference(*xs: Any) -> Any:
        y = adapter.attention(*xs)
        return adapter.weighted_sum(y, adapter.tensor(weights)), y

    def sharded(*xs: Any) -> Any:
        y = adapter.attention(*(DTensor.from_local(x, mesh, [Shard(dim)], shape=weights.shape) for x in xs))
        return adapter.weighted_sum(y, DTensor.from_local(adapter.tensor(weights), mesh, [R])).full_tensor(), y

    wanted, wanted_grads = adapter.value_and_grads(reference, inputs)
    got, grads = adapter.value_and_grads(sharded, [part(x, mesh, Shard(dim)) for x in inputs])
    same(adapter.numpy(got), adapter.numpy(wanted), "output")
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        same(grad, part(wanted_grad, mesh, Shard(dim)), "gradient")
    return got.placements


@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
@on_ranks(2, 3)
def test_attention_with_fewer_heads_than_ranks(pool: Any, world_size: int, dim: int) -> None:
    pool.run(world_size, few_heads, dim)
