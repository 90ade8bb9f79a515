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
    arguments,
    binds,
    repeated,
    rows,
)

__all__ = ["OF_ALL", "table"]


#: Rows of ``max(x)`` and ``median(x)``; the same functions with a dimension have two results and another row.
OF_ALL: Table = {}


def table() -> Table:
    """Rows of reductions."""
    for median in ("median", "nanmedian"):
        OF_ALL.update(repeated(median, "reduce_whole", "input -> input | None False"))
    for extremum in ("max", "min"):
        # Not ``amax``, whose gradient is NaN everywhere where there is a NaN; here NaNs share it.
        OF_ALL.update(repeated(extremum, f"a{extremum}", "input -> input | None False 'whole'"))
    return {
        **repeated("sum", "sum", _REDUCED),
        **repeated("mean", "mean", _REDUCED),
        **repeated("amax", "amax", _REDUCED),
        **repeated("amin", "amin", _REDUCED),
        **repeated("argmax argmin prod all any count_nonzero nansum nanmean", "reduce_whole", _REDUCED),
        **repeated("std var", "reduce_whole", _bind_deviation),
        **repeated("var_mean std_mean", "reduce_pair", _bind_deviation),
        **rows("logsumexp", "logsumexp", _REDUCED, _call_log_sum_exp),
        **repeated("max min median nanmedian", "reduce_pair", "input dims keepdim=False"),
        **repeated("mode", "reduce_pair", "input dims=-1 keepdim=False"),
        **repeated("kthvalue", "reduce_pair", "input k dims=-1 keepdim=False -> input | dims keepdim"),
        **rows("vector_norm", "vector_norm", _bind_norm("ord=2"), _call_vector_norm, torch.linalg),
        **rows("norm", "vector_norm", _bind_norm("p='fro'"), _call_vector_norm, torch, Tensor),
    }


_REDUCED = "input dims=None keepdim=False dtype=None -> input | dims keepdim"
_bind_any_deviation = arguments("input dims=None unbiased=True keepdim=False correction=1 -> input | dims keepdim")


def _bind_deviation(func: Any, args: tuple, kwargs: dict) -> Bound:
    if len(args) > 1 and isinstance(args[1], bool):
        args = (args[0], None, *args[1:])  # the older overload with ``unbiased`` in the place of dimensions
    return _bind_any_deviation(func, args, kwargs)


def _call_log_sum_exp(func: Any, operands: tuple, static_args: tuple) -> Any:
    (x,), (dims, keepdim) = operands, static_args
    return func(x, dims or tuple(range(x.dim())), keepdim)  # torch has no word for all of them


def _bind_norm(order: str) -> Callable[..., Bound]:
    @binds(f"input {order} dims=None keepdim=False dtype=None")
    def bind(x: Any, p: Any, dims: Any, keepdim: bool, dtype: Any) -> Bound:
        p = 2.0 if p in ("fro", None) else p
        if not isinstance(p, (int, float)):
            raise UnboundCallError
        return (x,), (float(p), dims, keepdim, dtype)

    return bind


def _call_vector_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    p, dims, keepdim, dtype = static_args
    return torch.linalg.vector_norm(operands[0], p, dims, keepdim, dtype=dtype)
