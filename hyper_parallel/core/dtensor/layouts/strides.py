"""Where the elements of a single device's tensor would lie in memory: strides, worked out from shapes alone.

What a framework answers for a local tensor is not always what it would answer for the whole: a shard of one row is
contiguous however its dimensions were permuted. A stride is a number of elements; a tensor is contiguous when its last
dimension varies fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

Shape: TypeAlias = "tuple[int, ...]"
Strides: TypeAlias = "tuple[int, ...]"

#: ``:`` in an encoded index.
FULL_SLICE = ("slice", None, None, None)


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Strides of a contiguous tensor.

    Example:
        >>> contiguous_strides((2, 3, 4))
        (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Strides) -> bool:
    """Whether a tensor is contiguous; strides of dimensions of size 1 do not count."""
    if 0 in shape:
        return True
    return all(
        size == 1 or step == wanted
        for size, step, wanted in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def dense_strides(shape: Sequence[int], strides: Strides) -> Strides:
    """Strides of a new tensor without gaps whose dimensions lie in memory in the order that ``strides`` says: what an
    element-wise operation gives."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    found, step = [0] * len(shape), 1
    for dim in reversed(order):
        found[dim] = step
        step *= max(shape[dim], 1)
    return tuple(found)


def permuted_strides(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides:
    """Strides of a view with the dimensions in the order ``static_args[0]``."""
    return tuple(strides[d] for d in static_args[0])


def expanded_strides(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides:
    """Strides of a view in which dimensions of size 1 are stretched, and new ones come first."""
    new = len(result_shape) - len(shape)
    kept = (0 if old != size else step for old, size, step in zip(shape, result_shape[new:], strides, strict=True))
    return (0,) * new + tuple(kept)


def contiguous_only(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides | None:
    """Strides of a tensor that is itself the result if it is contiguous; None where it is not."""
    return strides if is_contiguous(shape, strides) else None


def without_dots(index: tuple, ndim: int) -> tuple:
    """An encoded index with ``:`` for each of the ``ndim`` dimensions that its first ``...`` stands for, or that it
    leaves out at the end.

    Example:
        >>> without_dots((0, ..., None), 2)
        (0, ('slice', None, None, None), None)
    """
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    before, after = index[:at], index[at + 1 :]
    named = sum(item is not None for item in before + after)
    return (*before, *(FULL_SLICE,) * (ndim - named), *after)


def indexed_strides(shape: Shape, strides: Strides, index: tuple) -> Strides:
    """Strides of ``x[index]``, the index encoded, of ints, slices, None and dots."""
    found: list[int] = []
    dims = iter(strides)
    for item in without_dots(index, len(shape)):
        if item is None:
            found.append(1)
        elif isinstance(item, tuple):
            found.append(next(dims) * (item[3] or 1))
        else:
            next(dims)
    return tuple(found)


def reshaped_strides(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides | None:
    """Strides of a view in another shape; None where it has to be a copy. Runs of dimensions that lie in memory as one
    can be cut anew; every run must fit some dimensions of the result."""
    if 0 in shape:
        return contiguous_strides(result_shape)
    runs: list[tuple[int, int]] = []  # (number of elements, stride of the last dimension), the last run first
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if runs and step == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * size, runs[-1][1])
        else:
            runs.append((size, step))
    found: list[int] = []
    rest, step = runs.pop(0) if runs else (1, 1)
    for size in reversed(result_shape):
        if rest == 1 and size != 1:
            rest, step = runs.pop(0) if runs else (math.prod(result_shape), 1)
        if rest % size:
            return None
        found.append(step)
        rest, step = rest // size, step * size
    return tuple(reversed(found))
