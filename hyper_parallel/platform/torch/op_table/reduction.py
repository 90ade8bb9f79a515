"""Reductions: sums, extrema, norms, and those that do not combine from parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.op_table.binding import (
    Bound,
    Table,
    UnboundCallError,
    binds,
    one,
    rows,
    signature,
    to_dims,
)

__all__ = ["WHOLE_EXTREMUM", "table"]


#: Rows of ``max(x)`` and ``min(x)``; the same functions with a dimension have two results and another row.
WHOLE_EXTREMUM: Table = {}


def table() -> Table:
    """Rows of reductions."""
    reduction = "input dim=None keepdim=False"
    dims: dict[str, Any] = {"dim": to_dims, "keepdim": bool}
    for extremum in ("max", "min"):
        # Not ``amax``, whose gradient is NaN everywhere where there is a NaN; here NaNs share it.
        whole = rows(extremum, f"a{extremum}", "input -> input | None False 'whole'", lambda func, ops, _: func(ops[0]))
        WHOLE_EXTREMUM.update(whole)
    return {
        **rows("sum", "sum", f"{reduction} dtype=None -> input | dim keepdim dtype", _call_sum, **dims),
        **rows("mean", "mean", f"{reduction} dtype=None -> input | dim keepdim dtype", _call_sum, **dims),
        **rows("amax", "amax", f"{reduction} -> input | dim keepdim", _call_extremum, **dims),
        **rows("amin", "amin", f"{reduction} -> input | dim keepdim", _call_extremum, **dims),
        **rows(
            "argmax argmin prod all any std var count_nonzero nansum nanmean",
            "reduce_whole",
            _bind_reduce_whole,
            _call_reduce_whole,
        ),
        **rows("logsumexp", "logsumexp", _bind_reduce_whole, _call_reduce_whole),
        # Without a dimension ``median(x)`` has one result and runs on gathered operands.
        **rows(
            "max min median nanmedian mode",
            "reduce_pair",
            "input dim keepdim=False -> input | dim keepdim",
            lambda func, operands, static_args: func(operands[0], static_args[0][0], static_args[1]),
            dim=one,
            keepdim=bool,
        ),
        **rows("var_mean std_mean", "reduce_pair", _bind_reduce_whole, _call_reduce_whole),
        **rows("vector_norm", "vector_norm", _bind_norm("ord=2"), _call_vector_norm, torch.linalg),
        **rows("norm", "vector_norm", _bind_norm("p='fro'"), _call_vector_norm, torch, Tensor),
    }


def _call_sum(func: Any, operands: tuple, static_args: tuple) -> Any:
    dims, keepdim, dtype = static_args
    return func(operands[0], dims, keepdim, dtype=dtype)


def _call_extremum(func: Any, operands: tuple, static_args: tuple) -> Any:
    dims, keepdim = static_args
    return func(operands[0], () if dims is None else dims, keepdim)


def _bind_reduce_whole(func: Any, args: tuple, kwargs: dict) -> Bound:
    """Also for std and var, whose ``correction`` (or ``unbiased``) and for prod, whose ``dtype`` come last."""
    kwargs = dict(kwargs)
    extra = tuple(sorted((k, kwargs.pop(k)) for k in ("dtype", "correction", "unbiased") if k in kwargs))
    name = func.__name__
    if name in ("std", "var", "std_mean", "var_mean") and (len(args) > 2 or isinstance(args[-1], bool)):
        raise UnboundCallError  # the older overloads with a positional ``unbiased``
    x, dim, keepdim = signature("input dim=None keepdim=False")(args, kwargs)
    return (x,), (to_dims(dim), bool(keepdim), extra)


def _call_reduce_whole(func: Any, operands: tuple, static_args: tuple) -> Any:
    dims, keepdim, extra = static_args
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


def _bind_norm(order: str) -> Callable[..., Bound]:
    @binds(f"input {order} dim=None keepdim=False dtype=None")
    def bind(x: Any, p: Any, dim: Any, keepdim: Any, dtype: Any) -> Bound:
        p = 2.0 if p in ("fro", None) else p
        if not isinstance(p, (int, float)):
            raise UnboundCallError
        return (x,), (float(p), to_dims(dim), bool(keepdim), dtype)

    return bind


def _call_vector_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    p, dims, keepdim, dtype = static_args
    return torch.linalg.vector_norm(operands[0], p, dims, keepdim, dtype=dtype)
