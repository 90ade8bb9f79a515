"""Tensors with one dimension that several mesh dimensions shard in another order than their own.

Tensor parallelism shards first, and data parallelism shards each shard further: on a mesh ("dp", "tp") from right to
left.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.nesting import nest
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_redistribute import run_transition
from hyper_parallel.testing.extent import in_gate

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
SHAPES = [(8, 4), (5, 7), (3, 2), (1, 3)]


def packed(shape: tuple[int, ...]) -> Any:
    return PackedShard(0, (shape[0] - shape[0] // 3, shape[0] // 3))


def parts_of_parts(mesh: Any, over: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    """Check that a nested layout equals distributing each rank's shard once more."""
    adapter, rng = get_adapter(), np.random.default_rng(3)
    inner_mesh, outer_mesh = mesh["tp"], mesh[over]
    for shape in shapes:
        x = rng.standard_normal(shape).astype(np.float32)
        for inner, outer in itertools.product(
            [R, S0, S1, packed(shape)], itertools.product([R, S0, S1], repeat=len(over))
        ):
            what = f"{shape}, {inner} on tp, then {outer} on {over}"
            first = distribute_tensor(adapter.tensor(x), inner_mesh, [inner])
            second = distribute_tensor(first.to_local(), outer_mesh, outer)
            layout = nest(first._layout, outer_mesh, outer, shape)
            assert layout.mesh is mesh and tuple(layout.shape) == shape, what
            mine = adapter.numpy(second.to_local())
            same(mine, x[layout.local_index()], f"{what}: part", 0.0)
            nested = DTensor.from_local(second.to_local(), mesh, layout.placements, shape=shape)
            assert nested._layout is layout, what
            assert DTensor.from_local(nested.to_local(), mesh, nested.placements, shape=nested.shape)._layout is layout
            same(adapter.numpy(nested), x, f"{what}: full_tensor", 0.0)
            again = distribute_tensor(adapter.tensor(x), mesh, layout.placements)
            same(adapter.numpy(again.to_local()), mine, f"{what}: distribute_tensor", 0.0)
            unshared = distribute_tensor(adapter.tensor(x), mesh, layout.placements, src_data_rank=None)
            same(adapter.numpy(unshared.to_local()), mine, f"{what}: distribute_tensor of each rank's own", 0.0)
            assert str(list(layout.placements)) in repr(nested), what


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")], ids=str)
def test_parts_of_parts(pool: Any, names: tuple[str, str]) -> None:
    pool.run(4, on_two_dimensions, names)


def on_two_dimensions(names: tuple[str, str]) -> None:
    parts_of_parts(spmd.device_mesh(2, 2, names=names), ("dp",), SHAPES)


@pytest.mark.parametrize("shape", in_gate([(2, 1, 2), (1, 2, 2), (2, 2, 1)], [(2, 1, 2)]), ids=str)
def test_parts_of_parts_of_parts(pool: Any, shape: tuple[int, ...]) -> None:
    pool.run(4, on_three_dimensions, shape)


def on_three_dimensions(shape: tuple[int, ...]) -> None:
    mesh = spmd.device_mesh(*shape, names=("replicate", "shard", "tp"))
    parts_of_parts(mesh, ("replicate", "shard"), SHAPES[:2])


# ---------------------------------------------------------------- redistribution
PAIRS = [
    ((StridedShard(0, 2), S0), (R, R)),
    ((StridedShard(0, 2), S0), (S0, S0)),
    ((S0, S0), (StridedShard(0, 2), S0)),
    ((R, R), (StridedShard(0, 2), S0)),
    ((R, S0), (StridedShard(0, 2), S0)),
    ((StridedShard(0, 2), S0), (R, S0)),
    ((P, S0), (StridedShard(0, 2), S0)),
    ((StridedShard(1, 2), S1), (S0, S1)),
    ((StridedShard(0, 2), S0), (S1, S0)),
    ((P, P), (StridedShard(1, 2), S1)),
]


@pytest.mark.parametrize("shape", [(8, 12), (5, 7), (3, 2)], ids=str)
def test_order_of_cuts(pool: Any, shape: tuple[int, ...]) -> None:
    """Check value, gradient and placements of redistributions between the natural order of shards and other orders."""
    pool.run(4, transitions, (2, 2), shape, PAIRS)
    sizes = packed(shape)
    nested = [((StridedShard(0, 2), sizes), (R, R)), ((P, sizes), (StridedShard(0, 2), sizes))]
    nested += [((sizes, S0), (R, S0)), ((R, R), (sizes, S0)), ((StridedShard(0, 2), sizes), (R, sizes))]
    pool.run(4, transitions, (2, 2), shape, nested)


@pytest.mark.parametrize("mesh", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_order_of_cuts_on_three_dimensions(pool: Any, mesh: tuple[int, ...]) -> None:
    strided = StridedShard(0, 2)
    pairs = [((strided, R, S0), (R, R, R)), ((R, strided, S0), (S0, R, S0)), ((P, strided, S0), (R, R, S0))]
    if mesh[1] == 1:
        pairs += [((strided, S0, S0), (S0, S0, S0)), ((strided, strided, S0), (R, S1, R))]
    else:
        pairs += [((StridedShard(0, 4), S0, S0), (R, S0, S0)), ((StridedShard(0, 4), strided, S0), (S1, S0, R))]
    for shape in ((7, 3), (2, 5)):
        pool.run(4, transitions, mesh, shape, pairs)


def transitions(mesh: tuple[int, ...], shape: tuple[int, ...], pairs: list) -> None:
    for source, target in pairs:
        try:
            run_transition(mesh, shape, source, target)
        except Exception as error:
            raise AssertionError(f"{source} -> {target}") from error


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        ((StridedShard(0, 2), S0), (R, S0), {"all_gather": 1}, {}),
        ((StridedShard(0, 2), S0), (R, R), {"all_gather": 2}, {}),
        ((P, S0), (StridedShard(0, 2), S0), {"reduce_scatter": 1}, {"all_gather": 1}),
    ],
    ids=str,
)
def test_collectives(pool: Any, source: tuple, target: tuple, forward: dict, backward: dict) -> None:
    for counts in pool.run(4, run_transition, (2, 2), (7, 3), source, target):
        assert counts == {"forward": forward, "backward": backward}


# ---------------------------------------------------------------- refusals
@spmd.on_mesh(2, 2, names=("dp", "tp"))
def refusals(mesh: Any) -> None:
    x = get_adapter().tensor(np.ones((4, 4), np.float32))
    with pytest.raises(
        ValueError, match=r": StridedShard.* on mesh dimension 0 \('dp'\).*split_factor.*use Shard\(0\)"
    ):
        distribute_tensor(x, mesh, [StridedShard(0, 2), R])
    with pytest.raises(ValueError, match="whose sizes multiply to split_factor"):
        distribute_tensor(x, mesh, [S0, S0]).redistribute(placements=[StridedShard(0, 3), S0])
    with pytest.raises(ValueError, match="must be the first placement that shards tensor dimension 0"):
        nest(get_layout(mesh["tp"], (S0,), (4, 4)), mesh["dp"], [PackedShard(0, 2)], (4, 4))
    with pytest.raises(ValueError, match=r"is not the layout of a tensor of shape \(4, 5\)"):
        nest(get_layout(mesh["tp"], (S0,), (4, 4)), mesh["dp"], [S0], (4, 5))
    with pytest.raises(ValueError, match="share a dimension of their root mesh"):
        nest(get_layout(mesh["tp"], (S0,), (4, 4)), mesh["tp"], [S0], (4, 4))
    other = DeviceMesh(None, [0, 2, 1, 3], mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="not slices of one mesh"):
        nest(get_layout(mesh["tp"], (S0,), (4, 4)), other, [S0], (4, 4))
    assert nest(None, mesh["dp"], [S0], (4, 4)) is get_layout(mesh["dp"], (S0,), (4, 4))


def test_refusals(pool: Any) -> None:
    pool.run(4, refusals)
