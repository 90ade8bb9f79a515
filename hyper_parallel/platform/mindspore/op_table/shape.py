"""Rows of the op table for primitives that rearrange, cut, join or index."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.indexing import decode_index, encode_index, has_empty_slice
from hyper_parallel.platform.mindspore.collectives import copied
from hyper_parallel.platform.mindspore.empty_shards import guarded, nothing_taken
from hyper_parallel.platform.mindspore.op_table.binding import Table, arguments, dims_of, ints, row
from hyper_parallel.platform.mindspore.private import is_recording

__all__ = ["OPS", "VARIANTS"]

OPS = Table()
VARIANTS: dict[str, Callable[[tuple, dict], NativeOp | None]] = {}


def _rest(args: tuple, kwargs: dict, key: str) -> tuple:
    """``f(x, 1, 2)``, ``f(x, (1, 2))`` or ``f(x, shape=(1, 2))`` -> (1, 2)."""
    return ints(args[1:] if len(args) > 1 else (next(iter(kwargs.values())),))


# -------------------------------------------------------------------- views
OPS.row(
    "Reshape View ReshapeView",
    "reshape",
    lambda args, kwargs: (args[:1], (_rest(args, kwargs, "shape"),)),
    lambda func, xs, statics: ops.reshape(xs[0], statics[0]),
)


def _bind_like_other(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    other = args[1] if len(args) > 1 else next(iter(kwargs.values()))
    return args[:1], (tuple(other.shape),)


OPS.row("ViewAs ReshapeAs", "reshape", _bind_like_other, lambda func, xs, statics: ops.reshape(xs[0], statics[0]))
OPS.row("ExpandAs", "expand", _bind_like_other, lambda func, xs, statics: ops.broadcast_to(xs[0], statics[0]))


def _bind_flatten(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, start, end = arguments(("x", "start_dim", "end_dim"), (0, -1), args, kwargs)
    shape = tuple(x.shape)
    if not shape:
        return (x,), ((1,),)
    start, end = start % len(shape), end % len(shape)
    return (x,), ((*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]),)


def _bind_flatten_old(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """The primitive ``Flatten`` keeps dim 0."""
    return args[:1], ((args[0].shape[0], -1),)


OPS.row("FlattenExt", "reshape", _bind_flatten, lambda func, xs, statics: ops.reshape(xs[0], statics[0]))
OPS.row("Flatten", "reshape_copy", _bind_flatten_old, lambda func, xs, statics: ops.reshape(copied(xs[0]), statics[0]))


def _permute(func: Any, xs: tuple, statics: tuple) -> Any:
    return ops.transpose(xs[0], statics[0])


def _bind_permute(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    dims = _rest(args, kwargs, "dims") if len(args) > 1 or kwargs else tuple(reversed(range(args[0].ndim)))
    return args[:1], (tuple(d % args[0].ndim for d in dims),)


def _bind_transpose(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, a, b = args if len(args) == 3 else (args[0], *kwargs.values())
    dims = list(range(x.ndim))
    dims[a], dims[b] = dims[b], dims[a]
    return (x,), (tuple(dims),)


def _bind_t(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    return args[:1], (tuple(reversed(range(args[0].ndim))),)


OPS.row("Transpose TransposeView DeprecatedTranspose DeprecatedPermute Permute", "permute", _bind_permute, _permute)
OPS.row("TransposeExt TransposeExtView", "permute", _bind_transpose, _permute)
OPS.row("TExt T", "permute", _bind_t, _permute)
OPS.row(
    "BroadcastTo BroadcastToView Expand ExpandDimsTo",
    "expand",
    lambda args, kwargs: (args[:1], (_rest(args, kwargs, "shape"),)),
    lambda func, xs, statics: ops.broadcast_to(xs[0], statics[0]),
)


def _bind_squeeze(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, dim = arguments(("x", "dim"), (None,), args, kwargs)
    return (x,), (dims_of(dim),)


def _squeeze(func: Any, xs: tuple, statics: tuple) -> Any:
    """Reshape, because a local dim may have size 1 where the global one has not."""
    x, dims = xs[0], statics[0]
    if dims is None:
        return ops.squeeze(x)
    drop = {d % x.ndim for d in dims}
    return ops.reshape(x, tuple(s for d, s in enumerate(x.shape) if d not in drop or s != 1))


OPS.row("Squeeze SqueezeView DeprecatedSqueeze", "squeeze", _bind_squeeze, _squeeze)
OPS.row(
    "ExpandDims ExpandDimsView Unsqueeze UnsqueezeView",
    "unsqueeze",
    lambda args, kwargs: (args[:1], (int(args[1] if len(args) > 1 else next(iter(kwargs.values()))),)),
    lambda func, xs, statics: ops.expand_dims(xs[0], statics[0]),
)
OPS.row(
    "Narrow NarrowView",
    "narrow",
    lambda args, kwargs: (args[:1], tuple(int(v) for v in (*args[1:], *kwargs.values()))),
    lambda func, xs, statics: mint.narrow(xs[0], *statics),
)
OPS.row(
    "Tile Repeat RepeatView",
    "repeat",
    lambda args, kwargs: (args[:1], (_rest(args, kwargs, "dims"),)),
    lambda func, xs, statics: ops.tile(xs[0], statics[0]),
)


def _bind_repeat_interleave(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, repeats, dim = arguments(("x", "repeats", "dim"), (None,), args, kwargs)
    return (x,), (repeats, dim)


_REPEAT_INTERLEAVE = row(
    "repeat_interleave",
    _bind_repeat_interleave,
    lambda func, xs, statics: ops.repeat_interleave(xs[0], statics[0], statics[1]),
)


def _choose_repeat_interleave(args: tuple, kwargs: dict) -> NativeOp | None:
    """Only the same number of repeats along a dim."""
    _, (repeats, dim) = _bind_repeat_interleave(args, kwargs)
    return _REPEAT_INTERLEAVE if isinstance(repeats, int) and dim is not None else None


for _name in ("RepeatInterleaveInt", "DeprecatedRepeatInterleave", "RepeatInterleave"):
    VARIANTS[_name] = _choose_repeat_interleave


# -------------------------------------------------------------------- cut and join
def _bind_split(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, size, dim = arguments(("x", "split_size", "dim"), (0,), args, kwargs)
    return (x,), (ints((size,)) if isinstance(size, (tuple, list)) else int(size), int(dim))


def _split(func: Any, xs: tuple, statics: tuple) -> Any:
    # Not mint.split: in MindSpore 2.10 its gradient is wrong where a part is transposed twice.
    size, dim = statics[:2]
    return ops.split(xs[0], list(size) if isinstance(size, tuple) else size, dim)


def _bind_split_old(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """The primitive ``Split(x, axis, number)`` cuts into equal parts."""
    x, dim, number = arguments(("x", "dim", "output_num"), (0, 1), args, kwargs)
    return (x,), (x.shape[dim] // number, dim)


OPS.row("SplitTensor SplitTensorView SplitWithSize SplitWithSizeView", "split", _bind_split, _split)
OPS.row("Split", "split", _bind_split_old, _split)


def _bind_chunk(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, chunks, dim = arguments(("x", "chunks", "dim"), (0,), args, kwargs)
    return (x,), (int(chunks), int(dim))


def _bind_unbind_old(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """``Unstack`` keeps its dim in the primitive."""
    return args[:1], (func.prim.axis,)


def _unbind(func: Any, xs: tuple, statics: tuple) -> Any:
    return ops.unbind(xs[0], statics[0])  # not mint.unbind, whose gradient has no kernel on CPU


OPS["Unstack"] = guarded(NativeOp("unbind", _bind_unbind_old, _unbind))
OPS.row(
    "UnstackExt UnstackExtView",
    "unbind",
    lambda args, kwargs: (args[:1], (int(args[1] if len(args) > 1 else kwargs.get("dim", 0)),)),
    _unbind,
)
OPS.row("Chunk ChunkView", "chunk", _bind_chunk, lambda func, xs, statics: mint.chunk(xs[0], *statics[:2]))


def _bind_many(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    tensors, dim = arguments(("tensors", "dim"), (0,), args, kwargs)
    return tuple(tensors), (int(dim),)


OPS.row("Concat Cat", "cat", _bind_many, lambda func, xs, statics: ops.cat(xs, statics[0]))
OPS.row("Stack StackExt", "stack", _bind_many, lambda func, xs, statics: ops.stack(xs, statics[0]))


# -------------------------------------------------------------------- indexing
def _bind_getitem(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, index = args
    tensors, encoded = encode_index(index, lambda i: isinstance(i, Tensor), lambda i: i.dtype == ms.bool_)
    return (x, *tensors), (encoded,)


def _bind_setitem(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, index, value = args
    tensors, encoded = encode_index(index, lambda i: isinstance(i, Tensor), lambda i: i.dtype == ms.bool_)
    return (x, value, *tensors), (encoded,)


def _getitem(func: Any, operands: tuple, statics: tuple) -> Any:
    if has_empty_slice(statics[0], operands[0].shape):
        return nothing_taken(OPS["getitem"], func, operands, statics)  # MindSpore has no gradient of it
    index = decode_index(statics[0], operands[1:])
    # A number alone is an error of MindSpore's where gradients of gradients are recorded.
    return func(operands[0], index[0] if len(index) == 1 and type(index[0]) is not int else index)


def _setitem(func: Any, operands: tuple, statics: tuple) -> Any:
    x, index = operands[0], decode_index(statics[0], operands[2:])
    # MindSpore gives x new memory for dots or None alone, which a tensor that x is a view of does not see.
    if index == (None,):
        index = (None, ...)
    elif index == (...,):
        index = (slice(None),) * x.ndim
    if 0 in x.shape or has_empty_slice(statics[0], x.shape):
        return x  # MindSpore fails where there is nothing to write
    if len(operands) > 2 and not _is_recorded(x, operands[1]):
        # For an index of tensors as well. What a slice writes reaches the base.
        result = x.copy()
        func(result, index[0] if len(index) == 1 else index, operands[1])
        func(x, (slice(None),) * x.ndim, result)
    else:
        func(x, index[0] if len(index) == 1 else index, operands[1])
    return x


def _is_recorded(*xs: Any) -> bool:
    return is_recording() and any(isinstance(x, Tensor) and x._requires_grad for x in xs)


OPS["getitem"] = row("getitem", _bind_getitem, _getitem)
OPS["setitem_"] = row("setitem_", _bind_setitem, _setitem)


def _bind_select(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, dim, index = arguments(("x", "dim", "index"), (), args, kwargs)
    dim = dim % x.ndim
    return (x,), ((*(("slice", None, None, None),) * dim, int(index)),)


def _call_basic_index(func: Any, operands: tuple, statics: tuple) -> Any:
    return Tensor.__getitem__(operands[0], decode_index(statics[0], ()))


OPS.row("SelectExt SelectExtView SelectView", "getitem", _bind_select, _call_basic_index)


def _bind_strided_slice(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, begin, end, strides = args[:4]
    return (x,), (tuple(("slice", int(b), int(e), int(s)) for b, e, s in zip(begin, end, strides, strict=True)),)


def _bind_slice(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, begin, size = args
    return (x,), (tuple(("slice", int(b), int(b) + int(s), None) for b, s in zip(begin, size, strict=True)),)


_STRIDED_SLICE = row("getitem", _bind_strided_slice, _call_basic_index)
OPS["Slice"] = row("getitem", _bind_slice, _call_basic_index)
#: with masks the bounds mean something else
VARIANTS["StridedSlice"] = lambda args, kwargs: _STRIDED_SLICE if not any(args[4:]) and not kwargs else None


def _bind_gather(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, dim, index = arguments(("x", "dim", "index"), (), args, kwargs)
    return (x, index), (int(dim),)


OPS.row(
    "GatherD GatherElements",
    "gather",
    _bind_gather,
    lambda func, xs, statics: ops.gather_elements(xs[0], statics[0], xs[1]),
)
OPS.row(
    "IndexSelect",
    "index_select",
    _bind_gather,
    lambda func, xs, statics: ops.gather(xs[0], xs[1], statics[0]),
)


def _bind_one_hot(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    """``OneHot(ids, depth, on, off, axis)``; the on and off values are 0-d tensors that give the dtype."""
    ids, depth, on, off = args[:4]
    return (ids,), (int(depth), on.item(), off.item(), on.dtype)


def _one_hot(func: Any, xs: tuple, statics: tuple) -> Any:
    depth, on, off, dtype = statics
    return ops.one_hot(xs[0], depth, Tensor(on, dtype), Tensor(off, dtype))


_ONE_HOT = row("one_hot", _bind_one_hot, _one_hot)


def _choose_one_hot(args: tuple, kwargs: dict) -> NativeOp | None:
    last = len(args) < 5 or args[4] in (-1, len(args[0].shape))
    return _ONE_HOT if last and not kwargs and isinstance(args[2], Tensor) else None


VARIANTS["OneHot"] = VARIANTS["OneHotExt"] = _choose_one_hot
