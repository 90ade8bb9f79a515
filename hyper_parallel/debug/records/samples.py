"""Sampled elements of large tensors, and sums with random signs that represent all elements. The sampled indices follow
from the shape alone: every ``stride``-th index of each dimension, where strides are powers of two. So two records of
one tensor sample the same elements. Most sampled elements of a part are also sampled elements of the full tensor.

Source of the sums: Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments" (1996). The
square of a sum of numbers with random signs is, on average, the sum of their squares.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

__all__ = ["SUMS", "grid_of", "signed_sums"]

#: Number of sums with random signs that are stored for a tensor.
SUMS = 8


def grid_of(shape: Sequence[int], largest: int) -> list[np.ndarray]:
    """Return the sampled indices along each dimension of a tensor. With at most ``largest`` elements these are all
    indices.

    Example:
        >>> [list(places) for places in grid_of((2, 6), 6)]
        [[0, 1], [0, 2, 4]]
    """
    strides = [1] * len(shape)
    counts = list(shape)
    while counts and np.prod(counts, dtype=float) > max(largest, 1):
        dim = int(np.argmax(counts))
        strides[dim] *= 2
        counts[dim] = -(-shape[dim] // strides[dim])
    return [np.arange(0, size, stride) for size, stride in zip(shape, strides, strict=True)]


def signed_sums(x: np.ndarray, shape: Sequence[int], offsets: Sequence[int]) -> np.ndarray:
    """Return `SUMS` sums of the elements of ``x``. Signs depend on an element's index in the full tensor.

    Args:
        x: a box of the tensor.
        shape: shape of the full tensor.
        offsets: offset of the box's first element.

    Example:
        >>> x = np.arange(6.0).reshape(2, 3)
        >>> parts = signed_sums(x[:1], (2, 3), (0, 0)) + signed_sums(x[1:], (2, 3), (1, 0))
        >>> bool(np.allclose(parts, signed_sums(x, (2, 3), (0, 0))))
        True
    """
    sums = np.asarray(x, np.float64)[..., None]
    for dim in reversed(range(len(shape))):
        own = _signs(dim, shape[dim])[offsets[dim] : offsets[dim] + x.shape[dim]]
        # The last axis holds the sums; it has length 1 before the first dimension is processed.
        sums = (sums[..., 0] @ own) if sums.shape[-1] == 1 else np.einsum("...ik,ik->...k", sums, own)
    return np.broadcast_to(sums, (SUMS,)).copy() if not len(shape) else sums


@functools.lru_cache(maxsize=64)
def _signs(dim: int, size: int) -> np.ndarray:
    """Return the sign of each index along a dimension, for each sum."""
    return np.random.default_rng((dim, size)).integers(0, 2, (size, SUMS)) * 2.0 - 1.0
