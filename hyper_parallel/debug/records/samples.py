"""Places at which large tensors are recorded, and sums with random signs that stand for all of their elements.

The places follow from the shape alone: every ``stride``-th index of each dimension, where strides are powers of two.
Two records of one tensor have them in common. Most places of a part are places of the whole.

Source of the sums: Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments" (1996). The
square of a sum of numbers with random signs is, on average, the sum of their squares.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

__all__ = ["SUMS", "grid_of", "signed_sums"]

#: How many sums with random signs are kept of a tensor.
SUMS = 8


def grid_of(shape: Sequence[int], largest: int) -> list[np.ndarray]:
    """The indices along each dimension at which a tensor is recorded: all where it has at most ``largest`` elements.

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
    """`SUMS` sums of the elements of ``x`` with signs that each element of the whole tensor has.

    Args:
        x: a box of the tensor.
        shape: of the whole tensor.
        offsets: of the first element of the box.

    Example:
        >>> x = np.arange(6.0).reshape(2, 3)
        >>> parts = signed_sums(x[:1], (2, 3), (0, 0)) + signed_sums(x[1:], (2, 3), (1, 0))
        >>> bool(np.allclose(parts, signed_sums(x, (2, 3), (0, 0))))
        True
    """
    sums = np.asarray(x, np.float64)[..., None]
    for dim in reversed(range(len(shape))):
        own = _signs(dim, shape[dim])[offsets[dim] : offsets[dim] + x.shape[dim]]
        # The last axis is that of the sums, of length 1 before the first dimension.
        sums = (sums[..., 0] @ own) if sums.shape[-1] == 1 else np.einsum("...ik,ik->...k", sums, own)
    return np.broadcast_to(sums, (SUMS,)).copy() if not len(shape) else sums


@functools.lru_cache(maxsize=64)
def _signs(dim: int, size: int) -> np.ndarray:
    """Signs of the indices along a dimension, for each sum."""
    return np.random.default_rng((dim, size)).integers(0, 2, (size, SUMS)) * 2.0 - 1.0
