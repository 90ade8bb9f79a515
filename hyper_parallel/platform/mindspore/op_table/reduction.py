"""Rows of the op table for reductions and for operations along a dimension (softmax, cumsum, sort, top-k)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import mint, ops

from hyper_parallel.platform.arguments import dims_of
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.basics.dtypes import as_dtype
from hyper_parallel.platform.mindspore.op_table.as_called import as_called
from hyper_parallel.platform.mindspore.op_table.binding import (
    Bound,
    Call,
    Choose,
    by_name,
    repeated,
    row,
)
from hyper_parallel.platform.mindspore.processes.launch import device_target

__all__ = ["OPS", "VARIANTS"]


# -------------------------------------------------------------------- reductions
def _total(function: Callable) -> Call:
    """Return a ``call`` that runs `mint.sum` or `mint.mean`."""
    return lambda func, xs, static_args: function(xs[0], *static_args[:2], dtype=as_dtype(static_args[2]))


def _extreme(function: Callable) -> Call:
    """Return a ``call`` that runs `ops.amax` or `ops.amin`, which do not accept None for all dims."""
    return lambda func, xs, static_args: function(
        xs[0], () if static_args[0] is None else static_args[0], static_args[1]
    )


def _vector_norm(func: Any, xs: tuple, static_args: tuple) -> Any:
    """Compute the norm from other operations: ``LinalgVectorNorm`` has no kernel on CPU."""
    p, dims, keepdim, dtype = static_args
    x = xs[0] if dtype is None else xs[0].astype(as_dtype(dtype))
    if p == 2.0:
        return mint.sqrt(mint.sum(mint.square(x), dims, keepdim))
    x = mint.abs(x)
    if abs(p) == float("inf"):
        return _extreme(ops.amax if p > 0 else ops.amin)(func, (x,), (dims, keepdim))
    if p == 1.0:
        return mint.sum(x, dims, keepdim)
    return mint.pow(mint.sum(mint.pow(x, p), dims, keepdim), 1 / p)


def _of_lp_norm(func: Any, xs: tuple, static_args: tuple) -> Bound:
    """Read the arguments of ``LpNorm`` from the primitive."""
    prim = func.prim
    return xs, (float(prim.p), dims_of(prim.axis), bool(prim.keep_dims), None)


def _of_median(func: Any, xs: tuple, static_args: tuple) -> Bound:
    """Read the arguments of ``Median`` from the primitive. The index of a median of all elements has no meaning."""
    prim = func.prim
    dims = None if prim.global_median else dims_of(prim.axis)
    return xs, (dims, bool(prim.keep_dims), *static_args[2:])


#: texts that several rows share
_REDUCED = "x dims=None keepdim=False"
_KEEPDIM_LATER = "x dims=None other=None keepdim=False"

#: Row of the median on CPU: along the last dimension by default.
_MEDIAN = repeated("reduce_pair", "x dims=-1 keepdim=False")


def _choose_median(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for a median; on Ascend the primitive takes the median of all elements."""
    return _MEDIAN if device_target() == "CPU" else None


_REDUCTIONS: dict[str, NativeOp] = {
    "SumExt": row("sum", "", _total(mint.sum)),
    # ``x.sum(axis, dtype, keepdims)``, the signature of NumPy
    "DeprecatedSum": row("sum", "x dims=None dtype=None keepdim=False", _total(mint.sum)),
    "ReduceSum": row("sum", _REDUCED, _total(mint.sum)),
    "MeanExt": row("mean", "", _total(mint.mean)),
    "ReduceMean DeprecatedMean": row("mean", _REDUCED, _total(mint.mean)),
    "ReduceMax": row("amax", _REDUCED, _extreme(ops.amax)),
    "ReduceMin": row("amin", _REDUCED, _extreme(ops.amin)),
    "LinalgVectorNorm": row("vector_norm", "", _vector_norm),
    "LpNormV2": row("vector_norm", "x p=2.0 dims=None keepdim=False", _vector_norm),
    "LpNorm": row("vector_norm", "x", _vector_norm, by_function=True, adjust=_of_lp_norm),
    "LogSumExp": repeated("logsumexp", _REDUCED),
    "Nansum CountNonZero ProdExt ArgMaxExt ArgMinExt ReduceAll ReduceAny Any AnyExt DeprecatedArgmax"
    " DeprecatedArgmin": repeated("reduce_whole", _REDUCED),
    "Argmax Argmin Var Std DeprecatedVar DeprecatedStd": repeated("reduce_whole", _KEEPDIM_LATER),
    "MaxDim MinDim MedianDim ArgMaxWithValue ArgMinWithValue": repeated("reduce_pair", _REDUCED),
    "ReduceStd StdMean VarMean": repeated("reduce_pair", _KEEPDIM_LATER),
    "DeprecatedMedian": _MEDIAN,
    "Median": repeated("reduce_pair", "x", by_function=True, adjust=_of_median),
}


def _choose_extreme(of_all: str) -> Choose:
    """Return a function that chooses one of two rows: for a reduction over all elements, or along a dim. Over all
    elements, a rule combines the results of the ranks. Along a dim, the native call returns indices too."""
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
def _of_last(func: Any, xs: tuple, static_args: tuple) -> Bound:
    """Read the dim of a reduction; the default is the last dim."""
    dim, *others = static_args
    return xs, (-1 if dim is None else dim, *others)


def _of_sort(func: Any, xs: tuple, static_args: tuple) -> Bound:
    """Read the dim of ``Sort`` from the primitive."""
    return xs, ((func.prim.axis,), *static_args[1:])


_ALONG_A_DIM: dict[str, NativeOp] = {
    "Softmax": repeated("softmax", "x dim=-1 dtype=None", adjust=_of_last),
    "LogSoftmax LogSoftmaxExt": repeated("log_softmax", "x dim=-1 dtype=None", adjust=_of_last),
    "CumProd LogCumsumExp ArgSort": repeated("along_dims", "x dims=-1"),
    "CumulativeLogsumexp": as_called("along_dims", "x dim", lambda given: ((given.values["dim"],), 1)),
    "CumSum CumsumExt": repeated("along_linear", "x dims=-1"),
    "ReverseV2 Flip": repeated("along_linear", "x dims=None"),
    "Roll": repeated("along_linear", "x shifts dims=None"),
    "SortExt Cummax Cummin CumminExt": repeated("along_dims", "x dims=-1 results:=2"),
    "Sort": repeated("along_dims", "x dims:=-1 results:=2", by_function=True, adjust=_of_sort),
    "Tril TrilExt Triu": repeated("along_linear", "x dims:=(-2,-1)"),
    "GLU": row("glu"),
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
