"""Strides of a single device's tensor, computed from shapes alone.

A framework's strides of a local tensor may differ from those of the global tensor. For example, a shard of one row is
contiguous after any permutation. Strides count elements; a tensor is contiguous when its last dimension varies fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from hyper_parallel.platform.indexing import region_of

Shape: TypeAlias = "tuple[int, ...]"
Strides: TypeAlias = "tuple[int, ...]"


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor.

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
    """Return whether a tensor is contiguous; strides of dimensions of size 1 are ignored."""
    if 0 in shape:
        return True
    return all(
        size == 1 or step == wanted
        for size, step, wanted in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def dense_strides(shape: Sequence[int], strides: Strides, part: Sequence[int] | None = None) -> Strides:
    """Return the strides of a new tensor without gaps whose dimensions have the memory order of ``strides``.

    Results of element-wise operations have these strides. Expanded dimensions, of stride 0, keep their position among
    the others.

    Args:
        shape, strides: shape and strides of the tensor that defines the order.
        part: shape of the new tensor if it differs, such as that of a shard.
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
    """Return strides for a shard that keep two properties of the global strides.

    The properties are contiguity, and which dimensions can be merged. Where the tensor has a gap, the shard gets a gap
    of the size of the preceding elements. So the global strides follow from the strides of a shard of any size.

    Args:
        shape, strides: global shape and strides of the tensor.
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
    """Return the strides of a view with the dimensions permuted as in ``static_args[0]``."""
    return tuple(strides[d] for d in static_args[0])


def expanded_strides(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides:
    """Return the strides of a view in which dimensions of size 1 are expanded. New dimensions come first."""
    new = len(result_shape) - len(shape)
    kept = (0 if old != size else step for old, size, step in zip(shape, result_shape[new:], strides, strict=True))
    return (0,) * new + tuple(kept)


def contiguous_only(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides | None:
    """Return ``strides`` if the tensor is contiguous, in which case the operation returns the tensor itself. Return
    None otherwise."""
    return strides if is_contiguous(shape, strides) else None


def indexed_strides(shape: Shape, strides: Strides, index: tuple) -> Strides:
    """Return the strides of ``x[index]`` for an encoded index of ints, slices, None and ellipses."""
    return tuple(
        1 if place.dim is None else strides[place.dim] * (place.item[3] or 1)
        for place in region_of(index, shape)
        if place.dim is None or place.is_slice
    )


def reshaped_strides(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides | None:
    """Return the strides of a view in another shape, or None if a copy is required.

    Runs of dimensions that are contiguous in memory can be split differently. Every run must match some dimensions of
    the result.
    """
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
