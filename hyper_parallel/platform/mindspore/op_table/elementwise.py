"""Rows of the op table for element-wise primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.collectives import copied
from hyper_parallel.platform.mindspore.empty_shards import guarded
from hyper_parallel.platform.mindspore.op_table.binding import Table, elementwise, row
from hyper_parallel.platform.mindspore.private import type_id_to_type

__all__ = ["OPS", "VARIANTS"]

_POINTWISE = """
    Abs Acos AcosExt Acosh AcoshExt Addcdiv AddcdivExt Addcmul AddcmulExt Asin AsinExt Asinh AsinhExt Atan Atan2
    Atan2Ext AtanExt Atanh BitwiseAnd BitwiseAndScalar BitwiseAndTensor BitwiseNot BitwiseOr
    BitwiseOrScalar BitwiseOrTensor BitwiseXor BitwiseXorScalar BitwiseXorTensor ClampScalar ClampTensor Cos Cosh
    CeLU DeprecatedBitwiseAnd DeprecatedBitwiseOr DeprecatedBitwiseXor Elu EluExt Equal Erf Erfc Erfinv Exp Exp2 Expm1
    FastGeLU Floor FloorMod Fmod FmodScalar FmodTensor Frac GeLU GeluExt Greater GreaterEqual
    GreaterEqualScalar GreaterScalar HShrink HSigmoid HSwish Hardtanh HardtanhExt Heaviside Inv Invert IsClose
    IsFinite IsInf IsNan IsNegInf LeakyReLU LeakyReLUExt Less LessEqual LessEqualScalar LessScalar Log Log10 Log1p
    Log2 LogAddExp LogAddExp2 LogSigmoid LogSigmoidExt LogicalAnd LogicalNot LogicalOr LogicalXor Logit
    MaskedFill MaskedFillScalar MaskedFillTensor MaskedFillScalarExt MaskedFillTensorExt Maximum Minimum Mish MishExt
    Mod NanToNum NotEqual Polar Pow PowScalarTensor PowTensorScalar  ReLU ReLU6 Reciprocal
    RemainderScalarTensor RemainderTensorScalar RemainderTensorTensor Rsqrt SeLU SeLUExt Select SelectV2 SiLU
    Sigmoid Sin Sinc Sinh SoftShrink Softplus SoftplusExt Softsign Sqrt Square SquaredDifference Tan Tanh
    Threshold Trunc TruncateMod Xdivy XLogYScalarOther XLogYScalarSelf Xlogy XlogyExt
    NotEqualScalar EqualScalar ReciprocalExt
"""

_POINTWISE_INPLACE = """
    InplaceClampScalar InplaceClampTensor InplaceElu InplaceErfinv InplaceExp InplaceFloor InplaceFloorDivide
    InplaceFloorDivides InplaceHardtanh InplaceLog InplaceMaskedFillScalar InplaceMaskedFillTensor InplaceReLU
    InplaceRemainderTensorScalar InplaceRemainderTensorTensor InplaceSigmoid InplaceSign InplaceSiLU InplaceTanh
    InplaceThreshold InplacePow InplaceSqrt InplaceFillScalar InplaceFillTensor InplaceAbs InplaceRsqrt
    InplaceReciprocal InplaceBitwiseAndTensor InplaceBitwiseOrTensor
"""

#: MindSpore leads no gradient back through these. (Through ``Floor`` and ``Trunc`` it leads zeros.)
_FLAT = "Ceil FloorDiv FloorDivScalar Round Sign TruncateDiv"

_LINEAR_UNARY = "Neg Clone Identity Load Real Conj Positive"


def _rounding(args: tuple, kwargs: dict) -> Any:
    """The rounding mode of ``DivMod(a, b, mode)``."""
    return kwargs.get("rounding_mode", args[2] if len(args) > 2 else None)


def _no_rounding(args: tuple, kwargs: dict) -> None:
    return None


def _clone(func: Any, operands: tuple, statics: Any) -> Any:
    return copied(operands[0])


def _stop_gradient(func: Any, operands: tuple, statics: Any) -> Any:
    return ms.ops.stop_gradient(operands[0])


def _like(value: float | None) -> Callable[[Any, tuple, tuple], Any]:
    def call(func: Any, operands: tuple, statics: tuple) -> Any:
        x, fill, dtype = operands[0], statics[0] if value is None else value, statics[1]
        return ms.ops.full(tuple(x.shape), fill, dtype=x.dtype if dtype is None else _dtype(dtype))

    return call


def _dtype(dtype: Any) -> Any:
    """Overloads pass a dtype, generated code its number."""
    return type_id_to_type(dtype) if isinstance(dtype, int) else dtype


def _bind_like(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
    return (args[0],), (0, dtype)


def _bind_full_like(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    fill = kwargs.get("fill_value", args[1] if len(args) > 1 else None)
    return (args[0],), (fill, kwargs.get("dtype", args[2] if len(args) > 2 else None))


OPS = Table()
OPS.add(_POINTWISE, elementwise("pointwise"))
OPS.add(_FLAT, elementwise("pointwise", flat=True))
OPS.add(_POINTWISE_INPLACE, elementwise("pointwise_"))
OPS.add(_LINEAR_UNARY, elementwise("linear_unary", 1))
OPS.add("Add AddExt AddScalar Sub SubExt SubScalar AddV2", elementwise("add", 2))
OPS.add("Mul Muls MulNoNan", elementwise("mul", 2))
OPS.add("Div Divs RealDiv DivNoNan", elementwise("div", 2, _no_rounding))
OPS.add("DivMod DivMods", elementwise("div", 2, _rounding))
OPS.add("InplaceDiv InplaceDivs", elementwise("div_", 2, _no_rounding))
OPS.add("InplaceDivMod InplaceDivMods", elementwise("div_", 2, _rounding))
OPS.add("InplaceMul InplaceMuls", elementwise("mul_", 2))
OPS.add("InplaceCopy Assign", elementwise("linear_", 2))
OPS["InplaceZero"] = elementwise("linear_", 1)
OPS.add("InplaceAddExt InplaceAddsExt InplaceSubExt InplaceSubScalar AssignAdd AssignSub", elementwise("add_", 2))
OPS["Contiguous"] = elementwise("contiguous", 1)
# Not guarded: it has no gradient, whether there are elements or not.
OPS["StopGradient"] = NativeOp("alias", OPS["Neg"].bind, _stop_gradient, False)
OPS["Clone"] = guarded(NativeOp("linear_unary", OPS["Neg"].bind, _clone, False))
OPS["Lerp"] = OPS["LerpScalar"] = elementwise("pointwise")
OPS.add("ZerosLike ZerosLikeExt EmptyLike", row("like", _bind_like, _like(0)))
OPS.add("OnesLike OnesLikeExt", row("like", _bind_like, _like(1)))
OPS["FullLike"] = row("like", _bind_full_like, _like(None))

_TO_FLOAT = elementwise("linear_unary", 1)
_TO_OTHER = elementwise("pointwise", 1)
_BIAS_ADD = elementwise("add", 2)


def _cast(args: tuple, kwargs: dict) -> NativeOp:
    """A conversion is linear only if it does not round to integers or truth values."""
    dtype = _dtype(kwargs.get("dtype", args[1] if len(args) > 1 else None))
    return _TO_FLOAT if dtype is None or dtype in _FLOATS else _TO_OTHER


def _bias_add(args: tuple, kwargs: dict) -> NativeOp | None:
    """BiasAdd adds along dim 1: an ordinary broadcast for matrices, which is how nn.Dense uses it."""
    return _BIAS_ADD if isinstance(args[0], Tensor) and args[0].ndim == 2 else None


_FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64, ms.complex64, ms.complex128)

VARIANTS: dict[str, Callable[[tuple, dict], NativeOp | None]] = {
    "Cast": _cast,
    "ToDtype": _cast,
    "ToOther": _cast,
    "BiasAdd": _bias_add,
}
