"""Reductions: sums, extrema, norms, and those that do not combine from parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import (
    Table,
    UnboundCallError,
    find,
    signature,
    to_dims,
    words,
)

__all__ = ["WHOLE_EXTREMUM", "table"]

T: Any = torch.Tensor

#: Rows of ``max(x)`` and ``min(x)``; the same functions with a dimension have two results and another row.
WHOLE_EXTREMUM: Table = {}


def table() -> Table:
    """Rows of reductions."""
    return {**_reductions(), **_norms()}


# ---------------------------------------------------------------------------------------------------- reductions


def _reductions() -> Table:
    rows: Table = {}
    for name in ("sum", "mean"):
        row = NativeOp(name, _bind_sum, _call_with_dtype(getattr(torch, name)))
        rows.update(dict.fromkeys(find([name], torch, T), row))
    for name in ("amax", "amin"):
        call = _call_extremum(getattr(torch, name))
        rows.update(dict.fromkeys(find([name], torch, T), NativeOp(name, _bind_extremum, call)))
        row = NativeOp(name, _bind_whole_extremum, _call_whole_extremum(getattr(torch, name[1:])))
        WHOLE_EXTREMUM.update(dict.fromkeys(find([name[1:]], torch, T), row))
    names = words("argmax argmin prod all any std var count_nonzero nansum nanmean")
    row = NativeOp("reduce_whole", _bind_reduce_whole, _call_reduce_whole)
    rows.update(dict.fromkeys(find(names, torch, T), row))
    row = NativeOp("logsumexp", _bind_reduce_whole, _call_reduce_whole)
    rows.update(dict.fromkeys(find(["logsumexp"]), row))
    row = NativeOp("reduce_pair", _bind_extremum_pair, _call_pair)
    for name in ("max", "min"):
        rows.update(dict.fromkeys(find([name], torch, T), row))
    for name in ("median", "nanmedian", "mode"):
        rows.update(dict.fromkeys(find([name], torch, T), row))
    row = NativeOp("reduce_pair", _bind_reduce_whole, _call_reduce_whole)
    rows.update(dict.fromkeys([torch.var_mean, torch.std_mean], row))
    return rows


_sum_arguments = signature("input", dim=None, keepdim=False, dtype=None)


def _bind_sum(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim, keepdim, dtype = _sum_arguments(func, args, kwargs)
    return (x,), (to_dims(dim), bool(keepdim), dtype)


def _call_with_dtype(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(func: Any, operands: tuple, statics: tuple) -> Any:
        dims, keepdim, dtype = statics
        return kernel(operands[0], dims, keepdim, dtype=dtype)

    return call


_extremum_arguments = signature("input", dim=None, keepdim=False)


def _bind_extremum(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim, keepdim = _extremum_arguments(func, args, kwargs)
    return (x,), (to_dims(dim), bool(keepdim))


def _bind_whole_extremum(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    return (args[0] if args else kwargs["input"],), (None, False, "whole")


def _call_whole_extremum(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Not ``amax``, whose gradient is NaN everywhere where there is a NaN; here NaNs share it."""
    return lambda func, operands, statics: kernel(operands[0])


_pair_arguments = signature("input", "dim", keepdim=False)


def _bind_extremum_pair(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    """``max(x, dim)``; without a dimension ``median(x)`` has one result and runs on gathered operands."""
    x, dim, keepdim = _pair_arguments(func, args, kwargs)
    return (x,), ((dim,), bool(keepdim))


def _call_pair(func: Any, operands: tuple, statics: tuple) -> Any:
    (dim,), keepdim = statics
    return func(operands[0], dim, keepdim)


def _call_extremum(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(func: Any, operands: tuple, statics: tuple) -> Any:
        dims, keepdim = statics
        return kernel(operands[0], () if dims is None else dims, keepdim)

    return call


def _bind_reduce_whole(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    """Also for std and var, whose ``correction`` (or ``unbiased``) and for prod, whose ``dtype`` come last."""
    kwargs = dict(kwargs)
    extra = tuple(sorted((k, kwargs.pop(k)) for k in ("dtype", "correction", "unbiased") if k in kwargs))
    name = func.__name__
    if name in ("std", "var", "std_mean", "var_mean") and (len(args) > 2 or isinstance(args[-1], bool)):
        raise UnboundCallError  # the older overloads with a positional ``unbiased``
    x, dim, keepdim = _extremum_arguments(func, args, kwargs)
    return (x,), (to_dims(dim), bool(keepdim), extra)


def _call_reduce_whole(func: Any, operands: tuple, statics: tuple) -> Any:
    dims, keepdim, extra = statics
    x, kernel = operands[0], getattr(torch, func.__name__)
    if func.__name__ == "count_nonzero":
        return kernel(x, dims)
    if dims is None:
        if func.__name__ == "logsumexp":
            dims = tuple(range(x.dim()))
        elif keepdim:
            return kernel(x, **dict(extra)).reshape((1,) * x.dim())
        else:
            return kernel(x, **dict(extra))
    if func.__name__ in ("argmax", "argmin", "prod"):
        (dims,) = dims
    return kernel(x, dims, keepdim=keepdim, **dict(extra))


# ---------------------------------------------------------------------------------------------------- norms


def _norms() -> Table:
    row = NativeOp("vector_norm", _bind_vector_norm, _call_vector_norm)
    rows: Table = {torch.linalg.vector_norm: row}
    norm = NativeOp("vector_norm", _bind_norm, _call_vector_norm)
    rows.update(dict.fromkeys([torch.norm, T.norm], norm))
    return rows


_vector_norm_arguments = signature("input", ord=2, dim=None, keepdim=False, dtype=None)
_norm_arguments = signature("input", p="fro", dim=None, keepdim=False, dtype=None)


def _bind_vector_norm(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, p, dim, keepdim, dtype = _vector_norm_arguments(func, args, kwargs)
    return (x,), (float(p), to_dims(dim), bool(keepdim), dtype)


def _bind_norm(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, p, dim, keepdim, dtype = _norm_arguments(func, args, kwargs)
    if p in ("fro", None):
        p = 2.0
    if not isinstance(p, (int, float)):
        raise UnboundCallError
    return (x,), (float(p), to_dims(dim), bool(keepdim), dtype)


def _call_vector_norm(func: Any, operands: tuple, statics: tuple) -> Any:
    p, dims, keepdim, dtype = statics
    return torch.linalg.vector_norm(operands[0], p, dims, keepdim, dtype=dtype)
