"""Other forms in which functions take the static arguments of an operation, for both frameworks: see `signature`."""

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
    """The shape of another tensor."""
    return (shape,)


@form("flatten", "x | start_dim=0 end_dim=-1")
def flatten(shapes: tuple, start: int, end: int) -> tuple | None:
    """The first and the last of the dimensions that are joined."""
    (x,) = shapes
    if not x:
        return ((1,),)
    start, end = start % len(x), end % len(x)
    if start > end:
        return None  # the framework words the error
    return ((*x[:start], math.prod(x[start : end + 1]), *x[end + 1 :]),)


@form("rows", "x")
def rows(shapes: tuple) -> tuple:
    """All dimensions but the first are joined."""
    return ((shapes[0][0], -1),)


@form("unflatten", "x | dim sizes")
def unflatten(shapes: tuple, dim: Any, sizes: tuple[int, ...]) -> tuple | None:
    """A dimension, and the sizes of those that it becomes; one may be -1."""
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
    """The number of copies along the last dimensions."""
    return ((1,) * (len(shapes[0]) - len(tiles)) + tiles,)


@form("pad", "x | pad mode='constant' value=None")
def pad(shapes: tuple, numbers: Any, mode: str, value: Any) -> tuple | None:
    """(before, after) from the last dimension backwards; of the operation each dimension has its pair. Behind
    them and the mode come the value and the number of numbers."""
    ndim, numbers = len(shapes[0]), tuple(numbers)
    if len(numbers) % 2 or len(numbers) > 2 * ndim:
        return None  # the framework words the error
    pairs = [(int(numbers[i]), int(numbers[i + 1])) for i in range(0, len(numbers), 2)]
    return (*((0, 0),) * (ndim - len(pairs)), *reversed(pairs)), mode, value, len(numbers)


# ------------------------------------------------------------------------------------------- orders of dimensions


@functools.cache
def _swapped(ndim: int, a: int, b: int) -> tuple[int, ...]:
    """The permutation that swaps two dimensions."""
    if not (-ndim <= a < ndim and -ndim <= b < ndim):
        if ndim == 0 and -1 <= a <= 0 and -1 <= b <= 0:
            return ()
        raise IndexError(f"transpose({a}, {b}) is out of range for a tensor of {ndim} dimension(s)")
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


@form("transpose", "x | dim0 dim1")
def transpose(shapes: tuple, a: int, b: int) -> tuple:
    """Two dimensions that change places."""
    return (_swapped(len(shapes[0]), a, b),)


@form("last_two", "x")
def last_two(shapes: tuple) -> tuple | None:
    """The last two dimensions change places."""
    ndim = len(shapes[0])
    return None if ndim < 2 else (_swapped(ndim, -2, -1),)  # the framework words the error


@form("matrix", "x")
def matrix(shapes: tuple) -> tuple | None:
    """Both dimensions of a matrix change places; a vector stays."""
    ndim = len(shapes[0])
    return None if ndim > 2 else (tuple(reversed(range(ndim))) if ndim == 2 else tuple(range(ndim)),)


@form("reversed", "x")
def reverse(shapes: tuple) -> tuple:
    """All dimensions in the other order."""
    return (tuple(reversed(range(len(shapes[0])))),)


@form("order", "x | *order")
def order_of(shapes: tuple, order: tuple[int, ...]) -> tuple:
    """An order, or nothing, which reverses all dimensions."""
    ndim = len(shapes[0])
    return (tuple(d % ndim for d in order or reversed(range(ndim))),)


@form("movedim", "x | source destination")
def movedim(shapes: tuple, source: Any, destination: Any) -> tuple:
    """Dimensions that move, and where to."""
    ndim = len(shapes[0])
    sources = [d % ndim for d in dims_of(source) or ()]
    destinations = [d % ndim for d in dims_of(destination) or ()]
    order = [d for d in range(ndim) if d not in sources]
    for to, moved in sorted(zip(destinations, sources, strict=True)):
        order.insert(to, moved)
    return (tuple(order),)


# ------------------------------------------------------------------------------------------- parts


@form("select", "x | dim index")
def select(shapes: tuple, dim: int, index: Any) -> tuple | None:
    """A place along a dimension, as an index."""
    if hasattr(index, "_layout"):
        return None  # a tensor says it
    return ((*(FULL_SLICE,) * (dim % len(shapes[0])), int(index)),)


@form("strided_slice", "x | begin end strides")
def strided_slice(shapes: tuple, begin: Any, end: Any, strides: Any) -> tuple:
    """The begin, end and step of each dimension, as an index."""
    return (tuple(("slice", int(b), int(e), int(s)) for b, e, s in zip(begin, end, strides, strict=True)),)


@form("slice", "x | begin size")
def slice_of(shapes: tuple, begin: Any, size: Any) -> tuple:
    """The begin and the size of each dimension, as an index."""
    return (tuple(("slice", int(b), int(b) + int(s), None) for b, s in zip(begin, size, strict=True)),)


@form("equal_parts", "x | dim=0 output_num=1")
def equal_parts(shapes: tuple, dim: int, number: int) -> tuple:
    """A dimension and the number of its parts."""
    return shapes[0][dim] // number, dim


# ------------------------------------------------------------------------------------------- dimensions that are whole


@form("all_but", "x | dim")
def all_but(shapes: tuple, dim: int) -> tuple:
    """All dimensions but one, for `along_dims`."""
    ndim = len(shapes[0])
    return tuple(d for d in range(ndim) if d != dim % ndim), 1


@form("by_weight", "x weight | statistics=1 eps=1e-6")
def by_weight(shapes: tuple, statistics: int, eps: float) -> tuple:
    """A norm over the dimensions that the weight has."""
    return len(shapes[1]), statistics, eps


@form("from_dim", "x weight bias | begin_norm statistics=2 eps=1e-5")
def from_dim(shapes: tuple, begin: int, statistics: int, eps: float) -> tuple:
    """A norm over the dimensions from one on."""
    ndim = len(shapes[0])
    return ndim - begin % ndim, statistics, eps
