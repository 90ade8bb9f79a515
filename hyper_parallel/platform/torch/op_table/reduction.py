"""Reductions: sums, extrema, norms, and reductions that cannot be combined from shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.op_table.binding import Bound, Table, UnboundCallError, repeated, rows

__all__ = ["OF_ALL", "table"]


#: Rows of ``max(x)`` and ``median(x)``. The same functions with a dimension have two results and another row.
OF_ALL: Table = {}


def table() -> Table:
    """Return the op-table rows for reductions."""
    for median in ("median", "nanmedian"):
        OF_ALL.update(repeated(median, "reduce_whole", "x"))
    for extremum in ("max", "min"):
        # Not ``amax``: with a NaN its gradient is NaN everywhere; here NaNs share the gradient.
        OF_ALL.update(repeated(extremum, f"a{extremum}", "x nans:='whole'"))
    return {
        **repeated("sum", "sum", _REDUCED),
        **repeated("mean", "mean", _REDUCED),
        **repeated("amax", "amax", _REDUCED),
        **repeated("amin", "amin", _REDUCED),
        **repeated("argmax argmin prod all any count_nonzero nansum nanmean", "reduce_whole", _REDUCED),
        **repeated("std var", "reduce_whole", _DEVIATION),
        **repeated("var_mean std_mean", "reduce_pair", _DEVIATION),
        **rows("logsumexp", "logsumexp", _REDUCED, _call_log_sum_exp),
        **repeated("max min median nanmedian", "reduce_pair", "x dims keepdim=False"),
        **repeated("mode", "reduce_pair", "x dims=-1 keepdim=False"),
        **repeated("kthvalue", "reduce_pair", "x k dims=-1 keepdim=False"),
        **rows("vector_norm", "vector_norm", f"x p/ord=2 {_OF_NORM}", _call_norm, torch.linalg, adjust=_by_number),
        **rows("norm", "vector_norm", f"x p='fro' {_OF_NORM}", _call_norm, torch, Tensor, adjust=_by_number),
    }


_OF_NORM = "dims=None keepdim=False dtype=None"
_REDUCED = f"x {_OF_NORM}"
_DEVIATION = "x dims=None unbiased=True keepdim=False correction=1"


def _call_log_sum_exp(func: Any, operands: tuple, static_args: tuple) -> Any:
    (x,), (dims, keepdim) = operands, static_args
    return func(x, dims or tuple(range(x.dim())), keepdim)  # torch has no name for all dimensions


def _by_number(func: Any, operands: tuple, static_args: tuple) -> Bound:
    p, *others = static_args
    p = 2.0 if p in ("fro", None) else p
    if not isinstance(p, (int, float)):
        raise UnboundCallError
    return operands, (float(p), *others)


def _call_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    p, dims, keepdim, dtype = static_args
    return torch.linalg.vector_norm(operands[0], p, dims, keepdim, dtype=dtype)
