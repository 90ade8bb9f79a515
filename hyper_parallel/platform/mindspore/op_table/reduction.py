"""Rows of the op table for reductions and for operations along a dimension (softmax, cumsum, sort, top-k)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import mint, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.empty_shards import guarded
from hyper_parallel.platform.mindspore.op_table.binding import Table, arguments, dims_of, hashable, row

__all__ = ["OPS", "VARIANTS"]

OPS = Table()
VARIANTS: dict[str, Callable[[tuple, dict], NativeOp | None]] = {}


def _bind_reduction(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, dim, keepdim, dtype = arguments(("x", "dim", "keepdim", "dtype"), (None, False, None), args, kwargs)
    return (x,), (dims_of(dim), bool(keepdim), dtype)


def _bind_sum_old(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """``x.sum(axis, dtype, keepdims)``, the signature of NumPy."""
    x, dim, dtype, keepdim = arguments(("x", "dim", "dtype", "keepdim"), (None, None, False), args, kwargs)
    return (x,), (dims_of(dim), bool(keepdim), dtype)


def _bind_primitive(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """``ReduceSum(x, axis, keep_dims, skip_mode)``; no dtype."""
    x, dim, keepdim = arguments(("x", "dim", "keepdim"), (None, False), args, kwargs)
    return (x,), (dims_of(dim), bool(keepdim), None)


def _with_dtype(function: Callable) -> Callable[[Any, tuple, tuple], Any]:
    return lambda func, xs, statics: function(xs[0], statics[0], statics[1], dtype=statics[2])


def _extremum(function: Callable) -> Callable[[Any, tuple, tuple], Any]:
    return lambda func, xs, statics: function(xs[0], statics[0] or (), statics[1])


_sum, _mean, _amax, _amin = _with_dtype(mint.sum), _with_dtype(mint.mean), _extremum(ops.amax), _extremum(ops.amin)


OPS.row("SumExt", "sum", _bind_reduction, _sum)
OPS.row("DeprecatedSum", "sum", _bind_sum_old, _sum)
OPS.row("ReduceSum", "sum", _bind_primitive, _sum)
OPS.row("MeanExt", "mean", _bind_reduction, _mean)
OPS.row("ReduceMean DeprecatedMean", "mean", _bind_primitive, _mean)
OPS.row("ReduceMax", "amax", _bind_primitive, _amax)
OPS.row("ReduceMin", "amin", _bind_primitive, _amin)
_MAX_OF_ALL = row("amax", lambda args, kwargs: (args[:1], (None, False, None)), _amax)
_MIN_OF_ALL = row("amin", lambda args, kwargs: (args[:1], (None, False, None)), _amin)


def _repeated(name: str, dim_at: int = 1, keepdim_at: int = 2) -> NativeOp:
    """A row whose native call is repeated as it came: which arguments it takes differs too much."""

    def bind(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        dim = _argument(args, kwargs, dim_at, ("dim", "axis"), None)
        keepdim = _argument(args, kwargs, keepdim_at, ("keepdim", "keepdims", "keep_dims"), False)
        return args[:1], (dims_of(dim), bool(keepdim), hashable(args[1:]), tuple(kwargs.items()))

    return row(name, bind, _repeat)


def _argument(args: tuple, kwargs: dict, place: int, names: tuple[str, ...], default: Any) -> Any:
    if 0 < place < len(args):
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), default)


def _repeat(func: Any, xs: tuple, statics: tuple) -> Any:
    return func(xs[0], *statics[2], **dict(statics[3]))


OPS.add("ProdExt ArgMaxExt ArgMinExt ReduceAll ReduceAny Any AnyExt", _repeated("reduce_whole"))
OPS["LogSumExp"] = _repeated("logsumexp")
OPS.add("Argmax Argmin DeprecatedArgmax DeprecatedArgmin", _repeated("reduce_whole", keepdim_at=0))
OPS.add("Var Std DeprecatedVar DeprecatedStd", _repeated("reduce_whole", keepdim_at=3))
OPS.add("MaxDim MinDim ArgMaxWithValue ArgMinWithValue", _repeated("reduce_pair"))
OPS["ReduceStd"] = _repeated("reduce_pair", keepdim_at=3)
_EXTREME = _repeated("reduce_whole")


def _choose_extreme(of_all: NativeOp) -> Callable[[tuple, dict], NativeOp]:
    return lambda args, kwargs: of_all if len(args) == 1 and not kwargs else _EXTREME


VARIANTS["Max"] = VARIANTS["DeprecatedMax"] = _choose_extreme(_MAX_OF_ALL)
VARIANTS["Min"] = VARIANTS["DeprecatedMin"] = _choose_extreme(_MIN_OF_ALL)


def _bind_norm(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, p, dim, keepdim, dtype = arguments(
        ("x", "ord", "dim", "keepdim", "dtype"), (2.0, None, False, None), args, kwargs
    )
    return (x,), (float(p), dims_of(dim), bool(keepdim), dtype)


def _norm(func: Any, xs: tuple, statics: tuple) -> Any:
    """By hand: ``LinalgVectorNorm`` has no kernel on CPU."""
    p, dims, keepdim, dtype = statics
    x = xs[0] if dtype is None else xs[0].astype(dtype)
    if p == 2.0:
        return mint.sqrt(mint.sum(mint.square(x), dims, keepdim))
    if p == 1.0:
        return mint.sum(mint.abs(x), dims, keepdim)
    if abs(p) == float("inf"):
        return (_amax if p > 0 else _amin)(func, (mint.abs(x),), (dims, keepdim))
    return mint.pow(mint.sum(mint.pow(mint.abs(x), p), dims, keepdim), 1 / p)


def _bind_lp_norm(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """``LpNormV2(x, p, dim, keepdim, epsilon)``."""
    return _bind_norm(args[:4], kwargs)


def _bind_lp_norm_old(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """``LpNorm`` keeps everything in the primitive."""
    prim = func.prim
    return args[:1], (float(prim.p), dims_of(prim.axis), bool(prim.keep_dims), None)


OPS.row("LinalgVectorNorm", "vector_norm", _bind_norm, _norm)
OPS.row("LpNormV2", "vector_norm", _bind_lp_norm, _norm)
OPS["LpNorm"] = guarded(NativeOp("vector_norm", _bind_lp_norm_old, _norm))


# -------------------------------------------------------------------- along a dimension
def _along(dim_at: int, results: int, default: int | None = -1) -> NativeOp:
    """``f(..., dim, ...)`` with the dim as argument ``dim_at``; the native call is repeated as it came."""

    def bind(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        dim = args[dim_at] if len(args) > dim_at else kwargs.get("dim", kwargs.get("axis", default))
        dims = dims_of(dim) or tuple(range(len(args[0].shape)))
        return args[:1], (dims, results, hashable(args[1:]), tuple(kwargs.items()))

    return row("along_dims", bind, _repeat)


def _softmax(name: str, has_dtype: bool = False) -> NativeOp:
    """``f(x, dim)`` or ``f(x, dim, dtype)``; MindSpore also gives the dim in a tuple."""

    def bind(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        dim = _argument(args, kwargs, 1, ("dim", "axis"), None)
        dims = dims_of(-1 if dim is None else dim) or (-1,)
        dtype = _argument(args, kwargs, 2, ("dtype",), None) if has_dtype else None
        return args[:1], (dims[0], dtype, hashable(args[1:]), tuple(kwargs.items()))

    return row(name, bind, _repeat)


OPS["Softmax"] = _softmax("softmax")
OPS["LogSoftmax"] = _softmax("log_softmax")
OPS["LogSoftmaxExt"] = _softmax("log_softmax", has_dtype=True)
OPS["CumSum"] = OPS["CumProd"] = OPS["CumsumExt"] = _along(1, 1)
OPS["ReverseV2"] = OPS["Flip"] = _along(1, 1, None)
OPS["Roll"] = _along(2, 1, None)
OPS["SortExt"] = _along(1, 2)


def _last_two(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    return args[:1], ((-2, -1), 1, args[1:], tuple(kwargs.items()))


_TRIANGLE = row("along_dims", _last_two, _repeat)
OPS.add("Tril TrilExt Triu", _TRIANGLE)


def _bind_sort_old(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """``Sort`` keeps its dim in the primitive."""
    return args[:1], ((func.prim.axis,), 2, (), ())


OPS["Sort"] = guarded(NativeOp("along_dims", _bind_sort_old, _repeat))


def _bind_topk(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, k, dim = arguments(("x", "k", "dim"), (-1,), args, kwargs)
    return (x,), (int(k), int(dim), args[1:], tuple(kwargs.items()))


def _bind_topk_old(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """``TopK`` works along the last dim."""
    return args[:1], (int(args[1]), -1, args[1:], tuple(kwargs.items()))


OPS.row("TopkExt", "topk", _bind_topk, _repeat)
OPS.row("TopK", "topk", _bind_topk_old, _repeat)


# -------------------------------------------------------------------- results that depend on all values
OPS.add("NonZero MaskedSelect EqualExt Unique UniqueDim Unique2 ArgWhere", row("replicate", lambda a, k: (a, ())))
