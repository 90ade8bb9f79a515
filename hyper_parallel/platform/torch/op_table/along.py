"""Operations along dimensions that must be unsharded: softmax, cumulative sums, sorting; and conversions to Python
values.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.contract.dispatch import Given
from hyper_parallel.platform.torch.basics.private import any_autocast
from hyper_parallel.platform.torch.op_table.binding import (
    WORDS,
    Bound,
    Table,
    UnboundCallError,
    as_called,
    autocast_dtype,
    find,
    repeated,
    rows,
)

__all__ = ["table"]


def table() -> Table:
    """Return the op-table rows for operations along unsharded dimensions, and for operations on gathered operands."""
    return {
        **_softmax("softmax"),
        **_softmax("log_softmax"),
        **repeated("cumprod logcumsumexp", "along_dims", "x dims dtype=None"),
        **repeated("cumsum", "along_linear", "x dims dtype=None"),
        **repeated("cummax cummin", "along_dims", "x dims results:=2"),
        **repeated("sort", "along_dims", "x dims=-1 descending=False stable=False results:=2"),
        **repeated("argsort", "along_dims", "x dims=-1 descending=False stable=False"),
        **repeated("msort", "along_dims", "x dims:=0"),
        **repeated("flip", "along_linear", "x *dims"),
        **repeated("roll", "along_linear", "x shifts dims=None"),
        **repeated("tril triu", "along_linear", "x diagonal=0 dims:=(-2,-1)"),
        **repeated("renorm", "along_dims", "all_but: x p dim maxnorm"),
        **as_called("linspace logspace", "batched", "start end -steps", _spaced, torch),
        **as_called("quantile nanquantile", "quantile", "x/input q dim keepdim", _quantiles),
        **rows("topk", "topk"),
        # Conversions to Python values.
        **rows(
            "item tolist numpy is_nonzero __bool__ __int__ __float__ __complex__ __index__ __array__",
            "replicate",
            lambda func, args, kwargs: (args, (tuple(kwargs.items()),)),
            lambda func, operands, static_args: func(*operands, **dict(static_args[0])),
        ),
    }


def _spaced(given: Given) -> tuple:
    return (0,) * len(given.operands), ((given.values["steps"],),)


def _quantiles(given: Given) -> tuple:
    return given.values.get("dim"), bool(given.values.get("keepdim", False))


def _softmax(name: str) -> Table:
    kernel = getattr(torch, name)

    def call(func: Any, operands: tuple, static_args: tuple) -> Any:
        return kernel(operands[0], *static_args)

    row = NativeOp(name, "x dim dtype=None _stacklevel=None", call, False, any_autocast, WORDS, adjust=_of_autocast)
    return dict.fromkeys(find(name), row)


def _of_autocast(func: Any, operands: tuple, static_args: tuple) -> Bound:
    dim, dtype = static_args
    if not isinstance(dim, int):
        raise UnboundCallError
    if dtype is None and operands[0].device.type != "cpu":  # autocast leaves a softmax unchanged on CPU
        dtype = autocast_dtype(operands[0])
    return operands, (dim, dtype)
