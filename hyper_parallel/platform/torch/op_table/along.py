"""Operations along dimensions that must be whole: softmax, cumulative sums, sorting; and what leaves for Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import (
    Table,
    UnboundCallError,
    autocast_dtype,
    find,
    global_shape,
    signature,
    to_dims,
    words,
)
from hyper_parallel.platform.torch.private import any_autocast

__all__ = ["table"]

T: Any = torch.Tensor


def table() -> Table:
    """Rows of operations along whole dimensions, and of those whose operands are gathered."""
    rows: Table = {}
    for name in ("softmax", "log_softmax"):
        call = _call_softmax(getattr(torch, name))
        row = NativeOp(name, _bind_softmax, call, binds_by_function=False, varies=any_autocast)
        rows.update(dict.fromkeys(find([name], torch, T, F, torch.special), row))
    for name, results in (("cumsum", 1), ("cumprod", 1), ("logcumsumexp", 1), ("cummax", 2), ("cummin", 2)):
        row = NativeOp("along_dims", _bind_cumulative(results), _call_cumulative(getattr(torch, name)))
        rows.update(dict.fromkeys(find([name], torch, T), row))
    rows.update(dict.fromkeys([torch.sort, T.sort], NativeOp("along_dims", _bind_sort(2), _call_sort)))
    rows.update(dict.fromkeys([torch.argsort, T.argsort], NativeOp("along_dims", _bind_sort(1), _call_argsort)))
    rows.update(dict.fromkeys([torch.flip, T.flip], NativeOp("along_dims", _bind_flip, _call_flip)))
    rows.update(dict.fromkeys([torch.roll, T.roll], NativeOp("along_dims", _bind_roll, _call_roll)))
    for name in ("tril", "triu"):
        row = NativeOp("along_dims", _bind_triangle, _call_triangle(getattr(torch, name)))
        rows.update(dict.fromkeys(find([name], torch, T), row))
    rows.update(dict.fromkeys([torch.topk, T.topk], NativeOp("topk", _bind_topk, _call_topk)))
    rows.update(_replicated())
    return rows


_softmax_arguments = signature("input", "dim", dtype=None)


def _bind_softmax(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if len(args) == 1 and "dim" in kwargs:  # what functional.softmax and a module come with
        x, dim, dtype = args[0], kwargs["dim"], kwargs.get("dtype")
    else:
        x, dim, dtype = _softmax_arguments(func, args, {k: v for k, v in kwargs.items() if k != "_stacklevel"})
    if not isinstance(dim, int):
        raise UnboundCallError
    return (x,), (dim, _autocast_dtype(x) if dtype is None else dtype)


def _autocast_dtype(x: Any) -> Any:
    """Autocast leaves a softmax as it is on CPU and runs it in full precision elsewhere."""
    return None if x.device.type == "cpu" else autocast_dtype(x)


def _call_softmax(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda func, operands, statics: kernel(operands[0], *statics)


def _bind_cumulative(results: int) -> Callable[..., Any]:
    unpack = signature("input", "dim", dtype=None)

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
        x, dim, dtype = unpack(func, args, kwargs)
        return (x,), ((dim,), results, dtype)

    return bind


def _call_cumulative(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def call(func: Any, operands: tuple, statics: tuple) -> Any:
        dtype = {} if statics[2] is None else {"dtype": statics[2]}
        return kernel(operands[0], statics[0][0], **dtype)

    return call


def _bind_sort(results: int) -> Callable[..., Any]:
    unpack = signature("input", dim=-1, descending=False, stable=False)

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
        x, dim, descending, stable = unpack(func, args, kwargs)
        return (x,), ((dim,), results, bool(descending), bool(stable))

    return bind


def _call_sort(func: Any, operands: tuple, statics: tuple) -> Any:
    return torch.sort(operands[0], dim=statics[0][0], descending=statics[2], stable=statics[3])


def _call_argsort(func: Any, operands: tuple, statics: tuple) -> Any:
    return _call_sort(func, operands, statics)[1]


def _bind_flip(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    dims = args[1:] if len(args) > 1 else (kwargs["dims"],)
    if len(dims) == 1 and not isinstance(dims[0], int):
        (dims,) = dims
    return (args[0] if args else kwargs["input"],), (tuple(dims), 1)


def _call_flip(func: Any, operands: tuple, statics: tuple) -> Any:
    return operands[0].flip(statics[0])


def _bind_roll(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, shifts, dims = signature("input", "shifts", dims=None)(func, args, kwargs)
    dims = to_dims(dims)
    if dims is None:
        return (x,), (tuple(range(len(global_shape(x)))), 1, shifts, False)
    return (x,), (dims, 1, shifts if isinstance(shifts, int) else tuple(shifts), True)


def _call_roll(func: Any, operands: tuple, statics: tuple) -> Any:
    return torch.roll(operands[0], statics[2], statics[0]) if statics[3] else torch.roll(operands[0], statics[2])


def _bind_triangle(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, diagonal = signature("input", diagonal=0)(func, args, kwargs)
    return (x,), ((-2, -1), 1, diagonal)


def _call_triangle(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return lambda func, operands, statics: kernel(operands[0], statics[2])


def _bind_topk(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, k, dim, largest, sorted_ = signature("input", "k", dim=-1, largest=True, sorted=True)(func, args, kwargs)
    return (x,), (k, dim, bool(largest), bool(sorted_))


def _call_topk(func: Any, operands: tuple, statics: tuple) -> Any:
    return torch.topk(operands[0], *statics)


def _replicated() -> Table:
    """What leaves the world of tensors, or whose result has a size that depends on the data."""
    names = words(
        """
    item tolist numpy equal allclose is_nonzero nonzero argwhere unique unique_consecutive masked_select bincount
    __bool__ __int__ __float__ __complex__ __index__ __array__
    """
    )
    row = NativeOp("replicate", lambda func, args, kwargs: (args, (tuple(kwargs.items()),)), _call_replicated)
    return dict.fromkeys(find(names, torch, T), row)


def _call_replicated(func: Any, operands: tuple, statics: tuple) -> Any:
    return func(*operands, **dict(statics[0]))
