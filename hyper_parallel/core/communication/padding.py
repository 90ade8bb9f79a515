"""Padding of uneven shards to the largest one, for collectives that need equal sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def part_of(x: Any, dim: int, sizes: Sequence[int], i: int, platform: Any) -> Any:
    """Return shard ``i`` of consecutive shards of the given sizes along ``dim``."""
    return platform.narrow(x, dim, sum(sizes[:i]), sizes[i])


def padded(x: Any, dim: int, size: int, platform: Any) -> Any:
    """Return ``x``, padded with zeros at the end to ``size`` elements along ``dim``."""
    shape = [*platform.shape_of(x)]
    if shape[dim] == size:
        return x
    shape[dim] = size - shape[dim]
    return platform.cat([x, platform.zeros(shape, x)], dim)


def padded_parts(x: Any, dim: int, sizes: Sequence[int], platform: Any) -> Any:
    """Return the shards of ``x`` for all ranks, padded to one size and concatenated along dimension 0."""
    parts = [padded(part_of(x, dim, sizes, i, platform), dim, max(sizes), platform) for i in range(len(sizes))]
    return platform.cat(parts, 0)


def joined(parts: Sequence[Any], dim: int, sizes: Sequence[int], platform: Any) -> Any:
    """Return padded shards without their padding, concatenated along ``dim``. ``sizes`` are the sizes before
    padding."""
    return platform.cat([platform.narrow(part, dim, 0, n) for part, n in zip(parts, sizes, strict=True) if n], dim)
