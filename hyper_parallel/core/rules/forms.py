"""Alternative forms in which native functions take the static arguments of an operation, for both frameworks (see
`signature`)."""

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
    """Shape of another tensor."""
    return (shape,)


@form("flatten", "x | start_dim=0 end_dim=-1")
def flatten(shapes: tuple, start: int, end: int) -> tuple | None:
    """First and last of the dimensions that are joined."""
    (x,) = shapes
    if not x:
        return ((1,),)
    start, end = start % len(x), end % len(x)
    if start > end:
        return None  # the framework raises the error
    return ((*x[:start], math.prod(x[start : end + 1]), *x[end + 1 :]),)


@form("rows", "x")
def rows(shapes: tuple) -> tuple:
    """All dimensions but the first, joined."""
    return ((shapes[0][0], -1),)


@form("unflatten", "x | dim sizes")
def unflatten(shapes: tuple, dim: Any, sizes: tuple[int, ...]) -> tuple | None:
    """Dimension to split, and the sizes of its parts, one of which may be -1."""
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
    """Number of copies along the last dimensions."""
    return ((1,) * (len(shapes[0]) - len(tiles)) + tiles,)


@form("pad", "x | pad mode='constant' value=None")
def pad(shapes: tuple, numbers: Any, mode: str, value: Any) -> tuple | None:
    """(before, after) numbers from the last dimension backwards. The operation takes one pair for each dimension.

    The fill value and the count of numbers follow the pairs and the mode.
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
    """Two dimensions to swap."""
    return (_swapped(len(shapes[0]), a, b),)


@form("last_two", "x")
def last_two(shapes: tuple) -> tuple | None:
    """Swap of the last two dimensions."""
    ndim = len(shapes[0])
    return None if ndim < 2 else (_swapped(ndim, -2, -1),)  # the framework raises the error


@form("matrix", "x")
def matrix(shapes: tuple) -> tuple | None:
    """Transposition of a matrix; a vector is unchanged."""
    ndim = len(shapes[0])
    return None if ndim > 2 else (tuple(reversed(range(ndim))) if ndim == 2 else tuple(range(ndim)),)


@form("reversed", "x")
def reverse(shapes: tuple) -> tuple:
    """Reversal of all dimensions."""
    return (tuple(reversed(range(len(shapes[0])))),)


@form("order", "x | *order")
def order_of(shapes: tuple, order: tuple[int, ...]) -> tuple:
    """Permutation of the dimensions; none reverses them."""
    ndim = len(shapes[0])
    return (tuple(d % ndim for d in order or reversed(range(ndim))),)


@form("movedim", "x | source destination")
def movedim(shapes: tuple, source: Any, destination: Any) -> tuple:
    """Dimensions to move, and their new positions."""
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
    """Dimension and position, as an index."""
    if hasattr(index, "_layout"):
        return None  # the index is a tensor
    return ((*(FULL_SLICE,) * (dim % len(shapes[0])), int(index)),)


@form("strided_slice", "x | begin end strides")
def strided_slice(shapes: tuple, begin: Any, end: Any, strides: Any) -> tuple:
    """Start, end and step of each dimension, as an index."""
    return (tuple(("slice", int(b), int(e), int(s)) for b, e, s in zip(begin, end, strides, strict=True)),)


@form("slice", "x | begin size")
def slice_of(shapes: tuple, begin: Any, size: Any) -> tuple:
    """Start and size of each dimension, as an index."""
    return (tuple(("slice", int(b), int(b) + int(s), None) for b, s in zip(begin, size, strict=True)),)


@form("equal_parts", "x | dim=0 output_num=1")
def equal_parts(shapes: tuple, dim: int, number: int) -> tuple:
    """Dimension and number of equal parts."""
    return shapes[0][dim] // number, dim


# ------------------------------------------------------------------------------------------- unsharded dimensions


@form("all_but", "x | dim")
def all_but(shapes: tuple, dim: int) -> tuple:
    """All dimensions but one, for `along_dims`."""
    ndim = len(shapes[0])
    return tuple(d for d in range(ndim) if d != dim % ndim), 1


@form("by_weight", "x weight | statistics=1 eps=1e-6")
def by_weight(shapes: tuple, statistics: int, eps: float) -> tuple:
    """Norm over the dimensions of the weight."""
    return len(shapes[1]), statistics, eps


@form("from_dim", "x weight bias | begin_norm statistics=2 eps=1e-5")
def from_dim(shapes: tuple, begin: int, statistics: int, eps: float) -> tuple:
    """Norm over all dimensions from a given one on."""
    ndim = len(shapes[0])
    return ndim - begin % ndim, statistics, eps
