"""What operations give for empty shards.

With uneven sharding a rank may hold no elements, and MindSpore's CPU kernels then often leave the result, or the
gradient of another operand, uninitialised: a matrix product that contracts a dim of size 0, the gradient of what is
broadcast to an empty tensor, the bias of an empty batch. `safe_when_empty` wraps the call of a row: with an empty
operand it takes another way, which stays differentiable by every operand, because the collectives of backward must run
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.indexing import decode_index
from hyper_parallel.platform.mindspore.dtypes import DIFFERENTIABLE
from hyper_parallel.platform.mindspore.private import AutogradFunction as _Function
from hyper_parallel.platform.mindspore.private import NoFallbackGuard, TensorPy, no_grad

__all__ = ["connected_zeros", "getitem_of_nothing", "safe_when_empty"]

Call = Callable[[Any, tuple, Any], Any]
WhenEmpty = Callable[[Call, Any, tuple, Any], Any]

#: The same data, not connected to anything.
_data = TensorPy.data.__get__


class _Zeros(_Function):
    """Zeros that are connected to tensors, with zero as their gradient. The gradient is connected to them again, as
    that of the operation would be: in gradients of gradients, too, collectives may have to run."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: Any, *operands: Tensor) -> Tensor:
        ctx.save_for_backward(*operands)
        return ops.zeros(shape, dtype)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:
        operands = ctx.saved_tensors
        with NoFallbackGuard():
            zeros = [_Zeros.apply(tuple(x._shape), x.dtype, cotangent, *operands) for x in operands]
        return None, None, *zeros


def connected_zeros(shape: tuple[int, ...], dtype: Any, operands: tuple) -> Tensor:
    """Zeros that are connected to every operand that can have a gradient, which is zero."""
    parts = [x for x in operands if isinstance(x, Tensor) and x.dtype in DIFFERENTIABLE]
    if dtype not in DIFFERENTIABLE or not parts:
        return ops.zeros(shape, dtype)
    return _Zeros.apply(shape, dtype, *parts)


def safe_when_empty(name: str, call: Call, flat: bool = False) -> Call:
    """``call`` of a row of the canonical operation ``name``, made safe for empty operands. ``flat``: element-wise, and
    MindSpore gives the operands no gradient."""
    when_empty = _flat if flat else _WHEN_EMPTY.get(name, _connected)
    if when_empty is None:
        return call

    def safe_call(func: Any, operands: tuple, statics: Any) -> Any:
        for x in operands:
            if isinstance(x, Tensor) and 0 in x._shape:
                return when_empty(call, func, operands, statics)
        return call(func, operands, statics)

    return safe_call


def _connected(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    """The operation's own results, with those that are empty replaced by zeros that are connected to the operands:
    MindSpore records few operations on empty tensors."""

    def connect(y: Any) -> Any:
        return connected_zeros(tuple(y.shape), y.dtype, operands) if isinstance(y, Tensor) and 0 in y.shape else y

    result = call(func, operands, statics)
    return tuple(map(connect, result)) if isinstance(result, (tuple, list)) else connect(result)


# -------------------------------------------------------------------- what has the shape of other results
def _zeros(stand_in: Callable[[Tensor, tuple[int, ...]], Tensor], connected: bool = True) -> WhenEmpty:
    """Zeros of the shapes and dtypes that the operation would give: sums of nothing, or results without elements.

    The operation runs on stand-ins in which each empty dimension has size 1, and again on some with size 2. The sizes
    of a result are linear in that size, so those for size 0 follow.

    Args:
        stand_in: (operand, shape) -> tensor of that shape and of the operand's dtype.
        connected: whether the zeros are connected to the operands. No rank's result must be where that of another is
            not: collectives of backward run on all ranks or none.
    """

    def when_empty(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
        def results(size: int) -> Any:
            stand_ins = [
                stand_in(x, tuple(n or size for n in x.shape)) if isinstance(x, Tensor) else x for x in operands
            ]
            return call(func, tuple(stand_ins), statics)

        def zeros(one: Tensor, two: Tensor) -> Tensor:
            shape = tuple(2 * n - m for n, m in zip(one.shape, two.shape, strict=True))
            return connected_zeros(shape, one.dtype, operands if connected else ())

        one, two = results(1), results(2)
        if isinstance(one, Tensor):
            return zeros(one, two)
        count = 2 * len(one) - len(two)  # `unbind` of nothing has no results
        return tuple(map(zeros, one[:count], two[:count]))

    return when_empty


def _ones(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ops.ones(shape, x.dtype) if 0 in x._shape else _data(x)  # which may be a large weight


def _first_indices(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """All zeros, because some are indices, of which others are out of range where the table is a stand-in."""
    return ops.zeros(shape, x.dtype)


_of_values = _zeros(_ones)
_of_indices = _zeros(_first_indices)
_flat = _zeros(_ones, connected=False)


def _quotient(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    """MindSpore gives no gradient through a quotient that it rounds."""
    return (_flat if statics and statics[0] is not None else _of_values)(call, func, operands, statics)


def _linear(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    x, weight, bias = (*operands, None)[:3]
    return _plus(_of_values(call, func, (x, weight, None), statics), bias, operands)


def _addmm(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    c, a, b = operands
    beta = statics[0]
    product = _of_values(lambda func, factors, statics: mint.matmul(*factors), func, (a, b), ())
    return _plus(product, c if beta == 1 else c * beta, operands)


def _plus(product: Tensor, term: Any, operands: tuple) -> Tensor:
    if 0 in product.shape or term is None:
        return connected_zeros(tuple(product.shape), product.dtype, operands)
    return product + term


def _expand(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    x, shape = operands[0], statics[0]
    own = (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)
    return connected_zeros(tuple(o if n == -1 else n for o, n in zip(own, shape, strict=True)), x.dtype, operands)


def _like_first(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    return connected_zeros(tuple(operands[0].shape), operands[0].dtype, operands)


def _dropout(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    """Draws all the same, so that the generators of the ranks stay in step."""
    call(func, (ops.ones((1,), ms.float32),), statics)
    return _like_first(call, func, operands, statics)


def getitem_of_nothing(call: Any, func: Any, operands: tuple, statics: Any) -> Any:
    """NumPy finds out the shape."""
    indices = tuple(x.asnumpy() for x in operands[1:])
    stand_in = np.zeros(tuple(operands[0].shape), np.bool_)[decode_index(statics[0], indices)]
    return connected_zeros(stand_in.shape, operands[0].dtype, operands)


# -------------------------------------------------------------------- in place
def _elementwise_inplace(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    return _nothing_written(operands[0]) if 0 in operands[0].shape else call(func, operands, statics)


def _setitem(call: Call, func: Any, operands: tuple, statics: Any) -> Any:
    nowhere = any(isinstance(x, Tensor) and 0 in x.shape for x in operands[2:])
    return operands[0] if nowhere else _elementwise_inplace(call, func, operands, statics)


def _nothing_written(x: Tensor) -> Tensor:
    """``x``, which has no elements, after a write. It counts as written to, as on ranks that have elements: a backward
    that has kept it then fails on all ranks, or on none."""
    with no_grad():
        Tensor.copy_(x, x)
    return x


#: Canonical operation -> what it gives; None: what it gives by itself. Operations that are not here: `_connected`.
_WHEN_EMPTY: dict[str, WhenEmpty | None] = {
    "like": None,  # on no rank are zeros or ones connected to the tensor that they are like
    **dict.fromkeys(("pointwise", "add", "mul", "linear_unary", "matmul", "repeat", "stack", "unbind"), _of_values),
    **dict.fromkeys(("sum", "amax", "amin", "reduce_whole", "reduce_pair", "vector_norm", "logsumexp"), _of_values),
    **dict.fromkeys(("layer_norm", "rms_norm", "along_dims", "softmax", "log_softmax", "topk"), _of_values),
    **dict.fromkeys(("gather", "index_select", "embedding", "one_hot", "cross_entropy", "nll_loss"), _of_indices),
    **dict.fromkeys(("pointwise_", "add_", "mul_", "div_", "linear_"), _elementwise_inplace),
    "div": _quotient,
    "linear": _linear,
    "addmm": _addmm,
    "expand": _expand,
    "getitem": getitem_of_nothing,
    "setitem_": _setitem,
    "dropout": _dropout,
    "attention": _like_first,
}
