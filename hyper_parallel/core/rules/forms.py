"""Functions that convert arguments of a native function to the static arguments of an operation (see `signature`). Each
function supports one form of the arguments. Both frameworks share these functions.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from hyper_parallel.core.rules.labels import Shape
from hyper_parallel.core.rules.signature import form
from hyper_parallel.platform.arguments import dims_of
from hyper_parallel.platform.indexing import FULL_SLICE

# ------------------------------------------------------------------------------------------- shapes


@form("like", "x | like")
def like(shapes: tuple, shape: Shape) -> tuple:
    """Return the shape of another tensor, as for ``view_as``."""
    return (shape,)


@form("flatten", "x | start_dim=0 end_dim=-1")
def flatten(shapes: tuple, start: int, end: int) -> tuple | None:
    """Return the shape in which the dimensions from the first to the last given one are joined."""
    (x,) = shapes
    if not x:
        return ((1,),)
    start, end = start % len(x), end % len(x)
    if start > end:
        return None  # the framework raises the error
    return ((*x[:start], math.prod(x[start : end + 1]), *x[end + 1 :]),)


@form("rows", "x")
def rows(shapes: tuple) -> tuple:
    """Return the shape in which all dimensions but the first are joined."""
    return ((shapes[0][0], -1),)


@form("unflatten", "x | dim sizes")
def unflatten(shapes: tuple, dim: Any, sizes: tuple[int, ...]) -> tuple | None:
    """Return the shape in which a dimension is split into the given sizes, one of which may be -1."""
    (x,) = shapes
    if not isinstance(dim, int):
        return None
    dim %= len(x)
    if -1 in sizes:
        known = -math.prod(sizes)
        if not known:
            return None
        sizes = tuple(x[dim] // known if size == -1 else size for size in sizes)
    return ((*x[:dim], *sizes, *x[dim + 1 :]),)


@form("tile", "x | *tiles")
def tile(shapes: tuple, tiles: tuple[int, ...]) -> tuple:
    """Return the number of copies along each dimension. The given numbers belong to the last dimensions."""
    return ((1,) * (len(shapes[0]) - len(tiles)) + tiles,)


@form("pad", "x | pad mode='constant' value=None")
def pad(shapes: tuple, numbers: Any, mode: str, value: Any) -> tuple | None:
    """Return a pair (before, after) for each dimension, from numbers that start at the last dimension.

    The mode, the fill value and the count of numbers follow.
    """
    ndim, numbers = len(shapes[0]), tuple(numbers)
    if len(numbers) % 2 or len(numbers) > 2 * ndim:
        return None  # the framework raises the error
    pairs = [(int(numbers[i]), int(numbers[i + 1])) for i in range(0, len(numbers), 2)]
    return (*((0, 0),) * (ndim - len(pairs)), *reversed(pairs)), mode, value, len(numbers)


# ------------------------------------------------------------------------------------------- orders of dimensions


@functools.cache
def _swapped(ndim: int, a: int, b: int) -> tuple[int, ...]:
    """Return the permutation that swaps two dimensions."""
    if not (-ndim <= a < ndim and -ndim <= b < ndim):
        if ndim == 0 and -1 <= a <= 0 and -1 <= b <= 0:
            return ()
        raise IndexError(f"transpose({a}, {b}) is out of range for a tensor of {ndim} dimension(s)")
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


@form("transpose", "x | dim0 dim1")
def transpose(shapes: tuple, a: int, b: int) -> tuple:
    """Return the permutation that swaps two given dimensions."""
    return (_swapped(len(shapes[0]), a, b),)


@form("last_two", "x")
def last_two(shapes: tuple) -> tuple | None:
    """Return the permutation that swaps the last two dimensions."""
    ndim = len(shapes[0])
    return None if ndim < 2 else (_swapped(ndim, -2, -1),)  # the framework raises the error


@form("matrix", "x")
def matrix(shapes: tuple) -> tuple | None:
    """Return the permutation that transposes a matrix. A vector is unchanged."""
    ndim = len(shapes[0])
    return None if ndim > 2 else (tuple(reversed(range(ndim))) if ndim == 2 else tuple(range(ndim)),)


@form("reversed", "x")
def reverse(shapes: tuple) -> tuple:
    """Return the permutation that reverses all dimensions."""
    return (tuple(reversed(range(len(shapes[0])))),)


@form("order", "x | *order")
def order_of(shapes: tuple, order: tuple[int, ...]) -> tuple:
    """Return the given permutation of dimensions. An empty one reverses them."""
    ndim = len(shapes[0])
    return (tuple(d % ndim for d in order or reversed(range(ndim))),)


@form("movedim", "x | source destination")
def movedim(shapes: tuple, source: Any, destination: Any) -> tuple:
    """Return the permutation that moves dimensions to new positions."""
    ndim = len(shapes[0])
    sources = [d % ndim for d in dims_of(source) or ()]
    destinations = [d % ndim for d in dims_of(destination) or ()]
    order = [d for d in range(ndim) if d not in sources]
    for to, moved in sorted(zip(destinations, sources, strict=True)):
        order.insert(to, moved)
    return (tuple(order),)


# ------------------------------------------------------------------------------------------- slices and parts


@form("select", "x | dim index")
def select(shapes: tuple, dim: int, index: Any) -> tuple | None:
    """Return the index that selects a position in a dimension."""
    if hasattr(index, "_layout"):
        return None  # the index is a tensor
    return ((*(FULL_SLICE,) * (dim % len(shapes[0])), int(index)),)


@form("strided_slice", "x | begin end strides")
def strided_slice(shapes: tuple, begin: Any, end: Any, strides: Any) -> tuple:
    """Return the index of slices with a start, an end and a step for each dimension."""
    return (tuple(("slice", int(b), int(e), int(s)) for b, e, s in zip(begin, end, strides, strict=True)),)


@form("slice", "x | begin size")
def slice_of(shapes: tuple, begin: Any, size: Any) -> tuple:
    """Return the index of slices with a start and a size for each dimension."""
    return (tuple(("slice", int(b), int(b) + int(s), None) for b, s in zip(begin, size, strict=True)),)


@form("equal_parts", "x | dim=0 output_num=1")
def equal_parts(shapes: tuple, dim: int, number: int) -> tuple:
    """Return the size of each of several equal parts, and the dimension to split."""
    return shapes[0][dim] // number, dim


# ------------------------------------------------------------------------------------------- unsharded dimensions


@form("all_but", "x | dim")
def all_but(shapes: tuple, dim: int) -> tuple:
    """Return all dimensions but one, as `along_dims` takes them."""
    ndim = len(shapes[0])
    return tuple(d for d in range(ndim) if d != dim % ndim), 1


@form("by_weight", "x weight | statistics=1 eps=1e-6")
def by_weight(shapes: tuple, statistics: int, eps: float) -> tuple:
    """Return the number of normalised dimensions, which is that of the weight's dimensions."""
    return len(shapes[1]), statistics, eps


@form("from_dim", "x weight bias | begin_norm statistics=2 eps=1e-5")
def from_dim(shapes: tuple, begin: int, statistics: int, eps: float) -> tuple:
    """Return the number of normalised dimensions, from the first normalised one."""
    ndim = len(shapes[0])
    return ndim - begin % ndim, statistics, eps
