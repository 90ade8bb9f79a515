"""Gradients of gradients for leaves of every placement, compared with the plain program.

A user treats the gradient of a leaf as docs/gradients.md says. For a sum or an average, all ranks have the same
gradient. For an extreme value or a product, each rank has a different gradient.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, Partial, Replicate, Shard
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.extent import in_gate, on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
SUM, AVG = Partial(), Partial("avg")
MESHES = [(1,), (2,), (3,), (2, 2)]
#: The use of the leaf before the loss, by the placement that it is brought to, None for its own.
BROUGHT_TO = [None, R, S0]


def parts_of(x: np.ndarray, layout: Any) -> tuple[np.ndarray, int]:
    """Return this rank's local tensor of ``x``, and the number of ranks over which it is averaged.

    Partial values differ between ranks.
    """
    mesh, rng, count = layout.mesh, np.random.default_rng(3), 1
    mine = x
    for mesh_dim, placement in enumerate(layout.placements):
        if placement.is_partial():
            size = mesh.shape[mesh_dim]
            parts = rng.standard_normal((size, *x.shape)).astype(np.float32)
            if placement is AVG:
                count *= size
                parts[-1] += mine * size - parts.sum(0)
            else:
                parts[-1] += mine - parts.sum(0)
            mine = parts[mesh.get_coordinate()[mesh_dim]]
    return np.ascontiguousarray(mine[layout.local_index()]), count


def run_leaf(mesh_shape: tuple[int, ...], shape: tuple[int, int]) -> None:
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter = get_adapter()
    x, w, c, v = floats(*shape), floats(5, shape[1]), floats(shape[0], 5), floats(*shape)

    def loss(x: Any, w: Any, c: Any) -> Any:
        return adapter.weighted_sum(adapter.tanh(adapter.linear(x, w)), c)

    for placements in itertools.product((R, S0, S1, SUM, AVG), repeat=len(mesh_shape)):
        layout = get_layout(mesh, placements, x.shape)
        local, averaged = parts_of(x, layout)

        def combined(g: Any, averaged: int = averaged) -> Any:
            g = g * (1.0 / averaged)
            return adapter.weighted_sum(g * g, adapter.tensor(v))

        (wanted,) = adapter.second_order(lambda x: loss(x, adapter.tensor(w), adapter.tensor(c)), combined, [x])
        wanted = wanted / averaged
        for target in BROUGHT_TO:

            def sharded(x: Any, placements: Any = placements, target: Any = target) -> Any:
                x = DTensor.from_local(x, mesh, placements, shape=shape)
                if target is not None:
                    x = x.redistribute(placements=[target] * mesh.ndim)
                others = (DTensor.from_local(adapter.tensor(a), mesh) for a in (w, c))
                return loss(x, *others).full_tensor()

            def combined_sharded(g: Any, layout: Any = layout) -> Any:
                g = DTensor.from_local(g, mesh, layout.cotangent.placements, shape=shape)
                return adapter.weighted_sum(g * g, DTensor.from_local(adapter.tensor(v), mesh)).full_tensor()

            (got,) = adapter.second_order(sharded, combined_sharded, [local])
            same(got, wanted[layout.cotangent.local_index()], f"{placements} brought to {target}", tolerance=1e-4)


@pytest.mark.parametrize("shape", in_gate([(4, 6), (5, 3)], [(5, 3)]), ids=["even", "uneven"])
@pytest.mark.parametrize("mesh", in_gate(MESHES, [(3,), (2, 2)]), ids=str)
def test_leaf(pool: Any, mesh: tuple[int, ...], shape: tuple[int, int]) -> None:
    pool.run(int(np.prod(mesh)), run_leaf, mesh, shape)


def run_chosen(mesh_shape: tuple[int, ...], ops: tuple[str, ...]) -> None:
    """Check extreme values and products.

    Each rank gets a gradient of its own value. So the plain program has one leaf for each rank's value.
    """
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter, size = get_adapter(), int(np.prod(mesh_shape))
    leaves = [floats(3, 4) * 0.5 + np.float32(0.1 * i) for i in range(size)]
    leaves[-1][0] = leaves[0][0]  # a tie, between ranks that differ in every mesh dimension
    weights = [floats(3, 4) + np.float32(i) for i in range(size)]
    c = floats(3, 4) + 2
    # The reduction of the parts, as a product with the derivative of the reduction by each: constant for extreme
    # values.
    stacked = np.stack(leaves).reshape(*mesh_shape, 3, 4)
    shares = np.ones_like(stacked)
    reduced = stacked
    for mesh_dim in reversed(range(mesh.ndim)):
        best = getattr(np, ops[mesh_dim])(reduced, axis=mesh_dim, keepdims=True)
        share = (reduced == best).astype(np.float32)
        shares *= share / share.sum(mesh_dim, keepdims=True)
        reduced = best
    shares = shares.reshape(size, 3, 4)

    def plain(*xs: Any) -> Any:
        # Where ranks tie their values are equal, so a weighted sum with the shares is the extreme value.
        y = xs[0] * adapter.tensor(shares[0])
        for x, share in zip(xs[1:], shares[1:], strict=True):
            y = y + x * adapter.tensor(share)
        return adapter.weighted_sum(y * y * y, adapter.tensor(c))

    def combine(*gs: Any) -> Any:
        total = adapter.weighted_sum(gs[0] * gs[0], adapter.tensor(weights[0]))
        for g, w in zip(gs[1:], weights[1:], strict=True):
            total = total + adapter.weighted_sum(g * g, adapter.tensor(w))
        return total

    def sharded(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [Partial(op) for op in ops]).redistribute(placements=[R] * mesh.ndim)
        return adapter.weighted_sum(y * y * y, DTensor.from_local(adapter.tensor(c), mesh)).full_tensor()

    def combine_sharded(g: Any) -> Any:
        mine = adapter.weighted_sum(g * g, adapter.tensor(weights[mesh.platform.rank()]))
        return DTensor.from_local(mine, mesh, [SUM] * mesh.ndim).full_tensor()

    wanted = adapter.second_order(plain, combine, leaves)
    (got,) = adapter.second_order(sharded, combine_sharded, [leaves[mesh.platform.rank()]])
    same(got, wanted[mesh.platform.rank()], f"Partial of {ops}", tolerance=1e-4)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("mesh", in_gate(MESHES, [(3,), (2, 2)]), ids=str)
def test_chosen_values(pool: Any, mesh: tuple[int, ...], op: str) -> None:
    pool.run(int(np.prod(mesh)), run_chosen, mesh, (op,) * len(mesh))


@spmd.on_mesh()
def summands_outside(mesh: Any) -> None:
    """Check a partial sum that the user converts to a plain tensor, reduces by hand and differentiates twice."""
    adapter, size = get_adapter(), mesh.size()
    x, w = floats(4, 6), floats(5, 6)
    layout = get_layout(mesh, (S1,), x.shape)

    def loss(y: Any) -> Any:
        return adapter.sum(adapter.tanh(y))

    def combine(g: Any) -> Any:
        return adapter.sum(g * g)

    def sharded(x: Any) -> Any:
        x = DTensor.from_local(x, mesh, [S1], shape=(4, 6))
        w_ = DTensor.from_local(adapter.tensor(w), mesh)
        y = adapter.linear(x, w_)
        assert size == 1 or y.placements == (SUM,)
        local = y.to_local()
        # By hand: through a tensor of this rank's own that is reduced again.
        return loss(DTensor.from_local(local, mesh, y.placements).full_tensor())

    (wanted,) = adapter.second_order(lambda x: loss(adapter.linear(x, adapter.tensor(w))), combine, [x])
    (got,) = adapter.second_order(
        sharded,
        lambda g: combine(DTensor.from_local(g, mesh, [S1], shape=(4, 6))).full_tensor(),
        [np.ascontiguousarray(x[layout.local_index()])],
    )
    same(got, wanted[layout.local_index()], "second order through to_local", tolerance=1e-4)


@on_ranks(1, 2, 3)
def test_summands_outside_of_dtensors(pool: Any, world_size: int) -> None:
    pool.run(world_size, summands_outside)


@spmd.on_mesh()
def average(mesh: Any) -> None:
    """Check the first gradient of an average of plain tensors, which is the loss itself."""
    adapter, size = get_adapter(), mesh.size()
    x = floats(3, 4) + mesh.get_local_rank()
    weights = floats(3, 4)

    def of_average(x: Any) -> Any:
        y = DTensor.from_local(x, mesh, [AVG])
        return adapter.weighted_sum(y, DTensor.from_local(adapter.tensor(weights), mesh)).full_tensor(), y

    _, (grad,) = adapter.value_and_grads(of_average, [x])
    same(grad, weights / size, "gradient of the parts of an average")


@on_ranks(1, 2, 3)
def test_average_of_parts(pool: Any, world_size: int) -> None:
    pool.run(world_size, average)


@spmd.on_mesh()
def reduced_loss(mesh: Any, op: str) -> None:
    """Check that a partial loss counts as its global value."""
    adapter, size, rank = get_adapter(), mesh.size(), mesh.get_local_rank()
    x = floats(3, 4) + rank

    def loss(x: Any) -> Any:
        y = DTensor.from_local(adapter.sum(x * x), mesh, [Partial(op)])
        assert y.placements == (Partial(op),)
        return y, y

    y, (grad,) = adapter.value_and_grads(loss, [x])
    losses = [float((np.square(floats(3, 4) + i)).sum()) for i in range(size)]
    reduce = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min}[op]
    same(adapter.numpy(y), np.float32(reduce(losses)), "loss")
    share = {"sum": 1.0, "avg": 1 / size}.get(op, float(losses[rank] == reduce(losses)))
    same(grad, 2 * x * np.float32(share), f"gradient of a loss that is {Partial(op)}")


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@on_ranks(1, 2, 3)
def test_loss_to_be_reduced(pool: Any, world_size: int, op: str) -> None:
    pool.run(world_size, reduced_loss, op)
