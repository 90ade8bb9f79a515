"""Rows of the op table for primitives that rearrange, split, join or index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.indexing import decode_index, encode_index, has_empty_slice
from hyper_parallel.platform.mindspore.basics.empty_shards import nothing_taken, written_nothing
from hyper_parallel.platform.mindspore.basics.private import is_recording
from hyper_parallel.platform.mindspore.op_table.as_called import Given, as_called
from hyper_parallel.platform.mindspore.op_table.binding import Bound, Choose, by_name, instead, row
from hyper_parallel.platform.mindspore.op_table.picks import is_mask, without_masks
from hyper_parallel.platform.mindspore.processes.collectives import copied

__all__ = ["OPS", "VARIANTS"]


# -------------------------------------------------------------------- views
def _squeeze(x: Any, dims: tuple[int, ...] | None) -> Any:
    """Squeeze by a reshape, because a dim of another global size may have local size 1."""
    if dims is None:
        return ops.squeeze(x)
    drop = {d % x.ndim for d in dims}
    return ops.reshape(x, tuple(s for d, s in enumerate(x.shape) if d not in drop or s != 1))


_VIEWS: dict[str, NativeOp] = {
    "Reshape View ReshapeView": row("reshape", "", instead(ops.reshape)),
    "ViewAs ReshapeAs": row("reshape", "like: x like/other", instead(ops.reshape)),
    "FlattenExt": row("reshape", "flatten:", instead(ops.reshape)),
    "Flatten": row("reshape_copy", "rows:", lambda func, xs, static_args: ops.reshape(copied(xs[0]), *static_args)),
    "BroadcastTo BroadcastToView Expand ExpandDimsTo": row("expand", "", instead(ops.broadcast_to)),
    "ExpandAs": row("expand", "like: x like/other", instead(ops.broadcast_to)),
    "Transpose TransposeView DeprecatedTranspose DeprecatedPermute Permute TExt T": row(
        "permute", "order:", instead(ops.transpose)
    ),
    "TransposeExt TransposeExtView": row("permute", "transpose:", instead(ops.transpose)),
    "Squeeze SqueezeView DeprecatedSqueeze": row("squeeze", "", instead(_squeeze)),
    "ExpandDims ExpandDimsView Unsqueeze UnsqueezeView": row("unsqueeze", "", instead(ops.expand_dims)),
    "Narrow NarrowView": row("narrow", "", instead(mint.narrow)),
}

# -------------------------------------------------------------------- repeat, cut and join
_REPEAT_INTERLEAVE = row("repeat_interleave", "", instead(ops.repeat_interleave))


def _choose_repeat_interleave(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for a constant number of repeats along a dim; other calls have no rule."""
    given = dict(zip(("repeats", "dim"), args[1:], strict=False)) | kwargs
    along = given.get("dim", given.get("axis"))
    return _REPEAT_INTERLEAVE if isinstance(given.get("repeats"), int) and along is not None else None


def _split(x: Any, size: Any, dim: int) -> Any:
    """Split with ops.split: the gradient of mint.split is wrong in MindSpore 2.10 if a chunk is transposed twice."""
    return ops.split(x, list(size) if isinstance(size, tuple) else size, dim)


def _of_unstack(func: Any, xs: tuple, static_args: tuple) -> Bound:
    """Read the dim of ``Unstack`` from the primitive."""
    return xs, (func.prim.axis,)


def _padded(given: Given) -> tuple:
    """Return the static arguments of a pad.

    MindSpore lists (before, after) from the last dimension backwards, the rule from the first.
    """
    numbers, prim = given.values["paddings"], given.func.prim
    ndim, count = len(given.shapes[0]), len(numbers) // 2
    if len(numbers) % 2 or count > ndim or not prim.paddings_contiguous:
        return (), prim.mode
    pairs = [(int(numbers[2 * i]), int(numbers[2 * i + 1])) for i in range(count)]
    return (*((0, 0),) * (ndim - count), *reversed(pairs)), prim.mode


_PARTS: dict[str, NativeOp] = {
    "Tile Repeat RepeatView": row("repeat", "", instead(ops.tile)),
    "SplitTensor SplitTensorView SplitWithSize SplitWithSizeView": row("split", "", instead(_split)),
    "Pad": as_called("pad", "x", lambda given: (given.func.prim.paddings,)),
    "MirrorPad": as_called("pad", "x paddings", lambda given: (given.values["paddings"], "mirror")),
    "PadV3": as_called("pad", "x paddings value", _padded),
    "Split": row("split", "equal_parts:", instead(_split)),
    # not mint.unbind, whose gradient has no kernel on CPU
    "UnstackExt UnstackExtView": row("unbind", "", instead(ops.unbind)),
    "Unstack": row("unbind", "x", instead(ops.unbind), by_function=True, adjust=_of_unstack),
    "Chunk ChunkView": row("chunk", "", instead(mint.chunk)),
    "Concat Cat": row("cat", "", lambda func, xs, static_args: ops.cat(xs, *static_args)),
    "Stack StackExt": row("stack", "", lambda func, xs, static_args: ops.stack(xs, *static_args)),
}


# -------------------------------------------------------------------- indexing
def _bind_getitem(func: Any, args: tuple, kwargs: dict) -> Bound:
    """Bind ``f(x, index)``, or ``f(x, index, value)`` for a write.

    The number of true elements in a mask depends on the data. A rule covers reads with a single mask, and writes of one
    value to it. In other indices, each mask is replaced by the indices of its true elements.
    """
    value: Sequence[Any]
    x, index, *value = args
    items = _with_tensors(x, index)
    one = not value or not getattr(value[0], "ndim", 0)
    if any(map(is_mask, items)) and not (one and len(items) == 1):
        items = without_masks(items)
    if not value:
        items = tuple(map(_number_of, items))
    tensors, encoded = encode_index(items, lambda i: isinstance(i, Tensor), lambda i: i.dtype == ms.bool_)
    return (x, *value, *tensors), (encoded,)


_INTEGERS = (ms.int8, ms.int16, ms.int32, ms.int64)


def _number_of(item: Any) -> Any:
    """Return an int for a 0-d tensor of integers. MindSpore reads it as one, and returns a view."""
    whole = isinstance(item, Tensor) and not item.ndim and item.dtype in _INTEGERS
    return int(item) if whole else item


def _with_tensors(x: Any, index: Any) -> tuple:
    """Return the items of an index. Lists of numbers or booleans, the same on all ranks, become tensors."""
    if type(index) is list and any(type(item) not in (int, bool) for item in index):
        index = tuple(index)  # as MindSpore takes it
    items = index if isinstance(index, tuple) else (index,)
    if not any(type(item) in (list, tuple) for item in items):
        return items
    return items if getattr(x, "_layout", None) is None else tuple(_replicated(item, x) for item in items)


def _replicated(item: Any, x: Any) -> Any:
    values = np.array(item) if type(item) in (list, tuple) and item else None
    if values is None or values.dtype.kind not in "ib":
        return item
    return x._core.replicated(Tensor(values), x._layout.mesh)


def _call_getitem(func: Any, operands: tuple, static_args: tuple) -> Any:
    if has_empty_slice(static_args[0], operands[0].shape):
        return nothing_taken(_INDEXING["getitem"], func, operands, static_args)  # MindSpore has no gradient of it
    index = decode_index(static_args[0], operands[1:])
    # A number alone raises an error in MindSpore when gradients of gradients are recorded.
    return func(operands[0], index[0] if len(index) == 1 and type(index[0]) is not int else index)


def _call_setitem(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, index = operands[0], decode_index(static_args[0], operands[2:])
    # For dots or None alone, MindSpore gives x new memory, which the base of a view x does not see.
    if index == (None,):
        index = (None, ...)
    elif index == (...,):
        index = (slice(None),) * x.ndim
    if 0 in x.shape or has_empty_slice(static_args[0], x.shape):
        written_nothing(x, operands[1])
        return x  # MindSpore fails if there is nothing to write
    if len(operands) > 2 and not _is_recorded(x, operands[1]):
        # Supports an index of tensors too: a write to a slice reaches the base of a view.
        result = x.copy()
        func(result, index[0] if len(index) == 1 else index, operands[1])
        func(x, (slice(None),) * x.ndim, result)
    else:
        func(x, index[0] if len(index) == 1 else index, operands[1])
    return x


def _is_recorded(*xs: Any) -> bool:
    return is_recording() and any(isinstance(x, Tensor) and x._requires_grad for x in xs)


def _basic_index(x: Any, index: tuple) -> Any:
    return Tensor.__getitem__(x, decode_index(index, ()))


def _of_values(func: Any, xs: tuple, static_args: tuple) -> Bound:
    """Return static arguments with the values ``on`` and ``off`` as numbers.

    MindSpore passes 0-d tensors, whose dtype the result gets.
    """
    depth, on, off = static_args
    return xs, (depth, on.item(), off.item(), on.dtype)


def _one_hot(ids: Any, depth: int, on: Any, off: Any, dtype: Any) -> Any:
    return ops.one_hot(ids, depth, Tensor(on, dtype), Tensor(off, dtype))


_INDEXED = "x dim index"
_STRIDED_SLICE = row("getitem", "strided_slice:", instead(_basic_index))
_ONE_HOT = row("one_hot", "x/ids num_classes/depth +on +off", instead(_one_hot), adjust=_of_values)

_INDEXING: dict[str, NativeOp] = {
    "getitem": row("getitem", _bind_getitem, _call_getitem),
    "setitem_": row("setitem_", _bind_getitem, _call_setitem),
    "SelectExt SelectExtView SelectView": row("getitem", "select:", instead(_basic_index)),
    "Slice": row("getitem", "slice:", instead(_basic_index)),
    "GatherD GatherElements": row(
        "gather", _INDEXED, lambda func, xs, static_args: ops.gather_elements(xs[0], static_args[0], xs[1])
    ),
    "IndexSelect": row("index_select", _INDEXED, instead(ops.gather)),
}


def _choose_strided_slice(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for a strided slice without masks, which change the meaning of bounds."""
    return None if any(args[4:]) or kwargs else _STRIDED_SLICE


def _choose_one_hot(args: tuple, kwargs: dict) -> NativeOp | None:
    last = len(args) < 5 or args[4] in (-1, len(args[0].shape))
    return _ONE_HOT if last and not kwargs and isinstance(args[2], Tensor) else None


OPS: dict[str, NativeOp] = by_name({**_VIEWS, **_PARTS, **_INDEXING})

VARIANTS: dict[str, Choose] = by_name(
    {
        "RepeatInterleaveInt DeprecatedRepeatInterleave RepeatInterleave": _choose_repeat_interleave,
        "StridedSlice": _choose_strided_slice,
        "OneHot OneHotExt": _choose_one_hot,
    }
)
