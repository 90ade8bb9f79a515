"""Indexing: square brackets, gather, one-hot vectors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.indexing import decode_index, encode_index
from hyper_parallel.platform.torch.op_table.binding import Table, UnboundCallError, find, global_shape, signature

__all__ = ["table"]

T: Any = torch.Tensor


def table() -> Table:
    """Rows of getitem, setitem_, gather, index_select and one_hot."""
    rows: Table = {}
    rows[T.__getitem__] = NativeOp("getitem", _bind_getitem, _call_getitem)
    rows[T.__setitem__] = NativeOp("setitem_", _bind_setitem, _call_setitem)
    rows.update(dict.fromkeys([torch.select, T.select], NativeOp("getitem", _bind_select, _call_getitem)))
    for name in ("gather", "index_select"):
        row = NativeOp(name, _bind_gather, _call_gather(getattr(torch, name)))
        rows.update(dict.fromkeys(find([name], torch, T), row))
    one_hot = NativeOp("one_hot", _bind_one_hot, lambda func, operands, statics: F.one_hot(operands[0], *statics))
    rows[F.one_hot] = one_hot
    return rows


def _encode(x: Any, index: Any) -> tuple[tuple, tuple]:
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, list) or _is_array(i) for i in items):
        items = tuple(_to_tensor(i, x) if isinstance(i, list) or _is_array(i) else i for i in items)
    return encode_index(items, lambda x: isinstance(x, T), _is_bool)


def _to_tensor(index: Any, x: Any) -> Any:
    """A list or an array as a tensor of indices, the same on every rank."""
    from hyper_parallel.platform.torch.tensor import replicated

    layout = getattr(x, "_layout", None)
    tensor = torch.tensor(index, device=x.device)
    return tensor if layout is None else replicated(tensor, layout.mesh)


def _is_array(x: Any) -> bool:
    return hasattr(x, "__array__") and not isinstance(x, T)


def _is_bool(x: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return x.dtype is torch.bool


def _bind_getitem(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    tensors, encoded = _encode(args[0], args[1])
    return (args[0], *tensors), (encoded,)


def _call_getitem(func: Any, operands: tuple, statics: tuple) -> Any:
    return operands[0][decode_index(statics[0], operands[1:])]


def _bind_setitem(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    tensors, encoded = _encode(args[0], args[1])
    return (args[0], args[2], *tensors), (encoded,)


def _call_setitem(func: Any, operands: tuple, statics: tuple) -> Any:
    operands[0][decode_index(statics[0], operands[2:])] = operands[1]
    return operands[0]


def _bind_select(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim, index = signature("input", "dim", "index")(func, args, kwargs)
    if isinstance(index, T):
        raise UnboundCallError
    dim %= len(global_shape(x))
    return (x,), ((*(("slice", None, None, None),) * dim, index),)


def _bind_gather(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim, index, _sparse = signature("input", "dim", "index", sparse_grad=False)(func, args, kwargs)
    return (x, index), (dim,)


def _call_gather(kernel: Any) -> Any:
    return lambda func, operands, statics: kernel(operands[0], statics[0], operands[1])


def _bind_one_hot(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    kwargs = {{"tensor": "input"}.get(k, k): v for k, v in kwargs.items()}
    x, classes = signature("input", num_classes=-1)(func, args, kwargs)
    if classes == -1:
        raise UnboundCallError  # the number of classes depends on the data
    return (x,), (classes,)
