"""Random numbers as a function of a key and of an element's index in its tensor: a counter-based generator, in NumPy.

All ranks compute the same number for an element. So each rank draws only the numbers of its shard.

Source: Philox-2x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

__all__ = ["BITS", "CHUNK", "MULTIPLIER", "ROUNDS", "WEYL", "blocks", "numbers", "offsets", "philox", "words_of"]

MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 10
_WORD = 0xFFFFFFFF
#: Size of the chunks in which numbers are computed. Intermediate results take about 3 MiB, however large the tensor.
CHUNK = 1 << 16
#: Number of random bits in a uniform number of each dtype, so that the largest number is below 1.
BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}

#: For each dimension of a tensor, the (start, length) of the ranges that a rank holds.
Ranges = Sequence[Sequence[tuple[int, int]]]


def philox(places: np.ndarray, key: int, salt: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two random integers of 32 bits, as uint64, for each index.

    Args:
        places: int64, at least 0: the counter. Its upper half is combined with ``salt`` by exclusive or.
        key, salt: 32 bits each.

    Example:
        >>> first, second = philox(np.array([0]), 0, 0)
        >>> hex(int(first[0])), hex(int(second[0]))
        ('0xff1dae59', '0x6cd10df2')
    """
    places = places.astype(np.uint64)
    first, second = places & np.uint64(_WORD), (places >> np.uint64(32)) ^ np.uint64(salt)
    for _ in range(ROUNDS):
        product = first * np.uint64(MULTIPLIER)
        first = (product >> np.uint64(32)) ^ np.uint64(key) ^ second
        second = product & np.uint64(_WORD)
        key = (key + WEYL) & _WORD
    return first, second


def words_of(key: np.ndarray) -> tuple[int, int]:
    """Return key and salt from four uniform numbers. Each number contributes 16 bits."""
    a, b, c, d = (int(x * 65536) for x in key)
    return a << 16 | b, c << 16 | d


def offsets(shape: Sequence[int], ranges: Ranges) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat indices of a shard's elements in the global tensor, in row-major order. An index is the sum of
    two numbers: one for all dimensions but the last, and one for the last."""
    parts = [np.zeros(1, np.int64)]
    for dim, pieces in enumerate(ranges):
        stride = math.prod(shape[dim + 1 :])
        index = np.concatenate([np.arange(0), *(np.arange(start, start + length) for start, length in pieces)])
        parts.append(index * stride)
    rows = parts[0]
    for part in parts[1:-1]:
        rows = (rows[:, None] + part).reshape(-1)
    return rows, parts[-1]


def blocks(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Yield the slices of a matrix in blocks of at most `CHUNK` elements."""
    wide = min(columns, CHUNK)
    high = CHUNK // wide if wide else 1
    for row in range(0, rows if columns else 0, high):
        for column in range(0, columns, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, columns))


def numbers(kind: str, key: tuple[int, int], shape: Sequence[int], ranges: Ranges, dtype: str) -> np.ndarray:
    """Return a shard of a tensor of random numbers.

    Args:
        kind: ``"uniform"`` in [0, 1), or ``"normal"``, of mean 0 and variance 1 (Box and Muller 1958), at most 6.7.
        key: the key and the salt.
        shape: global shape.
        ranges: ranges that the shard consists of.
        dtype: one of `BITS`. Numbers of a dtype that NumPy lacks are float32; their conversion is exact.
    """
    rows, columns = offsets(shape, ranges)
    found = np.empty((len(rows), len(columns)), np.float64 if dtype == "float64" else np.float32)
    for high, wide in blocks(*found.shape):
        first, second = philox(rows[high, None] + columns[wide], *key)
        found[high, wide] = _uniform(first, second, dtype) if kind == "uniform" else _normal(first, second)
    return found.reshape([sum(length for _, length in pieces) for pieces in ranges])


def _uniform(first: Any, second: Any, dtype: str) -> np.ndarray:
    bits = BITS[dtype]
    if bits <= 32:
        return (first >> np.uint64(32 - bits)) * 2.0**-bits
    return ((first >> np.uint64(5)) * 2.0**26 + (second >> np.uint64(6))) * 2.0**-53


def _normal(first: Any, second: Any) -> np.ndarray:
    return np.sqrt(-2 * np.log((first + 1.0) * 2.0**-32)) * np.cos(second * (2 * math.pi * 2.0**-32))
