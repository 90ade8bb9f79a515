"""Operations on arrays, each with the way back for its cotangent, which is made of operations again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.platform.indexing import decode_index, encode_index
from numpy_backend.array import Array, made
from numpy_backend.interception import TABLE, operation

__all__ = [
    "abs_", "add", "amax", "amin", "cast", "cat", "chunk", "clone", "contiguous", "copy_", "cumsum", "detach", "div",
    "equal", "exp", "expand", "fill_", "gather", "getitem", "greater", "index_select", "log", "masked_fill", "matmul",
    "mean", "mul", "narrow", "neg", "permute", "power", "reshape", "scatter_add", "setitem", "sign", "split", "sqrt",
    "squeeze", "stack", "sub", "sum", "tanh", "unbind", "unsqueeze", "where", "zeros_like",
]  # fmt: skip


def _value(x: Any, like: np.dtype) -> Any:
    """The NumPy value of an operand: numbers take the dtype of the arrays next to them."""
    if isinstance(x, Array):
        return x.value
    return np.asarray(x, like) if np.issubdtype(like, np.inexact) and not isinstance(x, bool) else x


def _values(*xs: Any) -> list[Any]:
    like = next(x.dtype for x in xs if isinstance(x, Array))
    return [_value(x, like) for x in xs]


def _shape(x: Any) -> tuple[int, ...]:
    return x.value.shape if isinstance(x, Array) else ()


def _summed_to(g: Array, shape: tuple[int, ...]) -> Array:
    """The cotangent of an operand of ``shape`` that was broadcast."""
    extra = g.ndim - len(shape)
    dims = tuple(range(extra)) + tuple(extra + i for i, n in enumerate(shape) if n == 1 != g.shape[extra + i])
    return reshape(sum(g, dims) if dims else g, shape)


def _made(value: Any, xs: Sequence[Any], *backs: Callable[[Array], Array]) -> Array:
    """`made`, with one way back for each operand, from which the shape that it was broadcast to is taken off."""

    def back(g: Array) -> list[Any]:
        return [_summed_to(b(g), x.value.shape) for x, b in zip(xs, backs, strict=True) if isinstance(x, Array)]

    return made(value, xs, back)


# ------------------------------------------------------------------------------ element by element
@operation("add", 0)
def add(x: Any, y: Any) -> Array:
    """``x + y``."""
    return _made(np.add(*_values(x, y)), (x, y), lambda g: g, lambda g: g)


@operation("add", 0)
def sub(x: Any, y: Any) -> Array:
    """``x - y``."""
    return _made(np.subtract(*_values(x, y)), (x, y), lambda g: g, neg)


@operation("mul", 0)
def mul(x: Any, y: Any) -> Array:
    """``x * y``."""
    return _made(np.multiply(*_values(x, y)), (x, y), lambda g: mul(g, y), lambda g: mul(g, x))


@operation("pointwise", 0)
def div(x: Any, y: Any) -> Array:
    """``x / y``."""
    back = lambda g: neg(div(mul(g, x), mul(y, y)))  # noqa: E731
    return _made(np.divide(*_values(x, y)), (x, y), lambda g: div(g, y), back)


@operation("linear_unary")
def neg(x: Array) -> Array:
    """``-x``."""
    return _made(-x.value, (x,), neg)


def _function(name: str, forward: Callable[[Any], Any], back: Callable[[Array, Array, Array], Array]) -> Any:
    """An element-wise function; ``back(g, x, y)``."""

    def function(x: Array) -> Array:
        y = made(forward(x.value), (x,), lambda g: [back(g, x, y)])
        return y

    function.__name__ = function.__qualname__ = name
    return operation("pointwise", 0)(function)


exp = _function("exp", np.exp, lambda g, x, y: mul(g, y))
log = _function("log", np.log, lambda g, x, y: div(g, x))
tanh = _function("tanh", np.tanh, lambda g, x, y: mul(g, sub(1.0, mul(y, y))))
sqrt = _function("sqrt", np.sqrt, lambda g, x, y: div(mul(g, 0.5), y))
abs_ = _function("abs", np.abs, lambda g, x, y: mul(g, sign(x)))
sign = _function("sign", np.sign, lambda g, x, y: zeros_like(x))
_erf = np.vectorize(math.erf, otypes=[np.float64])
erf = _function(
    "erf",
    lambda v: _erf(v).astype(v.dtype) if v.size else v,
    lambda g, x, y: mul(g, mul(exp(neg(mul(x, x))), 2 / math.sqrt(math.pi))),
)


@operation("pointwise", 0)
def power(x: Array, n: float) -> Array:
    """``x ** n`` for a number ``n``."""
    return _made(np.power(*_values(x, n)), (x, n), lambda g: mul(g, mul(power(x, n - 1), n)), neg)


@operation("pointwise", 0)
def where(condition: Any, x: Any, y: Any) -> Array:
    """``x`` where ``condition``, else ``y``."""
    first, second = _values(x, y)
    return _made(
        np.where(condition.value, first, second),
        (condition, x, y),
        lambda g: zeros_like(condition),
        lambda g: where(condition, g, 0.0),
        lambda g: where(condition, 0.0, g),
    )


@operation("pointwise", 0)
def masked_fill(x: Array, mask: Array, number: float) -> Array:
    """``number`` where ``mask``, else ``x``."""
    return where(mask, number, x)


def _comparison(how: str) -> Any:
    @operation("pointwise", 0)
    def function(x: Any, y: Any) -> Array:
        return Array(getattr(np, how)(*_values(x, y)))

    return function


greater, greater_equal, less, less_equal, equal, not_equal, logical_and, logical_or = map(
    _comparison,
    ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "logical_and", "logical_or"),
)


@operation("pointwise", 0)
def remainder(x: Any, y: Any) -> Array:
    """``x % y``, of integers."""
    return Array(np.remainder(*_values(x, y)))


@operation("pointwise", 0)
def invert(x: Array) -> Array:
    """``~x``."""
    return Array(~x.value)


@operation("like")
def zeros_like(x: Array) -> Array:
    """Zeros of the shape and dtype of ``x``."""
    return Array(np.zeros_like(x.value))


@operation("linear_unary")
def cast(x: Array, dtype: Any) -> Array:
    """``x`` in a dtype, which is a floating one where ``x`` has a gradient."""
    return made(x.value.astype(dtype), (x,), lambda g: [cast(g, x.dtype)])


# ------------------------------------------------------------------------------ products and reductions
@operation("matmul", 2)
def matmul(x: Array, y: Array, transpose_x: bool = False, transpose_y: bool = False) -> Array:
    """Matrix product, with leading dimensions broadcast."""
    if transpose_x or transpose_y:
        return matmul(swapped(x) if transpose_x else x, swapped(y) if transpose_y else y)
    if min(x.ndim, y.ndim) < 2:
        a = unsqueeze(x, 0) if x.ndim == 1 else x
        b = unsqueeze(y, 1) if y.ndim == 1 else y
        product = matmul(a, b)
        shape = product.shape[:-2] + product.shape[-2:][x.ndim == 1 : 1 if y.ndim == 1 else 2]
        return reshape(product, shape)
    return _made(np.matmul(x.value, y.value), (x, y), lambda g: matmul(g, swapped(y)), lambda g: matmul(swapped(x), g))


def swapped(x: Array, dim: int = -2, other: int = -1) -> Array:
    order = [*range(x.ndim)]
    order[dim], order[other] = order[other], order[dim]
    return permute(x, tuple(order))


def _axes(x: Array, dims: Any) -> tuple[int, ...]:
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(d % x.ndim for d in dims) if dims else tuple(range(x.ndim))


def _kept(x: Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape))


@operation("sum")
def sum(x: Array, dims: Any = None, keepdim: bool = False) -> Array:
    """Sum over dimensions, or all."""
    axes, shape = _axes(x, dims), x.shape
    kept = _kept(x, axes)
    dtype = x.dtype if np.issubdtype(x.dtype, np.inexact) else None
    value = x.value.sum(axis=axes, keepdims=keepdim, dtype=dtype)
    return made(value, (x,), lambda g: [expand(reshape(g, kept), shape)])


@operation("mean")
def mean(x: Array, dims: Any = None, keepdim: bool = False) -> Array:
    """Mean over dimensions, or all."""
    return div(sum(x, dims, keepdim), float(math.prod(x.shape[d] for d in _axes(x, dims))))


def _extreme(x: Array, dims: Any, keepdim: bool, value: Any) -> Array:
    axes = _axes(x, dims)
    kept = _kept(x, axes)

    def back(g: Array) -> list[Array]:
        ties = cast(equal(x, reshape(y, kept)), x.dtype)
        return [div(mul(ties, reshape(g, kept)), sum(ties, axes, True))]

    y = made(value(x.value, axis=axes, keepdims=keepdim), (x,), back)
    return y


@operation()
def any_(x: Array) -> Array:
    """Return whether any element is true."""
    return Array(x.value.any())


@operation("amax")
def amax(x: Array, dims: Any = None, keepdim: bool = False) -> Array:
    """Largest along dimensions; those that tie share its gradient."""
    return _extreme(x, dims, keepdim, np.max)


@operation("amin")
def amin(x: Array, dims: Any = None, keepdim: bool = False) -> Array:
    """Smallest, as `amax`."""
    return _extreme(x, dims, keepdim, np.min)


@operation("along_dims")
def _accumulated(x: Array, dims: tuple[int, ...], results: int = 1) -> Array:
    (dim,) = dims

    def back(g: Array) -> list[Array]:
        reverse = (*(slice(None),) * (dim % x.ndim), slice(None, None, -1))
        return [getitem(_accumulated(getitem(g, reverse), (dim,)), reverse)]

    return made(np.cumsum(x.value, axis=dim), (x,), back)


def cumsum(x: Array, dim: int) -> Array:
    """Sums of all elements so far along ``dim``."""
    return _accumulated(x, (dim,))


# ------------------------------------------------------------------------------ views
def _view(x: Array, value: np.ndarray, back: Callable[[Array], Array]) -> Array:
    y = made(value, (x,), lambda g: [back(g)])
    if np.shares_memory(value, x.value):
        y.writes = x.writes
    return y


@operation("reshape")
def reshape(x: Array, shape: Sequence[int]) -> Array:
    """Change the shape, with one -1 at most."""
    before = x.value.shape
    return _view(x, x.value.reshape(tuple(shape)), lambda g: reshape(g, before))


@operation("permute")
def permute(x: Array, dims: Sequence[int]) -> Array:
    """Change the order of dimensions."""
    order = tuple(d % x.ndim for d in dims)
    return _view(x, x.value.transpose(order), lambda g: permute(g, tuple(int(d) for d in np.argsort(order))))


@operation("expand")
def expand(x: Array, shape: Sequence[int]) -> Array:
    """Broadcast to ``shape``, of which -1 keeps a size."""
    sizes = (1,) * (len(shape) - x.ndim) + x.value.shape
    whole = tuple(old if new == -1 else new for old, new in zip(sizes, shape, strict=True))
    before = x.value.shape
    return _view(x, np.broadcast_to(x.value, whole), lambda g: _summed_to(g, before))


@operation("unsqueeze")
def unsqueeze(x: Array, dim: int) -> Array:
    """A new dimension of size 1."""
    before = x.value.shape
    return _view(x, np.expand_dims(x.value, dim), lambda g: reshape(g, before))


@operation("squeeze")
def squeeze(x: Array, dims: tuple[int, ...] | None = None) -> Array:
    """Remove dimensions of size 1."""
    before = x.value.shape
    drop = range(x.ndim) if dims is None else {d % x.ndim for d in dims}
    shape = tuple(n for d, n in enumerate(before) if d not in drop or n != 1)
    return _view(x, x.value.reshape(shape), lambda g: reshape(g, before))


@operation("narrow")
def narrow(x: Array, dim: int, start: int, length: int) -> Array:
    """The part of so many from ``start`` along ``dim``."""
    return getitem(x, (*(slice(None),) * (dim % x.ndim), slice(start, start + length)))


@operation("split")
def split(x: Array, size: Any, dim: int = 0) -> list[Array]:
    """Pieces of one size, or of several."""
    whole = x.shape[dim]
    sizes = [min(size, whole - i) for i in range(0, whole, size)] if isinstance(size, int) else list(size)
    starts = np.cumsum([0, *sizes])
    return [narrow(x, dim, int(start), n) for start, n in zip(starts[:-1], sizes, strict=True)]


@operation("chunk")
def chunk(x: Array, count: int, dim: int = 0) -> list[Array]:
    """Cut ``x`` into at most so many pieces; an empty one gives exactly so many empty pieces."""
    if not x.shape[dim]:
        return [narrow(x, dim, 0, 0) for _ in range(count)]
    return split(x, max(-(-x.shape[dim] // count), 1), dim)


@operation("unbind")
def unbind(x: Array, dim: int = 0) -> list[Array]:
    """The slices along ``dim``."""
    return [getitem(x, (*(slice(None),) * (dim % x.ndim), i)) for i in range(x.shape[dim])]


@operation("alias")
def detach(x: Array) -> Array:
    """The same memory without history."""
    y = Array(x.value)
    y.writes = x.writes
    return y


@operation("contiguous")
def contiguous(x: Array) -> Array:
    """``x`` itself if it lies in memory in row-major order, else a copy that does."""
    return x if x.value.flags.c_contiguous else clone(x)


@operation("linear_unary")
def clone(x: Array) -> Array:
    """A copy."""
    return made(np.array(x.value, order="C"), (x,), lambda g: [g])


def with_strides(x: Array, strides: Sequence[int]) -> Array:
    """A copy that lies in memory in that way."""
    size = x.value.itemsize
    last = int(np.dot([max(n - 1, 0) for n in x.shape], strides))
    memory = np.zeros(1 + last, x.dtype)
    value = np.lib.stride_tricks.as_strided(memory, x.shape, [step * size for step in strides])
    value[...] = x.value
    return made(value, (x,), lambda g: [g])


# ------------------------------------------------------------------------------ indexing
def _plain_index(index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    return tuple(i.value if isinstance(i, Array) else i for i in items)


def getitem(x: Array, index: Any) -> Array:
    """``x[index]``."""
    tensors, encoded = encode_index(index, lambda i: isinstance(i, Array), lambda i: i.dtype == np.bool_)
    return _getitem(x, tensors, encoded)


@operation()
def _getitem(x: Array, tensors: tuple, encoded: tuple) -> Array:
    index = _plain_index(decode_index(encoded, tensors))
    if not any(isinstance(i, np.ndarray) for i in index) and Ellipsis not in index:
        index = (*index, ...)  # an element is a view too
    shape, dtype = x.value.shape, x.dtype

    def back(g: Array) -> Array:
        return _put(Array(np.zeros(shape, dtype)), g, encoded, tensors)

    return _view(x, x.value[index], back)


def _put(zeros: Array, g: Array, encoded: tuple, tensors: tuple) -> Array:
    """``g`` added to zeros at an index."""
    value = zeros.value
    np.add.at(value, _plain_index(decode_index(encoded, tensors)), g.value)
    return made(value, (g,), lambda h: [_getitem(h, tensors, encoded)])


@operation(writes=True)
def _setitem(x: Array, value: Any, tensors: tuple, encoded: tuple) -> Array:
    index = _plain_index(decode_index(encoded, tensors))
    _written(x, value, index, lambda h: _getitem(h, tensors, encoded))
    return x


def _written(x: Array, value: Any, index: Any, part: Callable[[Array], Array]) -> None:
    """Write, and let the gradient of the overwritten values end there."""
    before = Array(x.value)
    before.requires_grad, before.node = x.requires_grad, x.node
    x.value[index] = value.value if isinstance(value, Array) else value
    shape = _shape(value)

    def back(g: Array) -> list[Any]:
        mask = np.zeros(x.value.shape, bool)
        mask[index] = True
        received = [where(Array(mask), 0.0, g)]
        return [*received, _summed_to(part(g), shape)] if isinstance(value, Array) else received

    noted = made(x.value, (before, value), back)
    if noted.node is not None:
        x.requires_grad, x.node = True, noted.node


def setitem(x: Array, index: Any, value: Any) -> None:
    """``x[index] = value``."""
    tensors, encoded = encode_index(index, lambda i: isinstance(i, Array), lambda i: i.dtype == np.bool_)
    _setitem(x, value, tensors, encoded)


def _index_row(call: Any, canonical: str, operands: int) -> None:
    """The rows of both: x, perhaps the value, and the tensors of the index are operands."""
    from hyper_parallel.platform.contract import NativeOp

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        return (*args[:operands], *args[operands]), (args[operands + 1],)

    def run(func: Any, xs: tuple, static_args: tuple) -> Any:
        return call(*xs[:operands], tuple(xs[operands:]), static_args[0])

    TABLE[call] = NativeOp(canonical, bind, run, binds_by_function=False)


@operation("gather", 2)
def gather(x: Array, index: Array, dim: int) -> Array:
    """``x`` at the places along ``dim`` that ``index``, of as many dimensions, names."""
    cut = tuple(slice(None if d == dim % x.ndim else n) for d, n in enumerate(index.value.shape))
    value = np.take_along_axis(x.value[cut], index.value, dim)
    return made(value, (x,), lambda g: [scatter_add(zeros_like(x), g, index, dim)])


def scatter_add(x: Array, source: Array, index: Array, dim: int) -> Array:
    """``x`` with ``source`` added where `gather` would read."""
    places: list[Any] = list(np.indices(index.value.shape, sparse=True))
    places[dim] = index.value
    value = x.value.copy()
    np.add.at(value, tuple(places), source.value)
    return made(value, (x, source), lambda g: [g, gather(g, index, dim)])


@operation("index_select", 2)
def index_select(x: Array, index: Array, dim: int) -> Array:
    """The slices along ``dim`` that a 1-D ``index`` names."""
    return getitem(x, (*(slice(None),) * (dim % x.ndim), index))


# ------------------------------------------------------------------------------ joining
@operation("cat", -1)
def cat(xs: Sequence[Array], dim: int = 0) -> Array:
    """Joined along a dimension."""
    sizes = [x.value.shape[dim] for x in xs]
    value = np.concatenate([x.value for x in xs], axis=dim)
    return made(value, xs, lambda g: split(g, sizes, dim))


@operation("stack", -1)
def stack(xs: Sequence[Array], dim: int = 0) -> Array:
    """Joined along a new dimension."""
    return cat([unsqueeze(x, dim) for x in xs], dim % (xs[0].ndim + 1))


# ------------------------------------------------------------------------------ in place
@operation("linear_", 2, writes=True)
def copy_(x: Array, y: Any) -> Array:
    """``x[...] = y``."""
    _written(x, y, ..., lambda g: g)
    return x


@operation("pointwise_", 0, writes=True)
def fill_(x: Array, number: float) -> Array:
    """``number`` everywhere."""
    _written(x, number, ..., lambda g: g)
    return x


def _in_place(canonical: str, function: Callable[[Any, Any], Array]) -> Any:
    @operation(canonical, 0, writes=True)
    def write(x: Array, y: Any) -> Array:
        before = Array(x.value.copy())
        before.requires_grad, before.node = x.requires_grad, x.node
        result = function(before, y)
        x.value[...] = result.value
        x.requires_grad, x.node = result.requires_grad, result.node
        return x

    return write


add_, sub_, mul_ = _in_place("add_", add), _in_place("add_", sub), _in_place("mul_", mul)


@operation("pointwise_", 0, writes=True)
def exp_(x: Array) -> Array:
    """The exponential in place."""
    return _exp_in_place(x, 0.0)


_exp_in_place = _in_place("pointwise_", lambda x, _: exp(x))
_index_row(_getitem, "getitem", 1)
_index_row(_setitem, "setitem_", 2)
