"""Operations on a `Placed` in compiled code: views, casts, losses, and the operations of `positions`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.compiled.losses import loss_of_placed
from hyper_parallel.platform.torch.compiled.placed import plain
from hyper_parallel.platform.torch.compiled.positions import class_of, is_placed, trace_positions

__all__ = ["trace"]


def trace(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of an operation on a `Placed` in compiled code, or None to leave it to eager mode."""
    original = getattr(func, "__wrapped__", func)
    if original in _LOSSES:
        return loss_of_placed(_LOSSES[original], args, kwargs)
    if func not in _VIEWS:
        return trace_positions(func, args, kwargs)
    x = args[0]
    if not is_placed(x):
        return None
    local, cut = plain(x), x.placed_cut
    found = _VIEWS[func](local, None if cut is None else cut % local.ndim, x.shape, *args[1:], **kwargs)
    if found is None:
        return None
    y, cut = found
    own = class_of(id(x.placed_on), x.placed_on.shape[0], cut)
    return None if own is None else y.as_subclass(own)


def _float(x: Tensor, cut: int | None, shape: Any) -> Any:
    return x.float(), cut


def _to(x: Tensor, cut: int | None, shape: Any, dtype: Any) -> Any:
    return (x.to(dtype), cut) if isinstance(dtype, torch.dtype) else None


def _type_as(x: Tensor, cut: int | None, shape: Any, other: Tensor) -> Any:
    return x.to(other.dtype), cut


def _flatten(x: Tensor, cut: int | None, shape: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    first, last = start_dim % x.ndim, end_dim % x.ndim
    if cut is None or cut < first:
        return x.flatten(first, last), cut
    return (x.flatten(first, last), cut - (last - first)) if cut > last else None


def _view(x: Tensor, cut: int | None, shape: Any, *new: Any) -> Any:
    if len(new) == 1 and isinstance(new[0], (tuple, list, torch.Size)):
        new = tuple(new[0])
    if cut is None:
        return x.reshape(new), cut
    # If the last dimension is sharded, only views that keep it; no views for other cuts.
    if cut != x.ndim - 1 or not new or new[-1] != shape[cut]:
        return None
    return x.reshape((*new[:-1], x.shape[cut])), len(new) - 1


def _transpose(x: Tensor, cut: int | None, shape: Any, dim0: int, dim1: int) -> Any:
    a, b = dim0 % x.ndim, dim1 % x.ndim
    return x.transpose(a, b), b if cut == a else a if cut == b else cut


_VIEWS: dict[Any, Callable[..., Any]] = {
    Tensor.float: _float,
    Tensor.to: _to,
    Tensor.type_as: _type_as,
    **dict.fromkeys((torch.flatten, Tensor.flatten), _flatten),
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view), _view),
    **dict.fromkeys((torch.transpose, Tensor.transpose), _transpose),
}
#: Loss functions, unwrapped, as they were before the library replaced them -> whether it takes log-probabilities.
_LOSSES = {inspect.unwrap(F.cross_entropy): False, inspect.unwrap(F.nll_loss): True}
