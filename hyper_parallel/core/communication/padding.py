"""Shards of different sizes, padded to the largest for a message whose parts have one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def part_of(x: Any, dim: int, sizes: Sequence[int], i: int, platform: Any) -> Any:
    """Part ``i`` of consecutive parts of these sizes along ``dim``."""
    return platform.narrow(x, dim, sum(sizes[:i]), sizes[i])


def padded(x: Any, dim: int, size: int, platform: Any) -> Any:
    """The tensor ``x`` with zeros at its end, up to ``size`` along ``dim``."""
    shape = [*platform.shape_of(x)]
    if shape[dim] == size:
        return x
    shape[dim] = size - shape[dim]
    return platform.cat([x, platform.zeros(shape, x)], dim)


def padded_parts(x: Any, dim: int, sizes: Sequence[int], platform: Any) -> Any:
    """The parts of ``x`` for all ranks, padded to one size, along dimension 0."""
    parts = [padded(part_of(x, dim, sizes, i, platform), dim, max(sizes), platform) for i in range(len(sizes))]
    return platform.cat(parts, 0)


def joined(parts: Sequence[Any], dim: int, sizes: Sequence[int], platform: Any) -> Any:
    """Padded parts of these sizes, one after the other along ``dim``."""
    return platform.cat([platform.narrow(part, dim, 0, n) for part, n in zip(parts, sizes, strict=True) if n], dim)
