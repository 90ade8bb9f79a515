"""Functions that count, compare or look up by index, as compositions of other functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.basics.tensor import dispatch, handles, is_dtensor
from hyper_parallel.platform.torch.handlers.composing import composed, number, replicated_like
from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.platform.torch.op_table.binding import Bound, UnboundCallError, find

__all__: list[str] = []


# ---------------------------------------------------------------------------------------------------- counts, answers


def _bind_count(func: Any, args: tuple, kwargs: dict) -> Bound:
    return args[:2], args[2:]


def _call_bincount(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, weights = operands
    if weights is not None and weights.dtype is not torch.float32:
        weights = weights.double()
    # For an empty input, torch ignores the dtype of the weights.
    return torch.bincount(x, weights, static_args[0]).to(torch.int64 if weights is None else weights.dtype)


_BINCOUNT = NativeOp("count", _bind_count, _call_bincount)
_HISTC = NativeOp("count", _bind_count, lambda func, xs, how: torch.histc(xs[0], *how))


@composed(*find("bincount"))
def bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Count how often each number occurs.

    The largest number is found first, because it determines the size of the result. Mirrors `torch.bincount`.
    """
    if input.dim() != 1 or input.dtype.is_floating_point or minlength < 0:
        raise UnboundCallError
    if not input.numel() or number(input.amin()) < 0:
        raise UnboundCallError
    return dispatch(_BINCOUNT, torch.bincount, (input, weights, max(number(input.amax()) + 1, minlength)), {})


@composed(*find("histc"))
def histc(input: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Count the elements in each of ``bins`` equal ranges. Mirrors `torch.histc`."""
    low, high = number(min), number(max)
    if not input.is_floating_point() or bins < 1 or low > high or not input.numel():
        raise UnboundCallError
    if low == high:
        low, high = number(input.amin()), number(input.amax())
        low, high = (low - 1, high + 1) if low == high else (low, high)
    if not math.isfinite(low) or not math.isfinite(high):
        raise UnboundCallError
    return dispatch(_HISTC, torch.histc, (input, None, bins, low, high), {})


@composed(*find("allclose"))
def allclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """Return whether every element is close to its counterpart. Mirrors `torch.allclose`."""
    return number((~torch.isclose(input, other, rtol, atol, equal_nan)).sum()) == 0


@composed(*find("equal"))
def equal(input: Any, other: Any) -> bool:
    """Return whether shapes and elements are equal."""
    if input.dtype != other.dtype:
        raise UnboundCallError
    return tuple(input.shape) == tuple(other.shape) and number((input != other).sum()) == 0


# ---------------------------------------------------------------------------------------------------- by index


@composed(*find("take_along_dim"))
def take_along_dim(input: Any, indices: Any, dim: Any = None) -> Any:
    """Gather along ``dim`` with broadcast dimensions. Mirrors `torch.take_along_dim`."""
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    if input.dim() != indices.dim():
        raise UnboundCallError
    dim %= max(input.dim(), 1)
    shape = torch.broadcast_shapes(*((*x.shape[:dim], 1, *x.shape[dim + 1 :]) for x in (input, indices)))
    x, index = (t.expand(*shape[:dim], t.shape[dim], *shape[dim + 1 :]) for t in (input, indices))
    return x.gather(dim, index)


@handles(*find("repeat_interleave"))
def repeat_interleave(func: Any, args: tuple, kwargs: dict) -> Any:
    """Repeat elements. Repeats in a tensor determine the size of the result, so every rank gathers them and selects by
    index."""
    x, repeats, dim = (*args, None, None)[:3]
    repeats, dim = kwargs.get("repeats", repeats), kwargs.get("dim", dim)
    if not isinstance(x, Tensor) or not isinstance(repeats, (Tensor, int)):
        raise UnboundCallError
    if isinstance(repeats, int) and dim is not None:
        return dispatch(OP_TABLE[func], func, args, kwargs)
    x, dim = (x.reshape(-1), 0) if dim is None else (x, dim)
    if isinstance(repeats, int):
        return x.repeat_interleave(repeats, 0)
    repeats = repeats.full_tensor() if is_dtensor(repeats) else repeats
    count = x.shape[dim] if x.dim() else 1
    index = torch.arange(count, device=repeats.device).repeat_interleave(repeats.reshape(-1).expand(count))
    return x.index_select(dim, replicated_like(index, x))


@handles(*find("narrow"))
def narrow(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute ``narrow`` with a tensor as ``start``. A number as ``start`` is handled by the op table."""
    start = args[2] if len(args) > 2 else kwargs.get("start")
    if isinstance(start, Tensor):
        x, dim, _, length = (*args, *(kwargs[n] for n in ("dim", "start", "length") if n in kwargs))
        return x.narrow(dim, number(start), length)
    return dispatch(OP_TABLE[func], func, args, kwargs)
