"""The memory layout of a single device's tensor: strides, worked out from shapes alone.

A framework's answer for a local tensor may differ from its answer for the whole: a shard of one row is contiguous
however its dimensions were permuted. A stride is a number of elements; a tensor is contiguous when its last dimension
varies fastest.
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
    """Return whether a tensor is contiguous; strides of dimensions of size 1 do not count."""
    if 0 in shape:
        return True
    return all(
        size == 1 or step == wanted
        for size, step, wanted in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def dense_strides(shape: Sequence[int], strides: Strides, part: Sequence[int] | None = None) -> Strides:
    """Strides of a new tensor without gaps, with its dimensions in memory in the order that ``strides`` says. That is
    the result of an element-wise operation. Stretched dimensions, of stride 0, stay where they are among the others.

    Args:
        shape, strides: of the tensor that has the order.
        part: shape of the new one, if it is another one: that of a shard.
    """
    innermost_first = [*reversed(range(len(shape)))]
    for start in range(1, len(shape)):
        at = start
        for other in reversed(range(start)):
            inner, outer = innermost_first[other], innermost_first[at]
            if not strides[inner] or not strides[outer]:
                continue
            if strides[inner] < strides[outer]:
                break
            if (strides[inner], shape[inner]) > (strides[outer], shape[outer]):
                innermost_first[other], innermost_first[at] = outer, inner
                at = other
    found, step = [0] * len(shape), 1
    for dim in innermost_first:
        found[dim] = step
        step *= max((part or shape)[dim], 1)
    return tuple(found)


def spaced_strides(shape: Sequence[int], strides: Strides, part: Sequence[int]) -> Strides:
    """Strides for a shard of a tensor that give the same answers as those of the whole: whether dimensions can be
    merged, whether it is contiguous. Where the tensor has a gap, the shard has one, as large as the elements before it.
    So the strides of the tensor follow from those of the shard, of whatever size.

    Args:
        shape, strides: of the tensor.
        part: shape of the shard.

    Example:
        >>> spaced_strides((4, 6), (1, 4), (2, 6))  # a transposed tensor
        (1, 2)
        >>> spaced_strides((4, 6), (12, 1), (2, 6))  # the first half of the columns of another one
        (12, 1)
    """
    found, step, inner = [0] * len(shape), 1, None
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if shape[dim] != 1:
            if strides[dim] != (1 if inner is None else strides[inner] * shape[inner]):
                step = 2 if inner is None else 2 * found[inner] * max(part[inner], 1)
            inner = dim
        found[dim] = step
        step *= max(part[dim], 1)
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
    """Return an encoded index with a ``:`` for each dimension that ``...`` stands for, and for omitted last ones.

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
    """Strides of a view in another shape; None where it has to be a copy. Runs of dimensions that are contiguous in
    memory can be cut anew. Every run must fit some dimensions of the result."""
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
