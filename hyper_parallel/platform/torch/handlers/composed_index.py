"""Functions that take, repeat or write elements by index, as compositions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.handlers.composing import composed, number, replicated_like
from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.platform.torch.op_table.binding import UnboundCallError, find
from hyper_parallel.platform.torch.op_table.scatter import INDEX_ADD
from hyper_parallel.platform.torch.tensor import dispatch, handles, is_dtensor

__all__: list[str] = []


@composed(*find("take_along_dim"))
def take_along_dim(input: Any, indices: Any, dim: Any = None) -> Any:
    """`torch.gather` with stretched dimensions."""
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    if input.dim() != indices.dim():
        raise UnboundCallError
    dim %= max(input.dim(), 1)
    shape = torch.broadcast_shapes(*((*x.shape[:dim], 1, *x.shape[dim + 1 :]) for x in (input, indices)))
    x, index = (t.expand(*shape[:dim], t.shape[dim], *shape[dim + 1 :]) for t in (input, indices))
    return x.gather(dim, index)


@handles(*find("index_put"))
def index_put(func: Any, args: tuple, kwargs: dict) -> Any:
    """Written over, or added."""
    adds = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    return dispatch(INDEX_ADD if adds else OP_TABLE[func], func, args, kwargs)


@handles(*find("repeat_interleave"))
def repeat_interleave(func: Any, args: tuple, kwargs: dict) -> Any:
    """Repeats in a tensor are small, and say how large the result is: every rank has them, and takes by index."""
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
    """The beginning may be a tensor."""
    start = args[2] if len(args) > 2 else kwargs.get("start")
    if isinstance(start, Tensor):
        x, dim, _, length = (*args, *(kwargs[n] for n in ("dim", "start", "length") if n in kwargs))
        return x.narrow(dim, number(start), length)
    return dispatch(OP_TABLE[func], func, args, kwargs)
