"""Functions whose result sizes depend on data: nonzero elements, unique elements, one-hot classes, masks in indices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.basics.tensor import dispatch, handles, is_dtensor
from hyper_parallel.platform.torch.handlers.composing import composed, number
from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.platform.torch.op_table.binding import Bound, UnboundCallError, find
from hyper_parallel.platform.torch.op_table.index import NONZERO, without_masks
from hyper_parallel.platform.torch.op_table.scatter import INDEX_ADD


def _bind(func: Any, args: tuple, kwargs: dict) -> Bound:
    return args[:1], args[1:]


_UNIQUE = NativeOp("unique", _bind, lambda func, xs, how: torch.unique(xs[0], True, how[1], how[2], how[0]))
_IN_ORDER = NativeOp(
    "unique_in_order",
    _bind,
    # Torch takes these arguments by name only, whatever its signature says.
    lambda func, xs, how: torch.unique_consecutive(xs[0], return_inverse=how[1], return_counts=how[2], dim=how[0]),
)


@composed(*find("nonzero argwhere"))
def nonzero(input: Any, *, as_tuple: bool = False) -> Any:
    """Return the indices of nonzero elements. Mirrors `torch.nonzero`."""
    if as_tuple and not input.dim():
        input = input.unsqueeze(0)
    places = dispatch(NONZERO, torch.nonzero, (input,), {})
    return places.unbind(1) if as_tuple else places


@composed(*find("nonzero_static"))
def nonzero_static(input: Any, *, size: int, fill_value: int = -1) -> Any:
    """Return ``size`` indices of nonzero elements, padded with ``fill_value``. Mirrors `torch.nonzero_static`."""
    if size < 0:
        raise UnboundCallError
    places = nonzero(input)
    missing = size - places.shape[0]
    return places[:size] if missing <= 0 else F.pad(places, (0, 0, 0, missing), value=fill_value)


@composed(*find("unique"))
def unique(
    input: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return the distinct elements, always sorted, which ``sorted=False`` allows too. Mirrors `torch.unique`."""
    return dispatch(_UNIQUE, torch.unique, (input, dim, bool(return_inverse), bool(return_counts)), {})


@composed(*find("unique_consecutive"))
def unique_consecutive(
    input: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """Return the elements that differ from their predecessor. Mirrors `torch.unique_consecutive`."""
    given = (input, dim, bool(return_inverse), bool(return_counts))
    return dispatch(_IN_ORDER, torch.unique_consecutive, given, {})


@handles(*find("one_hot"))
def one_hot(func: Any, args: tuple, kwargs: dict) -> Any:
    """One-hot vectors. If the number of classes is not given, one all-reduce of a number finds the largest class."""
    given = {**dict(zip(("input", "num_classes"), args, strict=False)), **kwargs}
    x: Any = given.get("input", given.get("tensor"))
    if given.get("num_classes", -1) != -1 or not is_dtensor(x) or not x.numel():
        return dispatch(OP_TABLE[func], func, args, kwargs)
    return F.one_hot(x, number(x.amax()) + 1)


@handles(*find("index_put"))
def index_put(func: Any, args: tuple, kwargs: dict) -> Any:
    """Choose the op-table row for `index_put`, with or without accumulation."""
    adds = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    if len(args) > 1:
        args = (args[0], without_masks(tuple(args[1])), *args[2:])
    return dispatch(INDEX_ADD if adds else OP_TABLE[func], func, args, kwargs)
