"""Views of shards: programs pass local sizes to operations, and sharding rules need global sizes."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Shard
from hyper_parallel.core.operations.strategy import solve
from hyper_parallel.core.plain_code.marks import Lost, Mark, Ways, is_even
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.platform.indexing import FULL_SLICE, region_of

RESHAPES = frozenset({"reshape", "view", "reshape_copy"})


def reshaped(mark: Mark, before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Mark, ...]:
    """Return the possible placements of a shard after a reshape from local shape ``before`` to ``after``.

    Each dimension of the result is tried as the sharded dimension. The placements are those for which the rule needs no
    redistribution. The result is empty for a reshape that mixes shards.
    """
    layout = mark.layout
    cut = [d for d in range(layout.ndim) if layout.shard_count(d) > 1]
    if not cut:
        return (Mark(get_layout(layout.mesh, layout.placements, after), mark.summed),)
    if mark.merged:
        return tuple(_by_blocks(mark, before, after, cut[0]))
    rule = OPERATIONS["reshape"].rule
    found = []
    for dims in itertools.product(range(len(after)), repeat=len(cut)):
        whole = list(after)
        for d, j in zip(cut, dims, strict=True):
            whole[j] *= layout.shard_count(d)
        if 0 in before:
            continue
        sharding = rule((tuple(layout.shape),), (tuple(whole),))
        strategy = None if sharding is None else solve(sharding, (layout,), layout.mesh)
        if strategy is None or strategy.operands[0] is not layout:
            continue
        result: Any = strategy.results[0]
        if tuple(result.local_shape) == tuple(after) and is_even(result):
            found.append(Mark(result, mark.summed))
    if len(cut) == 1:
        found += _by_blocks(mark, before, after, cut[0])
    return tuple(dict.fromkeys(found))


def _by_blocks(mark: Mark, before: tuple[int, ...], after: tuple[int, ...], dim: int) -> list[Mark]:
    """Return the placements after a reshape of a tensor that is sharded along ``dim`` only.

    In row-major order, each rank has consecutive blocks of elements. A dimension of the result is sharded if it ends
    where a block ends. If such a dimension covers several blocks, outer dimensions were merged into it, as (batch,
    heads) into (batch * heads).
    """
    if any(isinstance(p, PackedShard) for p in mark.layout.placements):
        return []
    rows = mark.merged or before[dim]
    block = rows * math.prod(before[dim + 1 :])
    found = []
    for j, size in enumerate(after):
        inside = math.prod(after[j + 1 :])
        if size * inside == block:
            found.append(_cut(mark, after, j, 0))
        elif size * inside % block == 0 and block % inside == 0 and (block > inside or rows == 1):
            found.append(_cut(mark, after, j, block // inside))
    return found


def _cut(mark: Mark, shape: tuple[int, ...], dim: int, merged: int) -> Mark:
    """Return the placement of a shard of local ``shape``, sharded along ``dim`` by the mesh dimensions of ``mark``."""
    layout = mark.layout
    whole = list(shape)
    placements = list(layout.placements)
    for d, p in enumerate(placements):
        if isinstance(p, Shard):
            placements[d] = Shard(dim)
            whole[dim] *= layout.mesh.shape[d]
    return Mark(get_layout(layout.mesh, tuple(placements), tuple(whole)), mark.summed, merged)


def resized(mark: Mark, shape: tuple[int, ...]) -> Mark:
    """Return ``mark`` changed to the global shape of a tensor with local ``shape`` and the same placements."""
    layout, whole = mark.layout, list(shape)
    for d, p in enumerate(layout.placements):
        if isinstance(p, Shard):
            whole[p.dim] *= layout.mesh.shape[d]
    return Mark(get_layout(layout.mesh, layout.placements, tuple(whole)), mark.summed, mark.merged)


def of_whole(name: str, static: Any, shape: tuple[int, ...], layout: Layout | None, results: int) -> Any:
    """Return the static arguments of an operation with global sizes in place of local sizes.

    Args:
        name: canonical name of the operation.
        static: its static arguments.
        shape: local shape of the first operand.
        layout: layout of the first operand.
        results: number of results.
    """
    if layout is None or all(not isinstance(p, Shard) for p in layout.placements):
        return static
    cut = {d for d in range(layout.ndim) if layout.shard_count(d) > 1}
    if name == "expand":
        sizes = static[0]
        new = len(sizes) - len(shape)
        kept = (-1 if i - new in cut and s == shape[i - new] else s for i, s in enumerate(sizes))
        return (tuple(kept), *static[1:])
    if name == "split":
        dim = static[1] % max(len(shape), 1)
        if dim in cut and any(isinstance(p, PackedShard) and p.dim == dim for p in layout.placements):
            sizes = static[0] if isinstance(static[0], tuple) else (static[0],) * results
            return (tuple(s * layout.shard_count(dim) for s in sizes), *static[1:])
    if name in ("getitem", "setitem_", "setitem"):
        return (_full_slices(static[0], shape, cut), *static[1:])
    return static


def _full_slices(index: tuple, shape: tuple[int, ...], cut: set[int]) -> tuple:
    """Return an encoded index in which a slice of all local elements of a sharded dimension becomes ``:``."""
    return tuple(
        FULL_SLICE if place.dim in cut and place.is_slice and place.picked == range(shape[place.dim]) else place.item
        for place in region_of(index, shape)
    )


def taken_along(index: tuple, shape: tuple[int, ...], dim: int) -> range | None:
    """Return the elements along ``dim`` that an encoded index takes as a slice.

    Return None if the index does not take all elements of all other dimensions.
    """
    taken = None
    for place in region_of(index, shape):
        if not place.is_slice or place.dim is None or place.picked is None:
            return None
        if place.dim == dim:
            taken = place.picked
        elif place.picked != range(shape[place.dim]):
            return None
    return taken


def piece_of_packed(mark: Mark, index: tuple, shape: tuple[int, ...]) -> Mark | None:
    """Return the placement of a slice that takes exactly one part of a `PackedShard`, else None.

    Args:
        mark: mark of the tensor.
        index: encoded index of the tensor.
        shape: local shape of the tensor.
    """
    layout = mark.layout
    cut = [d for d, p in enumerate(layout.placements) if isinstance(p, Shard)]
    packed = layout.placements[cut[0]] if len(cut) == 1 else None
    if not isinstance(packed, PackedShard):
        return None
    (mesh_dim,) = cut
    dim, size, ranks = packed.dim, layout.shape[packed.dim], layout.mesh.shape[mesh_dim]
    sizes: Any = packed.resolve(size).sizes
    ends = [end // ranks for end in itertools.accumulate(sizes, initial=0)]
    pieces = {range(begin, end): whole for begin, end, whole in zip(ends, ends[1:], sizes, strict=False)}
    taken = taken_along(index, shape, dim)
    if taken not in pieces or pieces[taken] == size:
        return None
    placements = (*layout.placements[:mesh_dim], Shard(dim), *layout.placements[mesh_dim + 1 :])
    whole = (*layout.shape[:dim], pieces[taken], *layout.shape[dim + 1 :])
    return Mark(get_layout(layout.mesh, placements, whole), mark.summed)


def marks_of_base(
    ways: tuple[Mark | None, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    base: tuple[int, ...],
    base_strides: tuple[int, ...],
) -> Ways:
    """Return the placements of a tensor after a write to one of its views.

    The sharded dimension of the tensor is the one with the size and stride of the view's sharded dimension.

    Args:
        ways: marks of the view.
        shape, strides: shape and strides of the view.
        base, base_strides: shape and strides of the tensor.
    """
    found = []
    for mark in ways:
        cut = [] if mark is None else [(d, p) for d, p in enumerate(mark.layout.placements) if isinstance(p, Shard)]
        if mark is None or len(cut) != 1:
            continue
        ((mesh_dim, placement),) = cut
        for dim, size in enumerate(base):
            if size == shape[placement.dim] and (base_strides[dim] == strides[placement.dim] or size == 1):
                placements = list(mark.layout.placements)
                placements[mesh_dim] = placement.with_dim(dim)
                whole = list(base)
                whole[dim] = mark.layout.shape[placement.dim]
                found.append(Mark(get_layout(mark.layout.mesh, tuple(placements), tuple(whole))))
    return tuple(dict.fromkeys(found)) or Lost("a view that was written to")
