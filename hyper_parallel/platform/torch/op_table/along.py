"""Operations along dimensions that must be whole: softmax, cumulative sums, sorting; and conversions to Python."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.basics.private import any_autocast
from hyper_parallel.platform.torch.op_table.as_called import Given, as_called
from hyper_parallel.platform.torch.op_table.binding import (
    Bound,
    Table,
    UnboundCallError,
    autocast_dtype,
    binds,
    find,
    global_shape,
    repeated,
    rows,
)

__all__ = ["table"]


def table() -> Table:
    """Rows of operations along whole dimensions, and of those whose operands are gathered."""
    whole = "input {} -> input | dims {}"
    return {
        **_softmax("softmax"),
        **_softmax("log_softmax"),
        **repeated("cumprod logcumsumexp", "along_dims", whole.format("dims dtype=None", 1)),
        **repeated("cumsum", "along_linear", whole.format("dims dtype=None", None)),
        **repeated("cummax cummin", "along_dims", whole.format("dims", 2)),
        **repeated("sort", "along_dims", whole.format("dims=-1 descending=False stable=False", 2)),
        **repeated("argsort", "along_dims", whole.format("dims=-1 descending=False stable=False", 1)),
        **repeated("msort", "along_dims", "input -> input | 0 1"),
        **repeated("flip", "along_linear", "input *sizes/dims -> input | sizes None"),
        **repeated("roll", "along_linear", whole.format("shifts dims=None", None)),
        **repeated("tril triu", "along_linear", "input diagonal=0 -> input | (-2,-1) None"),
        **repeated("renorm", "along_dims", _bind_renorm),
        **as_called("linspace logspace", "batched", "start end steps", _spaced, torch),
        **as_called("quantile nanquantile", "quantile", "input q dim keepdim", _quantiles),
        **rows("topk", "topk", "input k dim=-1 largest=True sorted=True"),
        # Conversions to Python values.
        **rows(
            "item tolist numpy is_nonzero __bool__ __int__ __float__ __complex__ __index__ __array__",
            "replicate",
            lambda func, args, kwargs: (args, (tuple(kwargs.items()),)),
            lambda func, operands, static_args: func(*operands, **dict(static_args[0])),
        ),
    }


@binds("input p dim maxnorm")
def _bind_renorm(x: Any, p: Any, dim: int, maxnorm: Any) -> Bound:
    ndim = len(global_shape(x))
    return (x,), (tuple(d for d in range(ndim) if d != dim % ndim), 1)


def _spaced(given: Given) -> tuple:
    return (0,) * len(given.operands), ((given.values[2],),)


def _quantiles(given: Given) -> tuple:
    return given.values.get(2), bool(given.values.get(3, False))


def _softmax(name: str) -> Table:
    kernel = getattr(torch, name)

    def call(func: Any, operands: tuple, static_args: tuple) -> Any:
        return kernel(operands[0], *static_args)

    return dict.fromkeys(find(name), NativeOp(name, _bind_softmax, call, binds_by_function=False, varies=any_autocast))


@binds("input dim dtype=None _stacklevel=None")
def _bind_softmax(x: Any, dim: Any, dtype: Any, _stacklevel: Any) -> Bound:
    if not isinstance(dim, int):
        raise UnboundCallError
    if dtype is None and x.device.type != "cpu":  # autocast leaves a softmax as it is on CPU
        dtype = autocast_dtype(x)
    return (x,), (dim, dtype)
