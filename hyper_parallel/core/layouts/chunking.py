"""Sizes of the shards of a tensor dimension. All code that splits a dimension uses these functions."""

from __future__ import annotations

from functools import lru_cache

from hyper_parallel.core.layouts.placement_types import PackedShard, Shard


@lru_cache(maxsize=4096)
def chunk_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of the ``parts`` chunks of a dimension, as `torch.chunk` makes them. The last chunks may be
    smaller or empty.

    Example:
        >>> chunk_sizes(5, 4)
        (2, 2, 1, 0)
    """
    each = -(-size // parts)
    return tuple(max(0, min(each, size - i * each)) for i in range(parts))


@lru_cache(maxsize=4096)
def shard_sizes(placement: Shard, size: int, parts: int) -> tuple[int, ...]:
    """Return the size of each of ``parts`` shards of a dimension of ``size`` elements under ``placement``.

    Example:
        >>> from hyper_parallel import PackedShard
        >>> shard_sizes(PackedShard(0, (5, 1)), 6, 2)
        (4, 2)
    """
    if isinstance(placement, PackedShard):
        return tuple(sum(length for _, length in packed_ranges(placement, rank, parts)) for rank in range(parts))
    return chunk_sizes(size, parts)


@lru_cache(maxsize=4096)
def packed_ranges(placement: PackedShard, rank: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return (start, length) of the shard that ``rank`` holds, for each packed part of a resolved `PackedShard`.

    Example:
        >>> from hyper_parallel import PackedShard
        >>> packed_ranges(PackedShard(0, (4, 2)), 1, 2)
        ((2, 2), (5, 1))
    """
    ranges, start = [], 0
    sizes = placement.sizes if isinstance(placement.sizes, tuple) else ()
    for size in sizes:
        own = chunk_sizes(size, parts)
        ranges.append((start + sum(own[:rank]), own[rank]))
        start += size
    return tuple(ranges)
