"""Element-wise operations: functions, methods, operators, their in-place forms, conversions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import (
    Table,
    UnboundCallError,
    call_elementwise,
    elementwise,
    find,
    signature,
    words,
)
from hyper_parallel.platform.torch.private import native

__all__ = ["CONVERSIONS", "table"]

T: Any = torch.Tensor

#: canonical operation -> row of ``to``.
CONVERSIONS: dict[str, NativeOp] = {}

_UNARY = words(
    """
abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not ceil celu
cos cosh digamma elu erf erfc erfcx erfinv exp exp2 expit expm1 fix floor frac gammaln gelu hardshrink hardsigmoid
hardswish hardtanh i0 i0e i1 i1e isfinite isinf isnan isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2
log_ndtr log_sigmoid logical_not logit logsigmoid mish mvlgamma nan_to_num ndtr ndtri polygamma psi reciprocal relu
relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh
tanhshrink threshold trunc bool int long short char byte __abs__ __invert__
"""
)

_BINARY = words(
    """
arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign eq float_power
floor_divide fmax fmin fmod gcd ge greater greater_equal gt heaviside hypot isclose lcm ldexp le less less_equal
logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum ne nextafter not_equal polar pow prelu
remainder xlog1py xlogy __and__ __eq__ __floordiv__ __ge__ __gt__ __le__ __lshift__ __lt__ __mod__ __ne__ __or__
__pow__ __rand__ __rfloordiv__ __rlshift__ __rmod__ __ror__ __rpow__ __rrshift__ __rshift__ __rxor__ __xor__
"""
)

#: Linear in their only operand, whatever the remaining arguments say.
_LINEAR = words(
    """
clone conj_physical deg2rad detach_copy neg negative positive rad2deg resolve_conj resolve_neg
pin_memory cpu cuda npu __neg__ __pos__
"""
)

_IN_PLACE_BINARY = words(
    """
__iand__ __ifloordiv__ __ilshift__ __imod__ __ior__ __ipow__ __irshift__ __ixor__
"""
)


def _second_name(name: str) -> str:
    return {"pow": "exponent", "float_power": "exponent", "prelu": "weight", "heaviside": "values"}.get(name, "other")


def _in_place_forms(names: list[str]) -> list[Any]:
    return find((f"{n}_" for n in names if not n.startswith("__")), torch, T, F)


def table() -> Table:
    """Rows of all element-wise operations."""
    rows: Table = {}
    rows.update(dict.fromkeys(find(_UNARY), elementwise("pointwise", "input")))
    for name in _BINARY:
        rows.update(dict.fromkeys(find([name]), elementwise("pointwise", "input", _second_name(name))))
    linear = elementwise("linear_unary", "input")
    rows.update(dict.fromkeys(find(_LINEAR, torch, T), linear))
    views = [*find(["conj", "detach"], torch, T), *(getattr(T, name).__get__ for name in ("data", "real", "imag"))]
    rows.update(dict.fromkeys(views, elementwise("alias", "input")))
    rows[T.contiguous] = elementwise("contiguous", "input")
    rows.update(_arithmetic())
    rows.update(_three_operands())
    rows.update(_conversions())
    rows.update(_like())
    rows.update(_activations())
    rows.update(_in_place())
    return rows


def _arithmetic() -> Table:
    rows: Table = {}
    add, mul = elementwise("add", "input", "other"), elementwise("mul", "input", "other")
    names = ["add", "sub", "subtract", "rsub", "__add__", "__radd__", "__sub__", "__rsub__"]
    rows.update(dict.fromkeys(find(names), add))
    rows.update(dict.fromkeys(find(["mul", "multiply", "__mul__", "__rmul__"]), mul))
    names = ["div", "divide", "true_divide", "__truediv__", "__div__"]
    rows.update(dict.fromkeys(find(names), NativeOp("div", _bind_div, _call_div)))
    reflected = NativeOp("div", lambda func, args, kwargs: ((args[1], args[0]), (None,)), _call_div)
    rows.update(dict.fromkeys(find(["__rdiv__", "__rtruediv__"], T), reflected))
    return rows


_div_arguments = signature("input", "other", rounding_mode=None)


def _bind_div(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if not kwargs and len(args) == 2:
        return args, (None,)
    x, other, mode = _div_arguments(func, args, kwargs)
    return (x, other), (mode,)


def _call_div(func: Any, operands: tuple, statics: tuple) -> Any:
    a, b = operands
    if not isinstance(a, T):
        # A Python number divided by a tensor, as Tensor.__rtruediv__ does it.
        return b.reciprocal() * a
    return a.div(b) if statics[0] is None else a.div(b, rounding_mode=statics[0])


_SEVERAL_OPERANDS: tuple[tuple[list[str], tuple[str, ...]], ...] = (
    (["clamp", "clip"], ("input", "min", "max")),
    (["clamp_min"], ("input", "min")),
    (["clamp_max"], ("input", "max")),
    (["lerp"], ("input", "end", "weight")),
    (["addcmul", "addcdiv"], ("input", "tensor1", "tensor2")),
    (["masked_fill"], ("input", "mask", "value")),
)


def _three_operands() -> Table:
    rows: Table = {}
    for names, operands in _SEVERAL_OPERANDS:
        rows.update(dict.fromkeys(find(names, torch, T), elementwise("pointwise", *operands)))
        rows.update(dict.fromkeys(find([f"{n}_" for n in names], torch, T), elementwise("pointwise_", *operands)))
    where = elementwise("pointwise", "condition", "input", "other")

    def bind_where(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
        if len(args) + len(kwargs) < 3:
            raise UnboundCallError  # where(condition): indices, whose number depends on the data
        return where.bind(func, args, kwargs)

    rows[torch.where] = NativeOp("pointwise", bind_where, where.call)
    rows[T.where] = elementwise("pointwise", "input", "condition", "other")
    return rows


def _conversions() -> Table:
    """``to`` and its relatives. A handler chooses between these rows: a conversion to integers is not linear, so a
    partial sum must not be rounded piece by piece."""
    CONVERSIONS["linear_unary"] = NativeOp("linear_unary", _bind_to, _call_to)
    CONVERSIONS["pointwise"] = NativeOp("pointwise", _bind_to, _call_to)
    rows = dict.fromkeys([T.to, T.type_as], CONVERSIONS["linear_unary"])
    names = ["float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf"]
    rows.update(dict.fromkeys(find(names, T), elementwise("linear_unary", "input")))
    return rows


def _bind_to(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    return args[:1], (args[1:], kwargs)


def _call_to(func: Any, operands: tuple, statics: Any) -> Any:
    return operands[0].to(*statics[0], **statics[1])


def _like() -> Table:
    """New tensors of the shape of a distributed one. ``new_*`` of another shape runs as an unknown function."""
    rows = dict.fromkeys(find(["zeros_like", "ones_like", "empty_like"], torch), elementwise("like", "input"))
    rows[torch.full_like] = elementwise("like", "input")
    return rows


def _activations() -> Table:
    """Activations whose Python wrapper takes ``inplace``: the wrapper is skipped, the kernel called directly. With
    ``inplace=True`` they do not come here, see `functional.calls_in_place`."""
    kernels: dict[Any, Any] = {
        F.relu: torch.relu,
        F.silu: native("silu"),
        F.relu6: native("relu6"),
        F.mish: native("mish"),
        F.hardswish: native("hardswish"),
        F.hardsigmoid: native("hardsigmoid"),
        F.selu: torch.selu,
    }

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
        return args, None

    rows: Table = {}
    for wrapper, kernel in kernels.items():
        rows[wrapper] = NativeOp("pointwise", bind, _calling(kernel))
    return rows


def _calling(kernel: Any) -> Any:
    return lambda func, operands, statics: kernel(*operands)


def _in_place() -> Table:
    rows: Table = {}
    unary, binary = elementwise("pointwise_", "input"), elementwise("pointwise_", "input", "other")
    rows.update(dict.fromkeys(_in_place_forms(_UNARY), unary))
    rows.update(dict.fromkeys([*_in_place_forms(_BINARY), *find(_IN_PLACE_BINARY, T)], binary))
    rows[T.pow_] = elementwise("pointwise_", "input", "exponent")
    rows[T.fill_] = elementwise("pointwise_", "input", "value")
    names = ["add_", "sub_", "subtract_", "__iadd__", "__isub__"]
    rows.update(dict.fromkeys(find(names, T), elementwise("add_", "input", "other")))
    rows.update(dict.fromkeys(find(["mul_", "multiply_", "__imul__"], T), elementwise("mul_", "input", "other")))
    names = ["div_", "divide_", "true_divide_", "__idiv__", "__itruediv__"]
    rows.update(dict.fromkeys(find(names, T), NativeOp("div_", _bind_div, _call_div_in_place)))
    names = ["neg_", "negative_", "zero_", "conj_physical_"]
    rows.update(dict.fromkeys(find(names, torch, T), elementwise("linear_", "input")))
    rows[T.copy_] = NativeOp("linear_", _bind_copy, call_elementwise)
    return rows


def _call_div_in_place(func: Any, operands: tuple, statics: tuple) -> Any:
    x, other = operands
    return x.div_(other) if statics[0] is None else x.div_(other, rounding_mode=statics[0])


def _bind_copy(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, source, non_blocking = signature("input", "src", non_blocking=False)(func, args, kwargs)
    return (x, source), ((non_blocking,), {})
