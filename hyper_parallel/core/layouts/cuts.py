"""The order in which mesh dimensions split a tensor dimension, and the resulting shard of each rank.

Placements define the order (see `StridedShard`). A plain shard splits before all mesh dimensions to its right. A
strided shard splits after the mesh dimensions to its right whose sizes multiply to its factor. A packed shard splits
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hyper_parallel.core.layouts.chunking import chunk_sizes, packed_ranges
from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Shard, StridedShard


@lru_cache(maxsize=4096)
def cut_order(placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], dim: int) -> tuple[int, ...] | None:
    """Return the mesh dimensions that shard tensor dimension ``dim``, in the order of their splits. Return None if the
    placements contradict each other.

    Example:
        >>> from hyper_parallel import Shard, StridedShard
        >>> cut_order((StridedShard(0, 2), Shard(0)), (3, 2), 0)
        (1, 0)
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        placement = placements[mesh_dim]
        if placement.is_shard(dim):
            factor = placement.split_factor if isinstance(placement, StridedShard) else 1
            fitting = [n for n, product in enumerate(_products(order, mesh_shape)) if product == factor]
            if not fitting:
                return None
            # Splits over one rank change nothing. A strided split comes after them, so that a new split is the last
            # one.
            order.insert(0 if factor == 1 else fitting[-1], mesh_dim)
    for mesh_dim in order[1:]:
        if isinstance(placements[mesh_dim], PackedShard):
            if mesh_shape[mesh_dim] > 1:
                return None
            order.remove(mesh_dim)
            order.insert(0, mesh_dim)
            break
    return tuple(order)


def strided_factors(placements: Sequence[Placement], mesh_shape: Sequence[int], mesh_dim: int, dim: int) -> list[int]:
    """Return the valid factors of a `StridedShard` of ``dim`` on ``mesh_dim``, from the placements to its right."""
    right = cut_order(tuple(placements[mesh_dim + 1 :]), tuple(mesh_shape[mesh_dim + 1 :]), dim) or ()
    return sorted({*_products(right, mesh_shape[mesh_dim + 1 :])} - {1})


def _products(order: Sequence[int], mesh_shape: Sequence[int]) -> list[int]:
    """Return the products of the sizes of the first 0, 1, ... mesh dimensions in ``order``."""
    products = [1]
    for mesh_dim in order:
        products.append(products[-1] * mesh_shape[mesh_dim])
    return products


def as_last_cut(placements: Sequence[Placement], mesh_shape: Sequence[int], mesh_dim: int, dim: int) -> Shard:
    """Return the placement with which ``mesh_dim`` splits tensor dimension ``dim`` after all other mesh dimensions."""
    factor = 1
    for other in range(mesh_dim + 1, len(placements)):
        if placements[other].is_shard(dim):
            factor *= mesh_shape[other]
    return Shard(dim) if factor == 1 else StridedShard(dim, factor)


@lru_cache(maxsize=4096)
def in_order(placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return all mesh dimensions, in an order that respects the split order of each tensor dimension.

    Example:
        >>> from hyper_parallel import Replicate, Shard, StridedShard
        >>> in_order((StridedShard(0, 2), Replicate(), Shard(0)), (3, 4, 2))
        (2, 1, 0)
    """
    order = list(range(len(placements)))
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        cuts = cut_order(placements, mesh_shape, dim) or ()
        for place, mesh_dim in zip(sorted(cuts), cuts, strict=True):
            order[place] = mesh_dim
    return tuple(order)


def ranges_of(
    size: int,
    cuts: Sequence[int],
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Return the (start, length) ranges of a dimension of ``size`` elements that the rank at ``coordinate`` holds.

    ``cuts`` are the mesh dimensions that split it, in order. There is one range, unless the dimension is packed.

    Example:
        >>> from hyper_parallel import PackedShard, StridedShard
        >>> ranges_of(8, (1, 0), (StridedShard(0, 2), PackedShard(0, (6, 2))), (2, 2), (0, 1))
        ((3, 2),)
        >>> ranges_of(8, (1, 0), (StridedShard(0, 2), PackedShard(0, (6, 2))), (2, 2), (1, 1))
        ((5, 1), (7, 1))
    """
    pieces = [(0, size)]
    for mesh_dim in cuts:
        placement, parts, rank = placements[mesh_dim], mesh_shape[mesh_dim], coordinate[mesh_dim]
        if isinstance(placement, PackedShard):
            pieces = list(packed_ranges(placement, rank, parts))
        else:
            sizes = chunk_sizes(sum(length for _, length in pieces), parts)
            pieces = _within(pieces, sum(sizes[:rank]), sizes[rank])
    return tuple(pieces)


def _within(pieces: list[tuple[int, int]], start: int, length: int) -> list[tuple[int, int]]:
    """Return the elements ``start`` to ``start + length`` of the concatenated ranges ``pieces``, as ranges."""
    if len(pieces) == 1:
        return [(pieces[0][0] + start, length)]
    found, position = [], 0
    for begin, size in pieces:
        first, last = max(start, position), min(start + length, position + size)
        if first < last:
            found.append((begin + first - position, last - first))
        position += size
    return found or [(0, 0)]
