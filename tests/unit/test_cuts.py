"""Layouts in which several mesh dimensions cut one tensor dimension, in every order: parts, and steps between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.communication.redistribute import redistribution_steps
from hyper_parallel.core.layouts.cuts import as_last_cut, cut_order, in_order
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.testing.extent import in_gate
from tests.unit.rules_harness import mesh_of_rank

MESHES = ((2, 2), (3, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 3, 2))
SIZES = (0, 1, 3, 5, 7, 8, 12, 13)
#: Meshes of steps between layouts. To find the steps takes most of the time, and the gate leaves one mesh out.
STEPPED = ((2, 2), (3, 2), (2, 1, 2), (1, 2, 2), (2, 2, 2))


def cut(elements: np.ndarray, parts: int, rank: int) -> np.ndarray:
    """The result of `torch.chunk`, of one dimension."""
    each = -(-len(elements) // parts)
    return elements[rank * each : (rank + 1) * each]


def packed_cut(elements: np.ndarray, sizes: tuple[int, ...], parts: int, rank: int) -> np.ndarray:
    return np.concatenate([cut(part, parts, rank) for part in np.split(elements, np.cumsum(sizes)[:-1])])


def orders(mesh: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every selection of mesh dimensions in every order."""
    for count in range(1, len(mesh) + 1):
        yield from itertools.permutations(range(len(mesh)), count)


def placed(mesh: tuple[int, ...], order: tuple[int, ...], dim: int = 0, packed: Any = None) -> tuple[Placement, ...]:
    """Placements with which ``order`` cuts ``dim``, the first cut packed in some parts."""
    found: list[Placement] = [Replicate()] * len(mesh)
    for mesh_dim in order:
        found[mesh_dim] = as_last_cut(found, mesh, mesh_dim, dim)
        if packed is not None and mesh_dim == order[0]:
            found[mesh_dim] = PackedShard(dim, packed)
    return tuple(found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_parts_of_every_order(mesh: tuple[int, ...], packed: bool) -> None:
    for order, size in itertools.product(orders(mesh), SIZES):
        sizes = (size // 3 + 1, size - size // 3 - 1) if packed and size > 1 else None
        placements = placed(mesh, order, packed=sizes)
        seen = []
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh))):
            layout = get_layout(mesh_of_rank(mesh, rank), placements, (size, 2))
            mine = np.arange(size)
            for mesh_dim in order:
                if mesh_dim == layout.shard_mesh_dims(0)[-1]:
                    within = len(mine)
                if sizes and mesh_dim == order[0]:
                    mine = packed_cut(mine, sizes, mesh[mesh_dim], coordinate[mesh_dim])
                else:
                    mine = cut(mine, mesh[mesh_dim], coordinate[mesh_dim])
            what = f"{placements}, {size} elements, rank {rank}"
            assert layout.local_shape == (len(mine), 2), what
            assert np.arange(size)[layout.local_index()[0]].tolist() == mine.tolist(), what
            assert all(length for _, length in layout.local_ranges()[0]) or len(layout.local_ranges()[0]) == 1 or packed
            if 1 not in mesh:
                assert layout.shard_mesh_dims(0) == order, what
                assert layout.size_within(0, order[-1]) == within, what
                assert sizes or not len(mine) or layout.local_offset[0] == mine[0], what
            assert len(mine) in layout.part_sizes(0), what
            seen.append(len(mine))
        assert set(seen) == layout.part_sizes(0)


def test_placements_say_the_order() -> None:
    """Two orders never have the same placements, unless they cut in the same way."""
    for mesh in MESHES:
        parts: dict[tuple, tuple] = {}
        for order in orders(mesh):
            placements, cutting = placed(mesh, order), tuple(d for d in order if mesh[d] > 1)
            assert parts.setdefault(placements, cutting) == cutting, f"{mesh}: {placements}"
            assert cut_order(placements, mesh, 0) is not None


def test_any_dimension_may_come_first() -> None:
    two_dims = (StridedShard(0, 2), StridedShard(1, 3), Shard(1), Shard(0))
    assert in_order(two_dims, (2, 2, 3, 2)) == (3, 2, 1, 0)
    assert in_order((Replicate(), Partial(), Shard(1)), (2, 2, 2)) == (0, 1, 2)


# ---------------------------------------------------------------- steps of redistribution
def every_layout(mesh: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """All placements on a mesh, with cuts in every order, one of them perhaps packed."""
    found = {(Replicate(),) * len(mesh)}
    for order in orders(mesh):
        parts = (shape[0] // 3 + 1, shape[0] - shape[0] // 3 - 1)
        for packed in (None, parts):
            cuts = placed(mesh, order, 0, packed)
            found.add(cuts)
            for rest in range(len(mesh)):
                if cuts[rest].is_replicate():
                    found.add((*cuts[:rest], Shard(1), *cuts[rest + 1 :]))
                    found.add((*cuts[:rest], Partial(), *cuts[rest + 1 :]))
    return sorted(found, key=repr)


def owned(layout: Layout) -> np.ndarray:
    return np.arange(math.prod(layout.shape)).reshape(layout.shape)[layout.local_index()]


@pytest.mark.parametrize("shape", in_gate([(7, 4), (3, 5)], [(3, 5)]), ids=str)
@pytest.mark.parametrize("mesh", in_gate(STEPPED, [mesh for mesh in STEPPED if mesh[0] > 1]), ids=str)
def test_steps_between_every_two_layouts(mesh: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """The parts that a step gathers, cuts or exchanges lead from the ranks' old shards to the new ones."""
    ranks = [mesh_of_rank(mesh, rank) for rank in range(math.prod(mesh))]
    layouts = every_layout(mesh, shape)
    targets = [t for t in layouts if not any(p.is_partial() for p in t)]
    if len(mesh) == 3:
        layouts, targets = layouts[::5], targets[::3]
    for source, target in itertools.product(layouts, targets):
        ways = [redistribution_steps(get_layout(m, source, shape), get_layout(m, target, shape)) for m in ranks]
        assert len({tuple(map(type, way)) for way in ways}) == 1
        before = [get_layout(m, source, shape) for m in ranks]
        for steps in zip(*ways, strict=True):
            after, what = [step.layout for step in steps], f"{source} -> {target}: {steps[0].layout.placements}"
            for rank, step in enumerate(steps):
                row = [int(r) for r in ranks[rank].ranks_along(step.mesh_dim)]
                for placement, sizes, layouts_there in (
                    (step.source, step.source_sizes, before),
                    (step.target, step.target_sizes, after),
                ):
                    if isinstance(placement, Shard):
                        assert sizes == tuple(layouts_there[r].local_shape[placement.dim] for r in row), what
                if isinstance(step.source, Shard) and step.target.is_replicate():
                    together = np.concatenate([owned(before[r]) for r in row], step.source.dim)
                    if isinstance(step.source, PackedShard):
                        together = np.sort(together, step.source.dim)
                    assert together.tolist() == owned(after[rank]).tolist(), what
                if isinstance(step.target, Shard) and not isinstance(step.source, Shard):
                    together = np.concatenate([owned(after[r]) for r in row], step.target.dim)
                    if isinstance(step.target, PackedShard):
                        together = np.sort(together, step.target.dim)
                    assert together.tolist() == owned(before[rank]).tolist(), what
            before = after
        assert [layout.placements for layout in before] == [target] * len(ranks)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((StridedShard(0, 2), Replicate()), r": StridedShard.*mesh dimension 0.*split_factor.*use Shard\(0\)$"),
        ((StridedShard(0, 3), Shard(0)), r"\(3, 2\): use Shard\(0\), or StridedShard\(dim=0, split_factor=2\)"),
        ((Shard(0), StridedShard(0, 3)), r"mesh dimension 1.*use Shard\(0\)$"),
        (
            (Shard(0), PackedShard(0, (4, 4))),
            r"PackedShard.*must be the first placement that shards tensor dimension 0",
        ),
        ((PackedShard(0, (4, 4)), PackedShard(0, (4, 4))), "at most one placement may be a PackedShard"),
        ((PackedShard(0, (4, 4)), PackedShard(1, (1, 1))), "at most one placement may be a PackedShard"),
    ],
    ids=str,
)
def test_no_such_order(placements: tuple[Placement, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_layout(mesh_of_rank((3, 2), 0), placements, (8, 2))


def test_placement() -> None:
    strided = StridedShard(-1, split_factor=2)
    assert strided is StridedShard(-1, 2) is not StridedShard(-1, 4)
    assert strided.with_dim(1) is StridedShard(1, 2) and strided.is_shard() and strided.is_shard(-1)
    assert repr(strided) == "StridedShard(dim=-1, split_factor=2)"
    assert get_layout(mesh_of_rank((3, 2), 0), (strided, Shard(1)), (8, 2)).placements == (StridedShard(1, 2), Shard(1))
    assert get_layout(mesh_of_rank((3,), 0), (StridedShard(-1, 1),), (8, 2)).placements == (Shard(1),)
    for wrong in ((0, True), ("0", 2), (0, 2.0)):
        with pytest.raises(TypeError, match="StridedShard"):
            StridedShard(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="StridedShard"):
        StridedShard(0, 0)
