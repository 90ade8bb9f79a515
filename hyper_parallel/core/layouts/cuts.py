"""The order in which mesh dimensions cut a tensor dimension, and the pieces of each rank.

Placements say the order (see `StridedShard`). A plain shard cuts before everything to its right. A strided one cuts
after the mesh dimensions to its right whose sizes multiply to its factor. A packed one cuts first of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hyper_parallel.core.layouts.chunking import chunk_sizes, packed_ranges
from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Shard, StridedShard


@lru_cache(maxsize=4096)
def cut_order(placements: tuple[Placement, ...], mesh_shape: tuple[int, ...], dim: int) -> tuple[int, ...] | None:
    """The mesh dimensions that shard tensor dimension ``dim``, the first cut first; None where no order fits.

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
            # Cuts over one rank change nothing. A strided cut is counted after them, so that a new cut is the last one.
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
    """Return the possible factors of a `StridedShard` of ``dim`` on ``mesh_dim``, with the placements to its right."""
    right = cut_order(tuple(placements[mesh_dim + 1 :]), tuple(mesh_shape[mesh_dim + 1 :]), dim) or ()
    return sorted({*_products(right, mesh_shape[mesh_dim + 1 :])} - {1})


def _products(order: Sequence[int], mesh_shape: Sequence[int]) -> list[int]:
    """Return the products of the sizes of the first 0, 1, ... mesh dimensions of ``order``."""
    products = [1]
    for mesh_dim in order:
        products.append(products[-1] * mesh_shape[mesh_dim])
    return products


def as_last_cut(placements: Sequence[Placement], mesh_shape: Sequence[int], mesh_dim: int, dim: int) -> Shard:
    """The placement with which ``mesh_dim`` cuts tensor dimension ``dim`` after all others."""
    factor = 1
    for other in range(mesh_dim + 1, len(placements)):
        if placements[other].is_shard(dim):
            factor *= mesh_shape[other]
    return Shard(dim) if factor == 1 else StridedShard(dim, factor)


@lru_cache(maxsize=4096)
def in_order(placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """All mesh dimensions, in an order in which each tensor dimension is cut as the placements say.

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
    """(start, length) of the pieces of a dimension of ``size`` elements that the rank at ``coordinate`` holds. ``cuts``
    are the mesh dimensions that cut it, in their order. There is one piece, unless the dimension is packed.

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
    """Return the pieces of ``pieces``, one after the other, from element ``start`` on for ``length`` elements."""
    if len(pieces) == 1:
        return [(pieces[0][0] + start, length)]
    found, position = [], 0
    for begin, size in pieces:
        first, last = max(start, position), min(start + length, position + size)
        if first < last:
            found.append((begin + first - position, last - first))
        position += size
    return found or [(0, 0)]
