"""Rows of the op table for element-wise primitives."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.basics.dtypes import DIFFERENTIABLE, as_dtype
from hyper_parallel.platform.mindspore.op_table.binding import WORDS, Call, Choose, by_name, elementwise, row
from hyper_parallel.platform.mindspore.processes.collectives import copied

__all__ = ["OPS", "VARIANTS"]

_POINTWISE = """
    ACos Angle ApproximateEqual BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1
    BesselK1e BesselY0 BesselY1 Digamma EqScalar Fmax Fmin Gcd Hypot Igamma Igammac Lcm LeftShift Lgamma Mvlgamma
    NextAfter Polygamma PopulationCount RightShift
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
    NotEqualScalar EqualScalar ReciprocalExt Lerp LerpScalar
"""

_POINTWISE_INPLACE = """
    InplaceClampScalar InplaceClampTensor InplaceElu InplaceErfinv InplaceExp InplaceFloor InplaceFloorDivide
    InplaceFloorDivides InplaceHardtanh InplaceLog InplaceMaskedFillScalar InplaceMaskedFillTensor InplaceReLU
    InplaceRemainderTensorScalar InplaceRemainderTensorTensor InplaceSigmoid InplaceSign InplaceSiLU InplaceTanh
    InplaceThreshold InplacePow InplaceSqrt InplaceFillScalar InplaceFillTensor InplaceAbs InplaceRsqrt
    InplaceReciprocal InplaceBitwiseAndTensor InplaceBitwiseOrTensor
"""

#: Primitives through which MindSpore gives no gradient. (For ``Floor`` and ``Trunc`` it gives zeros.)
_FLAT = "Ceil FloorDiv FloorDivScalar Round Sign TruncateDiv"


def _like(value: float) -> Call:
    """Return a ``call`` that fills a tensor like the operand. All other arguments of the call are static."""

    def call(func: Any, operands: tuple, static_args: Any) -> Any:
        args, named = static_args or ((), ())
        return _full(operands[0], value, *args[:1], **dict(named))

    return call


def _call_full(func: Any, operands: tuple, static_args: Any) -> Any:
    args, named = static_args
    return _full(operands[0], *args[:2], **dict(named))


def _full(x: Any, fill_value: float, dtype: Any = None, **_: Any) -> Any:
    return ms.ops.full(tuple(x.shape), fill_value, dtype=x.dtype if dtype is None else as_dtype(dtype))


_LINEAR_UNARY = elementwise("linear_unary", "x")
_POINTWISE_UNARY = elementwise("pointwise", "x")
_ADD = elementwise("add", "x other/exponent/value/mask")

OPS: dict[str, NativeOp] = by_name(
    {
        _POINTWISE: elementwise("pointwise"),
        _FLAT: elementwise("pointwise", flat=True),
        "Zeta": elementwise("pointwise", flat=(0,)),
        _POINTWISE_INPLACE: elementwise("pointwise_"),
        "Neg Identity Load Real Imag RealView ImagView Conj Positive": _LINEAR_UNARY,
        "Contiguous": elementwise("contiguous", ""),
        "Clone": row("linear_unary", "", lambda func, operands, static_args: copied(operands[0])),
        # Not checked for empty operands: the result has no gradient on any rank.
        "StopGradient": NativeOp(
            "alias", "", lambda func, operands, static_args: ms.ops.stop_gradient(operands[0]), False, words=WORDS
        ),
        "Add AddExt AddScalar Sub SubExt SubScalar AddV2": _ADD,
        "Mul Muls MulNoNan": elementwise("mul", "x other"),
        "Div Divs RealDiv DivNoNan DivMod DivMods": elementwise("div", "..."),
        "InplaceDiv InplaceDivs InplaceDivMod InplaceDivMods": elementwise("div_", "..."),
        "InplaceMul InplaceMuls": elementwise("mul_", "x other"),
        "InplaceCopy Assign": elementwise("linear_", "x other/value"),
        "InplaceZero": elementwise("linear_", "x"),
        "InplaceAddExt InplaceAddsExt InplaceSubExt InplaceSubScalar AssignAdd AssignSub": elementwise(
            "add_", "x other/value"
        ),
        "ZerosLike ZerosLikeExt EmptyLike": row("like", "", _like(0)),
        "OnesLike OnesLikeExt": row("like", "", _like(1)),
        "FullLike": row("like", "", _call_full),
    }
)


def _cast(args: tuple, kwargs: dict) -> NativeOp:
    """Choose the op-table row for a conversion, which is linear only if it does not round to integers or booleans."""
    dtype = as_dtype(kwargs.get("dtype", args[1] if len(args) > 1 else None))
    return _LINEAR_UNARY if dtype is None or dtype in DIFFERENTIABLE else _POINTWISE_UNARY


def _bias_add(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for BiasAdd.

    BiasAdd adds the bias along dim 1. For matrices, as in nn.Dense, this is an ordinary broadcast. For other tensors
    BiasAdd is composed of other operations.
    """
    return _ADD if isinstance(args[0], Tensor) and args[0].ndim == 2 else None


VARIANTS: dict[str, Choose] = by_name({"Cast ToDtype ToOther": _cast, "BiasAdd": _bias_add})
