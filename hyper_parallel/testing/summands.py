"""Summands of partial tensors. Such summands expose a rule that treats a partial tensor as another kind of tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["summands"]


def summands(x: np.ndarray, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return ``count`` arrays whose sum is ``x``.

    The arrays differ in every property that a wrong rule could use in place of the sum. The numbers that are added
    change their sign and double in size from rank to rank. None of these numbers is zero. Their sizes grow along every
    dimension, so neighbouring ranks have their largest and smallest element at opposite ends. All are multiples of
    1/16, so that sums of a few float32 numbers lose almost no precision.

    Args:
        x: the value, of floats or integers.
        count: number of arrays.
        rng: generator in the same state on every rank.
    """
    unit = 1.0 if x.dtype.kind in "iu" else 0.0625
    parts: list[np.ndarray] = []
    for rank in range(count - 1):
        size = 4 + 2 * sum(np.indices(x.shape)) + rng.integers(0, 2, x.shape) if x.ndim else rng.integers(4, 9)
        parts.append(np.asarray(unit * (-1) ** rank * 2 ** min(rank, 2) * size).astype(x.dtype))
    whole: Any = x - sum(parts[1:], parts[0]) if parts else x.copy()
    # Not on the last rank, which may have an empty shard of another operand.
    parts.insert(count // 2, np.asarray(whole).astype(x.dtype))
    return parts
