"""Indexing: square brackets, gather, one-hot vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.indexing import decode_index, encode_index
from hyper_parallel.platform.torch.basics.tensor import State, dispatch, is_dtensor
from hyper_parallel.platform.torch.op_table.binding import Bound, Table, rows

__all__ = ["NONZERO", "encode", "is_mask", "table", "without_masks"]

#: Returns the indices of nonzero elements.
NONZERO = NativeOp("nonzero", lambda func, args, kwargs: (args, ()), lambda func, xs, how: torch.nonzero(xs[0]))


def table() -> Table:
    """Return the op-table rows for getitem, setitem_, gather, index_select and one_hot."""
    gather = "x dim index sparse_grad=False"
    return {
        **rows("__getitem__", "getitem", _bind_getitem, _call_getitem, Tensor),
        **rows("__setitem__", "setitem_", _bind_setitem, _call_setitem, Tensor),
        **rows("select", "getitem", "select:", _call_getitem),
        **rows("gather", "gather", gather, _call_gather),
        **rows("index_select", "index_select", gather, _call_gather),
        **rows("one_hot", "one_hot", "x/tensor num_classes=-1"),
    }


def encode(x: Any, index: Any) -> tuple[tuple, tuple]:
    """Return the tensors in ``index``, including converted lists and arrays, and the index encoded by
    `encode_index`."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, list) or _is_array(i) for i in items):
        items = tuple(_to_tensor(i, x) if isinstance(i, list) or _is_array(i) else i for i in items)
    return encode_index(items, lambda x: isinstance(x, Tensor), _is_bool)


def is_mask(item: Any) -> bool:
    """Return whether an item of an index is a mask. Tensors of dtype uint8 are masks too."""
    return isinstance(item, Tensor) and _is_bool(item)


def without_masks(index: tuple) -> tuple:
    """Return an index with each distributed mask replaced by the indices of the mask's true elements."""
    found: list[Any] = []
    for item in index:
        if is_dtensor(item) and is_mask(item) and item.dim():
            found += dispatch(NONZERO, torch.nonzero, (item,), {}).unbind(1)
        else:
            found.append(item)
    return tuple(found)


def _to_tensor(index: Any, x: Any) -> Any:
    """Convert a list or an array to a tensor of indices, the same on every rank."""
    layout = getattr(x, "_layout", None)
    tensor = torch.tensor(index, device=x.device)
    return tensor if layout is None else State.core.replicated(tensor, layout.mesh)


def _is_array(x: Any) -> bool:
    return hasattr(x, "__array__") and not isinstance(x, Tensor)


def _is_bool(x: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return x.dtype in (torch.bool, torch.uint8)


def _with_numbers(index: Any) -> Any:
    """Return an index with ints in place of NumPy's numbers and of 0-d tensors of integers.

    Torch reads them as ints: it selects, which gives a view, where index tensors give a copy.
    """
    items = index if isinstance(index, tuple) else (index,)
    if all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        return index
    return tuple(map(_number_of, items))


def _number_of(item: Any) -> Any:
    if isinstance(item, Tensor):
        dtype = item.dtype
        whole = not (item.dim() or _is_bool(item) or dtype.is_floating_point or dtype.is_complex)
        return item.item() if whole and not item.is_meta else item
    if isinstance(item, (np.generic, np.ndarray)) and not item.ndim and item.dtype.kind in "iub":
        return int(item.item())
    return item


def _bind_getitem(func: Any, args: tuple, kwargs: dict) -> Bound:
    x, index = args
    tensors, encoded = encode(x, _with_numbers(index))
    if tensors:
        for item in encoded:
            if item.__class__ is tuple and item[0] == "tensor" and item[3]:  # a mask
                return _bind_masks(x, index, tensors, encoded)
    return (x, *tensors), (encoded,)


def _bind_masks(x: Any, index: Any, tensors: tuple, encoded: tuple) -> Bound:
    """Bind an index with masks. A mask alone has a rule; other masks are replaced by the indices of their true
    elements."""
    if len(encoded) == 1:
        return (x, tensors[0].bool()), (encoded,)
    tensors, encoded = encode(x, without_masks(index))
    return (x, *tensors), (encoded,)


def _call_getitem(func: Any, operands: tuple, static_args: tuple) -> Any:
    return operands[0][decode_index(static_args[0], operands[1:])]


def _bind_setitem(func: Any, args: tuple, kwargs: dict) -> Bound:
    tensors, encoded = encode(args[0], args[1])
    return (args[0], args[2], *tensors), (encoded,)


def _call_setitem(func: Any, operands: tuple, static_args: tuple) -> Any:
    operands[0][decode_index(static_args[0], operands[2:])] = operands[1]
    return operands[0]


def _call_gather(func: Any, operands: tuple, static_args: tuple) -> Any:
    return func(operands[0], static_args[0], operands[1])
