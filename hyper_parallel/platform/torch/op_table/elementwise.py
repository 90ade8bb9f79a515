"""Element-wise operations: functions, methods, operators, their in-place forms, conversions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import (
    WORDS,
    Bound,
    Table,
    UnboundCallError,
    call_elementwise,
    elementwise,
    rows,
)

__all__ = ["CONVERSIONS", "table"]


#: Canonical operation -> row of ``to``.
CONVERSIONS: dict[str, NativeOp] = {}

_UNARY = """
__abs__ __invert__ abs absolute acos acosh airy_ai angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan
atanh bessel_j0 bessel_j1 bessel_y0 bessel_y1 bitwise_not bool byte ceil celu char cos cosh digamma elu entr erf erfc
erfcx erfinv exp exp2 expit expm1 fix floor frac gammaln gelu hardshrink hardsigmoid hardswish hardtanh i0 i0e i1 i1e
int isfinite isinf isnan isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2 log_ndtr log_sigmoid
logical_not logit logsigmoid long mish modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
multigammaln mvlgamma nan_to_num ndtr ndtri psi reciprocal relu relu6 round rsqrt scaled_modified_bessel_k0
scaled_modified_bessel_k1 selu sgn short sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign
spherical_bessel_j0 sqrt square tan tanh tanhshrink threshold trunc
"""

_BINARY = """
__and__ __eq__ __floordiv__ __ge__ __gt__ __le__ __lshift__ __lt__ __mod__ __ne__ __or__ __pow__ __rand__ __rfloordiv__
__rlshift__ __rmod__ __ror__ __rpow__ __rrshift__ __rshift__ __rxor__ __xor__ arctan2 atan2 bitwise_and
bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor chebyshev_polynomial_t chebyshev_polynomial_u
chebyshev_polynomial_v chebyshev_polynomial_w complex copysign eq fill float_power floor_divide fmax fmin fmod gammainc
gammaincc gcd ge greater greater_equal gt heaviside hermite_polynomial_h hermite_polynomial_he hypot igamma igammac
isclose laguerre_polynomial_l lcm ldexp le legendre_polynomial_p less less_equal logaddexp logaddexp2 logical_and
logical_or logical_xor lt maximum minimum ne nextafter not_equal polar pow remainder
shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
shifted_chebyshev_polynomial_w xlog1py xlogy zeta
"""

#: Functions that are linear in their only operand, whatever their other arguments.
_LINEAR = """
clone conj_physical deg2rad detach_copy neg negative positive rad2deg resolve_conj resolve_neg
pin_memory cpu cuda npu __neg__ __pos__
"""

_IN_PLACE_BINARY = "__iand__ __ifloordiv__ __ilshift__ __imod__ __ior__ __ipow__ __irshift__ __ixor__"

#: Names of the second operand where it is not ``other``.
_SECOND = {
    **dict.fromkeys(("pow", "float_power"), "exponent"),
    "heaviside": "values",
    "fill": "value",
    "complex": "imag",
    **dict.fromkeys((name for name in _BINARY.split() if "_polynomial_" in name), "n"),
}

_SEVERAL_OPERANDS = {
    "clamp clip": "x min max",
    "clamp_min": "x min",
    "clamp_max": "x max",
    "lerp": "x end weight",
    "addcmul addcdiv": "x tensor1 tensor2",
    "masked_fill": "x mask value",
}


def _in_place(names: str) -> str:
    return " ".join(f"{name}_" for name in names.split() if not name.startswith("__"))


def table() -> Table:
    """Return the op-table rows for all element-wise operations."""
    table: Table = {}
    for name in _BINARY.split():
        table |= elementwise(name, "pointwise", f"x {_SECOND.get(name, 'other')}")
    for names, operands in _SEVERAL_OPERANDS.items():
        table |= elementwise(names, "pointwise", operands, torch, Tensor)
        table |= elementwise(_in_place(names), "pointwise_", operands, torch, Tensor)
    return {
        **table,
        **elementwise(f"{_UNARY} polygamma", "pointwise", "x", Tensor),
        **elementwise(_UNARY, "pointwise", "x"),
        **elementwise("polygamma", "pointwise", "n x", torch, torch.special),
        # With one argument, it returns indices, whose number depends on the data.
        **rows("where", "pointwise", "condition x other", call_elementwise, torch, adjust=_of_three),
        **elementwise("where", "pointwise", "x condition other", Tensor),
        **elementwise(_LINEAR, "linear_unary", "x", torch, Tensor),
        **elementwise("conj detach", "alias", "x", torch, Tensor),
        **elementwise("__get__", "alias", "x", Tensor.data, Tensor.real, Tensor.imag),
        **elementwise("real imag", "alias", "x", torch),
        **elementwise("contiguous", "contiguous", "x", Tensor),
        **elementwise("add sub subtract rsub __add__ __radd__ __sub__ __rsub__", "add", "x other"),
        **elementwise("mul multiply __mul__ __rmul__", "mul", "x other"),
        **rows("div divide true_divide __truediv__ __div__", "div", "", _call_div),
        **rows("__rdiv__ __rtruediv__", "div", "other x rounding_mode:=None", _call_div, Tensor),
        # New tensors of the shape of a DTensor. ``new_*`` of another shape runs as an unknown function.
        **elementwise("zeros_like ones_like empty_like full_like", "like", "x", torch),
        **elementwise("float double half bfloat16 cfloat cdouble chalf", "linear_unary", "x", Tensor),
        **_conversions(),
        **_written(),
    }


def _of_three(func: Any, operands: tuple, static_args: Any) -> Bound:
    if len(operands) != 3 or static_args is not None:
        raise UnboundCallError
    return operands, static_args


def _call_div(func: Any, operands: tuple, static_args: tuple) -> Any:
    a, b = operands
    if not isinstance(a, Tensor):
        # A Python number divided by a tensor, as in Tensor.__rtruediv__.
        return b.reciprocal() * a
    return a.div(b) if static_args[0] is None else a.div(b, rounding_mode=static_args[0])


def _call_div_in_place(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, other = operands
    return x.div_(other) if static_args[0] is None else x.div_(other, rounding_mode=static_args[0])


def _conversions() -> Table:
    """Return the op-table rows for ``to`` and similar methods. A handler chooses one of these rows for each call. A
    conversion to integers is not linear, so partial sums must be reduced before such a conversion."""
    for name in ("linear_unary", "pointwise"):
        CONVERSIONS[name] = NativeOp(name, "x", _call_to, words=WORDS)
    return dict.fromkeys([Tensor.to, Tensor.type_as], CONVERSIONS["linear_unary"])


def _call_to(func: Any, operands: tuple, static_args: Any) -> Any:
    args, kwargs = static_args or ((), ())
    return operands[0].to(*args, **dict(kwargs))


def _written() -> Table:
    return {
        **elementwise(_in_place(f"{_UNARY} polygamma"), "pointwise_", "x", torch, Tensor, F),
        **elementwise(f"{_in_place(_BINARY)} {_IN_PLACE_BINARY}", "pointwise_", "x other", torch, Tensor, F),
        **elementwise("pow_", "pointwise_", "x exponent", Tensor),
        **elementwise("fill_", "pointwise_", "x value", Tensor),
        **elementwise("add_ sub_ subtract_ __iadd__ __isub__", "add_", "x other", Tensor),
        **elementwise("mul_ multiply_ __imul__", "mul_", "x other", Tensor),
        **rows("div_ divide_ true_divide_ __idiv__ __itruediv__", "div_", "", _call_div_in_place, Tensor),
        **elementwise("neg_ negative_ zero_ conj_physical_", "linear_", "x", torch, Tensor),
        **elementwise("copy_", "linear_", "x src", Tensor),
    }
