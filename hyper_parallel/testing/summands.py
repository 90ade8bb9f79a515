"""Partial sums that are hard on a rule which takes them for something else."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["summands"]


def summands(x: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """``count`` arrays whose sum is ``x``.

    No two are equal in a property that a rule could take a sum for. Each is about twice as large as the one before. The
    added numbers change their sign from rank to rank and are nowhere zero. They grow along every dimension. So the
    largest and the smallest element lie at opposite ends on two neighbours. It consists of sixteenths, so that sums of
    a few floats of 32 bits lose next to nothing.

    Args:
        x: the value, of floats or integers.
        count: how many.
        rng: in the same state on every rank.
    """
    unit = 1.0 if x.dtype.kind in "iu" else 0.0625
    parts: list[np.ndarray] = []
    for rank in range(count - 1):
        size = 4 + 2 * sum(np.indices(x.shape)) + rng.integers(0, 2, x.shape) if x.ndim else rng.integers(4, 9)
        parts.append(np.asarray(unit * (-1) ** rank * 2 ** min(rank, 2) * size).astype(x.dtype))
    whole: Any = x - sum(parts[1:], parts[0]) if parts else x.copy()
    # Not the last rank: an empty shard of another operand lies there.
    parts.insert(count // 2, np.asarray(whole).astype(x.dtype))
    return parts
