"""Operations along dimensions that must be whole: softmax, cumulative sums, sorting; and what leaves for Python."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import (
    Bound,
    Table,
    UnboundCallError,
    autocast_dtype,
    binds,
    find,
    global_shape,
    one,
    rows,
    to_dims,
)
from hyper_parallel.platform.torch.private import any_autocast

__all__ = ["table"]


def table() -> Table:
    """Rows of operations along whole dimensions, and of those whose operands are gathered."""
    cumulative, order = "input dim dtype=None -> input | dim {} dtype", "input dim=-1 descending=False stable=False"
    sort: dict[str, Any] = {"dim": one, "descending": bool, "stable": bool}
    return {
        **_softmax("softmax"),
        **_softmax("log_softmax"),
        **rows("cumsum cumprod logcumsumexp", "along_dims", cumulative.format(1), _call_cumulative, dim=one),
        **rows("cummax cummin", "along_dims", cumulative.format(2), _call_cumulative, dim=one),
        **rows("sort", "along_dims", f"{order} -> input | dim 2 descending stable", _call_sort, **sort),
        **rows("argsort", "along_dims", f"{order} -> input | dim 1 descending stable", _call_argsort, **sort),
        **rows(
            "flip",
            "along_dims",
            "input *dims -> input | dims 1",
            lambda func, ops, static_args: ops[0].flip(static_args[0]),
        ),
        **rows("roll", "along_dims", _bind_roll, _call_roll),
        **rows("tril triu", "along_dims", "input diagonal=0 -> input | (-2,-1) 1 diagonal", _call_triangle),
        **rows("topk", "topk", "input k dim=-1 largest=True sorted=True -> input | k dim largest sorted"),
        # What leaves the world of tensors, or whose result has a size that depends on the data.
        **rows(
            "item tolist numpy equal allclose is_nonzero nonzero argwhere unique unique_consecutive masked_select "
            "bincount __bool__ __int__ __float__ __complex__ __index__ __array__",
            "replicate",
            lambda func, args, kwargs: (args, (tuple(kwargs.items()),)),
            lambda func, operands, static_args: func(*operands, **dict(static_args[0])),
        ),
    }


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


def _call_cumulative(func: Any, operands: tuple, static_args: tuple) -> Any:
    (dim,), _, dtype = static_args
    return func(operands[0], dim) if dtype is None else func(operands[0], dim, dtype=dtype)


def _call_sort(func: Any, operands: tuple, static_args: tuple) -> Any:
    return torch.sort(operands[0], dim=static_args[0][0], descending=static_args[2], stable=static_args[3])


def _call_argsort(func: Any, operands: tuple, static_args: tuple) -> Any:
    return _call_sort(func, operands, static_args)[1]


@binds("input shifts dims=None")
def _bind_roll(x: Any, shifts: Any, dims: Any) -> Bound:
    dims = to_dims(dims)
    if dims is None:
        return (x,), (tuple(range(len(global_shape(x)))), 1, shifts, False)
    return (x,), (dims, 1, shifts if isinstance(shifts, int) else tuple(shifts), True)


def _call_roll(func: Any, operands: tuple, static_args: tuple) -> Any:
    return (
        torch.roll(operands[0], static_args[2], static_args[0])
        if static_args[3]
        else torch.roll(operands[0], static_args[2])
    )


def _call_triangle(func: Any, operands: tuple, static_args: tuple) -> Any:
    return func(operands[0], static_args[2])
