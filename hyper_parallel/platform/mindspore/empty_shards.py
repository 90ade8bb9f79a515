"""What operations give for empty shards.

With uneven sharding a rank may hold no elements, and MindSpore's CPU kernels then often leave the result, or the
gradient of another operand, uninitialised: a matrix product that contracts a dim of size 0, the gradient of what is
broadcast to an empty tensor, the bias of an empty batch. `guarded` wraps the call of a row: with an empty operand it
takes another way, which stays differentiable by every operand, because the collectives of backward must run on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.indexing import decode_index
from hyper_parallel.platform.mindspore.dtypes import FLOATS
from hyper_parallel.platform.mindspore.private import AutogradFunction as _Function
from hyper_parallel.platform.mindspore.private import NoFallbackGuard, no_grad

__all__ = ["connected_zeros", "guarded"]


_DIFFERENTIABLE = FLOATS | {ms.complex64, ms.complex128}


class _Zeros(_Function):
    """Zeros that lead back to tensors, to which they give the gradient zero. That leads back to them too, as the
    gradient of what the zeros stand for does: in gradients of gradients collectives may wait on the way."""

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
    """Zeros of which every operand is an input with gradient zero."""
    parts = [x for x in operands if isinstance(x, Tensor) and x.dtype in _DIFFERENTIABLE]
    if dtype not in _DIFFERENTIABLE or not parts:
        return ops.zeros(shape, dtype)
    return _Zeros.apply(shape, dtype, *parts)


def guarded(op: NativeOp, flat: bool = False) -> NativeOp:
    """The row, made safe for empty operands. ``flat``: it is element-wise, and MindSpore records no gradient of it."""
    call, when_empty = op.call, _flat if flat else _WHEN_EMPTY.get(op.name, _connected)

    def safe_call(func: Any, operands: tuple, statics: Any) -> Any:
        for x in operands:
            if isinstance(x, Tensor) and 0 in x._shape:
                return when_empty(call, func, operands, statics)
        return call(func, operands, statics)

    return replace(op, call=safe_call)


def _connected(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    """What the operation itself gives, where it gives nothing led back to the operands: MindSpore records few
    operations on empty tensors."""

    def connect(y: Any) -> Any:
        return connected_zeros(tuple(y.shape), y.dtype, operands) if isinstance(y, Tensor) and 0 in y.shape else y

    result = call(func, operands, statics)
    return tuple(map(connect, result)) if isinstance(result, (tuple, list)) else connect(result)


def _repeat(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    x, times = operands[0], tuple(statics[0])
    shape = (1,) * (len(times) - x.ndim) + tuple(x.shape)
    times = (1,) * (len(shape) - len(times)) + times
    return connected_zeros(tuple(n * t for n, t in zip(shape, times, strict=True)), x.dtype, operands)


def _unbind(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    x, dim = operands[0], statics[0] % operands[0].ndim
    shape = tuple(x.shape)
    return tuple(connected_zeros((*shape[:dim], *shape[dim + 1 :]), x.dtype, operands) for _ in range(shape[dim]))


def _stack(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    x, dim = operands[0], statics[0] % (operands[0].ndim + 1)
    shape = tuple(x.shape)
    return connected_zeros((*shape[:dim], len(operands), *shape[dim:]), x.dtype, operands)


def _elementwise(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    return connected_zeros(_broadcast(operands), _with_elements(call, func, operands, statics).dtype, operands)


def _flat(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    """Leads back to nothing, as what the ranks with elements have: collectives of backward run on all ranks or none."""
    return ops.zeros(_broadcast(operands), _with_elements(call, func, operands, statics).dtype)


def _elementwise_inplace(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    return _nothing_written(operands[0]) if 0 in operands[0].shape else call(func, operands, statics)


def _nothing_written(x: Tensor) -> Tensor:
    """``x``, which has no elements, after a write. It counts as written to, as on ranks that have elements: a backward
    that has kept it then fails on all ranks, or on none."""
    with no_grad():
        Tensor.copy_(x, x)
    return x


def _broadcast(operands: tuple) -> tuple[int, ...]:
    shapes = [tuple(x.shape) for x in operands if isinstance(x, Tensor)]
    ndim = max(map(len, shapes))
    padded = [(1,) * (ndim - len(s)) + s for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True))


def _linear(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    x, weight, bias = (*operands, None)[:3]
    shape = (*x.shape[:-1], weight.shape[0])
    if 0 in shape or bias is None:
        return connected_zeros(shape, x.dtype, operands)
    return connected_zeros(shape, x.dtype, (x, weight)) + bias


def _matmul(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    a, b = operands
    transpose_a, transpose_b = statics
    rows = () if len(a.shape) == 1 else (a.shape[-1 if transpose_a else -2],)
    columns = () if len(b.shape) == 1 else (b.shape[-2 if transpose_b else -1],)
    batch = _batch(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    return connected_zeros((*batch, *rows, *columns), a.dtype, operands)


def _batch(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    ndim = max(len(a), len(b))
    pairs = zip((1,) * (ndim - len(a)) + a, (1,) * (ndim - len(b)) + b, strict=True)
    return tuple(n if m == 1 else m for m, n in pairs)


def _addmm(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    c, a, b = operands
    beta = statics[0]
    product = connected_zeros((a.shape[0], b.shape[1]), a.dtype, (a, b))
    if 0 in product.shape:
        return connected_zeros(tuple(product.shape), a.dtype, operands)
    return product + (c if beta == 1 else c * beta)


def _reduce(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    """Sums of nothing are zero; of what has no neutral element only results without elements are asked for."""
    x, (dims, keepdim) = operands[0], statics[:2]
    reduced = range(x.ndim) if dims is None else [d % x.ndim for d in dims]
    shape = tuple(1 if d in reduced else n for d, n in enumerate(x.shape) if keepdim or d not in reduced)
    result = _with_elements(call, func, operands, statics)
    if isinstance(result, tuple):
        return tuple(connected_zeros(shape, r.dtype, operands) for r in result)
    return connected_zeros(shape, result.dtype, operands)


def _vector_norm(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    return _reduce(lambda func, operands, _: call(func, operands, statics), func, operands, statics[1:])


def _with_elements(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    """What the operation gives where empty dims have size 1: tells the dtypes and the number of results."""
    stand_ins = [ops.ones(tuple(n or 1 for n in x.shape), x.dtype) if isinstance(x, Tensor) else x for x in operands]
    return call(func, tuple(stand_ins), statics)


def _expand(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    x, shape = operands[0], statics[0]
    own = (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)
    return connected_zeros(tuple(o if n == -1 else n for o, n in zip(own, shape, strict=True)), x.dtype, operands)


def _like_first(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    return connected_zeros(tuple(operands[0].shape), operands[0].dtype, operands)


def _dropout(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    """Draws all the same, so that the generators of the ranks stay in step."""
    call(func, (ops.ones((1,), ms.float32),), statics)
    return _like_first(call, func, operands, statics)


def _norm(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    x = operands[0]
    dims, statistics = statics[:2]
    shape = tuple(x.shape)
    of_statistics = (*shape[: len(shape) - dims], *(1,) * dims)
    y = connected_zeros(shape, x.dtype, operands)
    return (y, *(ops.zeros(of_statistics, ms.float32) for _ in range(statistics))) if statistics else y


def _along_dims(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    shape, result = tuple(operands[0].shape), _with_elements(call, func, operands, statics)
    if isinstance(result, tuple):
        return tuple(connected_zeros(shape, r.dtype, operands) for r in result)
    return connected_zeros(shape, result.dtype, operands)


def _topk(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    k, dim = statics[:2]
    shape = list(operands[0].shape)
    shape[dim] = k
    result = _with_elements(call, func, operands, statics)
    return tuple(connected_zeros(tuple(shape), r.dtype, operands) for r in result)


def _gather(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    return connected_zeros(tuple(operands[1].shape), operands[0].dtype, operands)


def _index_select(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    x, index = operands
    shape = list(x.shape)
    shape[statics[0]] = index.shape[0]
    return connected_zeros(tuple(shape), x.dtype, operands)


def _embedding(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    ids, weight = operands
    return connected_zeros((*ids.shape, weight.shape[1]), weight.dtype, operands)


def _loss(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    """Of no samples; a mean counts as 0, since the rule makes means of sums."""
    logits = operands[0]
    shape = (*logits.shape[:1], *logits.shape[2:]) if statics[0] == "none" else ()
    return connected_zeros(shape, logits.dtype, operands)


def _one_hot(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    return ops.zeros((*operands[0].shape, statics[0]), statics[3])


def getitem_of_nothing(call: Any, func: Any, operands: tuple, statics: Any) -> Any:
    """NumPy knows the shape."""
    indices = tuple(x.asnumpy() for x in operands[1:])
    stand_in = np.zeros(tuple(operands[0].shape), np.bool_)[decode_index(statics[0], indices)]
    return connected_zeros(stand_in.shape, operands[0].dtype, operands)


def _setitem(call: Callable, func: Any, operands: tuple, statics: Any) -> Any:
    if 0 in operands[0].shape:
        return _nothing_written(operands[0])
    nowhere = any(isinstance(x, Tensor) and 0 in x.shape for x in operands[2:])
    return operands[0] if nowhere else call(func, operands, statics)


_WHEN_EMPTY: dict[str, Callable[[Callable, Any, tuple, Any], Any]] = {
    **dict.fromkeys(("pointwise", "add", "mul", "linear_unary", "alias", "contiguous"), _elementwise),
    # MindSpore leads no gradient back through a quotient that it rounds.
    "div": lambda call, func, operands, statics: (_flat if statics and statics[0] is not None else _elementwise)(
        call, func, operands, statics
    ),
    # No gradient leads from ones or zeros to what they are like, on no rank.
    "like": lambda call, func, operands, statics: call(func, operands, statics),
    **dict.fromkeys(("pointwise_", "add_", "mul_", "div_", "linear_"), _elementwise_inplace),
    "linear": _linear,
    "matmul": _matmul,
    "addmm": _addmm,
    **dict.fromkeys(("sum", "amax", "amin", "reduce_whole", "reduce_pair"), _reduce),
    "vector_norm": _vector_norm,
    "expand": _expand,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "along_dims": _along_dims,
    "softmax": _along_dims,
    "log_softmax": _along_dims,
    "logsumexp": _reduce,
    "topk": _topk,
    "gather": _gather,
    "index_select": _index_select,
    "embedding": _embedding,
    "repeat": _repeat,
    "stack": _stack,
    "unbind": _unbind,
    "one_hot": _one_hot,
    "cross_entropy": _loss,
    "nll_loss": _loss,
    "getitem": getitem_of_nothing,
    "setitem_": _setitem,
    "dropout": _dropout,
    "attention": _like_first,
}
