"""Results of operations on empty shards.

With uneven sharding a rank may hold no elements. MindSpore's CPU kernels then often leave the result, or the gradient
of another operand, uninitialised. Examples are a matrix product that contracts a dim of size 0, and the bias of an
empty batch. Another example is the gradient of an operand that is broadcast to an empty tensor. `safe_when_empty` wraps
the call of an op-table row. With an empty operand the result is zeros of the shape that core's rule gives. The zeros
are differentiable by every operand, because the collectives of backward must run on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from hyper_parallel.platform.contract import Dispatch, NativeOp
from hyper_parallel.platform.mindspore.basics.dtypes import DIFFERENTIABLE, FLOATS
from hyper_parallel.platform.mindspore.basics.private import AutogradFunction, NoFallbackGuard, is_recording, no_grad

__all__ = ["connected_zeros", "nothing_taken", "safe_when_empty", "use_rules", "written_nothing"]

#: Core's dispatcher, which knows the rules: set by `use_rules`.
_DISPATCH: list[Dispatch] = []


def use_rules(dispatch: Dispatch) -> None:
    """Set core's dispatcher. Called when the DTensor class is made."""
    _DISPATCH[:] = [dispatch]


class _Zeros(AutogradFunction):
    """Zeros whose inputs are the operands, with gradient zero. The gradient has the operands as inputs too, as on ranks
    with elements. So this rank takes part in the collectives of gradients of gradients.

    `save_for_backward` would reject operands that the program has written to since. So this function saves none: it
    reads no values, and an addition on ranks with elements saves none either.
    """

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: Any, *operands: Tensor) -> Tensor:
        ctx.operands = operands
        return ops.zeros(shape, dtype)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:
        operands = ctx.operands
        with NoFallbackGuard():
            zeros = [_Zeros.apply(tuple(x._shape), x.dtype, cotangent, *operands) for x in operands]
        return None, None, *zeros


class _Written(AutogradFunction):
    """A copy of ``x`` after a write that changes no element on this rank.

    On other ranks the written value gets a gradient. So this rank must take part in the collectives of its backward.
    Saves nothing, since ``x`` is about to change.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.value = tuple(value._shape), value.dtype
        return ops.zeros(tuple(x._shape), x.dtype) if 0 in x._shape else Tensor.copy(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:
        with NoFallbackGuard():
            shape, dtype = ctx.value
            return cotangent, connected_zeros(shape, dtype, (cotangent,))


def written_nothing(x: Tensor, value: Any) -> Tensor | None:
    """Return ``x`` after a write that changes none of its elements. Return None if ``value`` gets no gradient."""
    if not (isinstance(value, Tensor) and is_recording() and value._requires_grad):
        return None
    Tensor.copy_(x, _Written.apply(x, value))
    return x


def connected_zeros(shape: tuple[int, ...], dtype: Any, operands: tuple) -> Tensor:
    """Return zeros that depend on every operand in the graph. Each operand's gradient is zero."""
    parts = [x for x in operands if isinstance(x, Tensor) and x.dtype in DIFFERENTIABLE]
    if dtype not in DIFFERENTIABLE or not parts:
        return ops.zeros(shape, dtype)
    return _Zeros.apply(shape, dtype, *parts)


def safe_when_empty(op: NativeOp, flat: bool | tuple[int, ...] = False, inside: float = 9) -> NativeOp:
    """Return the op-table row with a call that is safe for empty operands.

    Args:
        op: the row.
        flat: for an element-wise operation, whether MindSpore records no gradient of it, or the indices of operands
            without gradient.
        inside: a number in the domain of an element-wise operation.
    """
    call, when_empty = op.call, _WHEN_EMPTY.get(op.name, _connected)
    if op.name == "pointwise":

        def when_empty(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
            places = range(len(operands)) if flat is True else flat or ()
            inputs = tuple(x for i, x in enumerate(operands) if i not in places)
            return _zeros(op, func, operands, static_args, inputs, inside)

    def safe_call(func: Any, operands: tuple, static_args: Any) -> Any:
        for x in operands:
            if isinstance(x, Tensor) and 0 in x._shape:
                return when_empty(op, func, operands, static_args)
        return call(func, operands, static_args)

    return replace(op, call=safe_call)


def _result_shapes(op: NativeOp, operands: tuple, static_args: Any) -> tuple:
    shapes = tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in operands)
    found = _DISPATCH[0].result_shapes(op.name, shapes, static_args)
    # Sizes that depend on the data are 0 for empty data.
    return tuple(tuple(0 if size is None else size for size in shape) for shape in found)


def _connected(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    """Run the operation itself. Empty results get every operand as an input: MindSpore records few operations on empty
    tensors."""

    def connect(y: Any) -> Any:
        return connected_zeros(tuple(y.shape), y.dtype, operands) if isinstance(y, Tensor) and 0 in y.shape else y

    result = op.call(func, operands, static_args)
    return tuple(map(connect, result)) if isinstance(result, (tuple, list)) else connect(result)


def _zeros(
    op: NativeOp, func: Any, operands: tuple, static_args: Any, inputs: tuple | None = None, inside: float = 0
) -> Any:
    """Return zeros, the sum of no elements. Operations other than sums, such as a maximum, call this for empty results
    only.

    A call on zeros, whose empty dimensions have size 1, determines dtypes and the number of results. ``inputs``: the
    tensors that the zeros depend on, if not all operands. ``inside``: the number used in place of zero for floats, for
    kernels that reject zero.
    """

    def stand_in(x: Any) -> Tensor:
        return ops.full(tuple(n or 1 for n in x.shape), inside if x.dtype in FLOATS else 0, dtype=x.dtype)

    stand_ins = [stand_in(x) if isinstance(x, Tensor) else x for x in operands]
    result = op.call(func, tuple(stand_ins), static_args)
    several = isinstance(result, (tuple, list))
    found = tuple(
        connected_zeros(shape, y.dtype, operands if inputs is None else inputs)
        for shape, y in zip(_result_shapes(op, operands, static_args), result if several else (result,), strict=False)
    )
    return found if several else found[0]


def _flat(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    """Return zeros without inputs in the graph, for operations whose results have no inputs on ranks with elements
    either.

    So collectives of backward run on all ranks or on none.
    """
    return _zeros(op, func, operands, static_args, ())


def nothing_taken(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Tensor:
    """Return zeros in the dtype of the first operand, for operations whose static arguments contain the sizes."""
    return connected_zeros(_result_shapes(op, operands, static_args)[0], operands[0].dtype, operands)


def _product_and_term(op: NativeOp, operands: tuple, static_args: Any, factors: slice, term: Any) -> Tensor:
    """Return a product of empty operands, which is zero, plus a term."""
    (shape,), dtype = _result_shapes(op, operands, static_args), operands[1].dtype
    if term is None or 0 in shape:
        return connected_zeros(shape, dtype, operands)
    return connected_zeros(shape, dtype, operands[factors]) + term


def _linear(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    return _product_and_term(op, operands, static_args, slice(2), (*operands, None)[2])


def _addmm(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    c, beta = operands[0], static_args[0]
    return _product_and_term(op, operands, static_args, slice(1, 3), c if beta == 1 else c * beta)


def _in_place(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    return _nothing_written(operands[0]) if 0 in operands[0].shape else op.call(func, operands, static_args)


def _nothing_written(x: Tensor) -> Tensor:
    """Return the empty ``x`` after a write. The write is counted, as on ranks with elements. So a backward that has
    saved ``x`` fails on all ranks, or on none."""
    with no_grad():
        Tensor.copy_(x, x)
    return x


def _dropout(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    """Draw random numbers for an empty shard too, so that the generators of all ranks stay in the same state."""
    op.call(func, (ops.ones((1,), ms.float32),), static_args)
    return nothing_taken(op, func, operands, static_args)


def _written(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    """Return a copy of the first operand, which is the result of a write that changes nothing."""
    x = operands[0]
    if 0 in x.shape:
        return nothing_taken(op, func, operands, static_args)
    return connected_zeros(tuple(x.shape), x.dtype, operands[1:]) + x


def _unless_empty(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    """Run the operation unless its result is empty. A padded result has elements even if the operand is empty."""
    if 0 in _result_shapes(op, operands, static_args)[0]:
        return nothing_taken(op, func, operands, static_args)
    return op.call(func, operands, static_args)


def _setitem(op: NativeOp, func: Any, operands: tuple, static_args: Any) -> Any:
    nowhere = any(isinstance(x, Tensor) and 0 in x.shape for x in operands[2:])
    x, value = operands[:2]
    if 0 not in x.shape:
        return x if nowhere else op.call(func, operands, static_args)
    written = written_nothing(x, value)
    return _nothing_written(x) if written is None else written


#: Operations whose results are zero, or empty, if an operand is empty.
_ZERO = """
    add mul linear_unary alias contiguous matmul sum amax amin reduce_whole reduce_pair vector_norm logsumexp
    along_dims along_linear softmax log_softmax topk glu by_table searchsorted count layer_norm rms_norm gather
    index_select embedding one_hot repeat stack unbind
    cross_entropy nll_loss
"""
#: Canonical operation -> its function for empty operands; `_connected` for others.
_WHEN_EMPTY: dict[str, Callable[[NativeOp, Any, tuple, Any], Any]] = {
    **dict.fromkeys(_ZERO.split(), _zeros),
    # MindSpore records no gradient of a rounded quotient.
    "div": lambda op, func, operands, static_args: (_flat if static_args and static_args[0] is not None else _zeros)(
        op, func, operands, static_args
    ),
    # Ones or zeros have no gradient with respect to the tensor that gives their shape, on any rank.
    "like": lambda op, func, operands, static_args: op.call(func, operands, static_args),
    **dict.fromkeys(("pointwise_", "add_", "mul_", "div_", "linear_"), _in_place),
    **dict.fromkeys(("expand", "getitem", "attention", "take", "masked_select"), nothing_taken),
    **dict.fromkeys(("scatter", "index_write", "setitem", "index_add", "masked_scatter"), _written),
    "unique_in_order": _flat,
    "pad": _unless_empty,
    "linear": _linear,
    "addmm": _addmm,
    "setitem_": _setitem,
    "dropout": _dropout,
}
