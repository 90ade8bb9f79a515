"""Rows of the op table for reductions and for operations along a dimension (softmax, cumsum, sort, top-k)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import mint, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.op_table.as_called import as_called
from hyper_parallel.platform.mindspore.op_table.binding import (
    Bound,
    Call,
    Choose,
    binds,
    by_name,
    repeated,
    row,
)
from hyper_parallel.platform.mindspore.processes.launch import device_target
from hyper_parallel.platform.row_text import dims_of

__all__ = ["OPS", "VARIANTS"]


# -------------------------------------------------------------------- reductions
def _total(function: Callable) -> Call:
    """A ``call`` that runs `mint.sum` or `mint.mean`."""
    return lambda func, xs, static_args: function(xs[0], *static_args[:2], dtype=static_args[2])


def _extreme(function: Callable) -> Call:
    """A ``call`` that runs `ops.amax` or `ops.amin`, which take no None for all dims."""
    return lambda func, xs, static_args: function(
        xs[0], () if static_args[0] is None else static_args[0], static_args[1]
    )


def _vector_norm(func: Any, xs: tuple, static_args: tuple) -> Any:
    """By hand: ``LinalgVectorNorm`` has no kernel on CPU."""
    p, dims, keepdim, dtype = static_args
    x = xs[0] if dtype is None else xs[0].astype(dtype)
    if p == 2.0:
        return mint.sqrt(mint.sum(mint.square(x), dims, keepdim))
    x = mint.abs(x)
    if abs(p) == float("inf"):
        return _extreme(ops.amax if p > 0 else ops.amin)(func, (x,), (dims, keepdim))
    if p == 1.0:
        return mint.sum(x, dims, keepdim)
    return mint.pow(mint.sum(mint.pow(x, p), dims, keepdim), 1 / p)


def _bind_lp_norm(func: Any, args: tuple, kwargs: dict) -> Bound:
    """``LpNorm`` keeps everything in the primitive."""
    prim = func.prim
    return args[:1], (float(prim.p), dims_of(prim.axis), bool(prim.keep_dims), None)


def _bind_median(func: Any, args: tuple, kwargs: dict) -> Bound:
    """``Median`` keeps everything in the primitive. Of all elements it gives no place that counts."""
    prim = func.prim
    return args[:1], (None if prim.global_median else dims_of(prim.axis), bool(prim.keep_dims))


#: the declarations that several rows share
_REDUCED = "x dims=None keepdim=False"
_WITH_DTYPE = "x dims=None keepdim=False dtype=None"
_KEEPDIM_LATER = "x dims=None other=None keepdim=False -> x | dims keepdim"
_ALONG, _SORTED = "x dims=-1 -> x | dims 1", "x dims=-1 -> x | dims 2"
_LINEAR_ALONG = "x dims=-1 -> x | dims None"

#: As CPU has it: along the last dimension, where none is given.
_MEDIAN = repeated("reduce_pair", "x dims=-1 keepdim=False")


def _choose_median(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the row of a median; on Ascend the primitive takes the median of all elements."""
    return _MEDIAN if device_target() == "CPU" else None


_REDUCTIONS: dict[str, NativeOp] = {
    "SumExt": row("sum", _WITH_DTYPE, _total(mint.sum)),
    # ``x.sum(axis, dtype, keepdims)``, the signature of NumPy
    "DeprecatedSum": row("sum", "x dims=None dtype=None keepdim=False -> x | dims keepdim dtype", _total(mint.sum)),
    "ReduceSum": row("sum", _REDUCED, lambda func, xs, static_args: mint.sum(xs[0], *static_args)),
    "MeanExt": row("mean", _WITH_DTYPE, _total(mint.mean)),
    "ReduceMean DeprecatedMean": row("mean", _REDUCED, lambda func, xs, static_args: mint.mean(xs[0], *static_args)),
    "ReduceMax": row("amax", _REDUCED, _extreme(ops.amax)),
    "ReduceMin": row("amin", _REDUCED, _extreme(ops.amin)),
    "LinalgVectorNorm": row("vector_norm", "x p=2.0 dims=None keepdim=False dtype=None", _vector_norm),
    "LpNormV2": row("vector_norm", "x p=2.0 dims=None keepdim=False -> x | p dims keepdim None", _vector_norm),
    "LpNorm": row("vector_norm", _bind_lp_norm, _vector_norm, by_function=True),
    "LogSumExp": repeated("logsumexp", _REDUCED),
    "Nansum CountNonZero ProdExt ArgMaxExt ArgMinExt ReduceAll ReduceAny Any AnyExt DeprecatedArgmax"
    " DeprecatedArgmin": repeated("reduce_whole", _REDUCED),
    "Argmax Argmin Var Std DeprecatedVar DeprecatedStd": repeated("reduce_whole", _KEEPDIM_LATER),
    "MaxDim MinDim MedianDim ArgMaxWithValue ArgMinWithValue": repeated("reduce_pair", _REDUCED),
    "ReduceStd StdMean VarMean": repeated("reduce_pair", _KEEPDIM_LATER),
    "DeprecatedMedian": _MEDIAN,
    "Median": repeated("reduce_pair", _bind_median, by_function=True),
}


def _choose_extreme(of_all: str) -> Choose:
    """Choose between all elements, where a rule combines the ranks' results, and a dim, where the native call gives
    more."""
    without_dims, with_dims = _REDUCTIONS[of_all], repeated("reduce_whole", _REDUCED)
    return lambda args, kwargs: without_dims if len(args) == 1 and not kwargs else with_dims


VARIANTS: dict[str, Choose] = by_name(
    {
        "Max DeprecatedMax": _choose_extreme("ReduceMax"),
        "Min DeprecatedMin": _choose_extreme("ReduceMin"),
        "MedianExt": _choose_median,
    }
)


# -------------------------------------------------------------------- along a dimension
@binds("x dims=-1 dtype=None")
def _bind_softmax(x: Any, dims: tuple[int, ...] | None, dtype: Any) -> Bound:
    """MindSpore also gives the dim in a tuple."""
    return (x,), ((dims or (-1,))[0], dtype)


def _bind_sort(func: Any, args: tuple, kwargs: dict) -> Bound:
    """``Sort`` keeps its dim in the primitive."""
    return args[:1], ((func.prim.axis,), 2)


_ALONG_A_DIM: dict[str, NativeOp] = {
    "Softmax": repeated("softmax", _bind_softmax),
    "LogSoftmax LogSoftmaxExt": repeated("log_softmax", _bind_softmax),
    "CumProd LogCumsumExp": repeated("along_dims", _ALONG),
    "CumulativeLogsumexp": as_called("along_dims", "x dim -> x", lambda given: ((given.values["dim"],), 1)),
    "CumSum CumsumExt": repeated("along_linear", _LINEAR_ALONG),
    "ReverseV2 Flip": repeated("along_linear", "x dims=None -> x | dims None"),
    "Roll": repeated("along_linear", "x shifts dims=None -> x | dims None"),
    "SortExt Cummax Cummin CumminExt": repeated("along_dims", _SORTED),
    "ArgSort": repeated("along_dims", _ALONG),
    "Sort": repeated("along_dims", _bind_sort, by_function=True),
    "Tril TrilExt Triu": repeated("along_linear", "x -> x | (-2,-1) None"),
    "GLU": row("glu", "x dim=-1"),
    "TopK TopkExt": repeated("topk", "x k dim=-1"),
}

OPS: dict[str, NativeOp] = by_name(
    {
        **_REDUCTIONS,
        **_ALONG_A_DIM,
        # results that depend on all values
        "EqualExt UniqueDim Unique2": row("replicate", lambda func, args, kwargs: (args, ())),
    }
)
