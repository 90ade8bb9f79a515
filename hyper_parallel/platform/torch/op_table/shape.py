"""Views and other changes of shape, concatenation and splitting."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import (
    Table,
    UnboundCallError,
    find,
    global_shape,
    leave_out,
    signature,
    to_dims,
)
from hyper_parallel.platform.torch.private import native

__all__ = ["table"]

T: Any = torch.Tensor


def table() -> Table:
    """Rows of all operations on shapes."""
    return {**_reshapes(), **_permutations(), **_sizes_one(), **_joins_and_splits()}


def _int_list(args: tuple, kwargs: dict, *names: str) -> tuple[int, ...]:
    """The ints of ``f(x, 2, 3)``, ``f(x, (2, 3))`` or ``f(x, size=(2, 3))``."""
    if kwargs:
        leave_out(kwargs)  # view_copy and its like have it
    rest: Any = args[1:]
    if not rest:
        rest = next((kwargs[n] for n in names if n in kwargs), ())
    elif len(rest) == 1 and not isinstance(rest[0], int):
        rest = rest[0]
    if isinstance(rest, torch.dtype):
        raise TypeError("a distributed tensor cannot be viewed as another dtype: use to_local(), or .to(dtype)")
    return tuple(rest)


def _input(args: tuple, kwargs: dict) -> Any:
    return args[0] if args else kwargs["input"]


# ---------------------------------------------------------------------------------------------------- reshape


def _reshapes() -> Table:
    rows: Table = {}
    reshape = NativeOp("reshape", _bind_reshape, _call_reshape)
    rows[T.view] = NativeOp("view", _bind_reshape, _call_view)
    rows[getattr(torch, "view_copy", None)] = NativeOp("reshape_copy", _bind_reshape, _call_view_copy)
    rows[T.reshape] = rows[torch.reshape] = reshape
    rows[T.view_as] = NativeOp("view", _bind_like, _call_reshape)
    rows[T.reshape_as] = NativeOp("reshape", _bind_like, _call_reshape)
    rows.update(dict.fromkeys(find(["flatten"], torch, T), NativeOp("reshape", _bind_flatten, _call_reshape)))
    rows.update(dict.fromkeys(find(["unflatten"], torch, T), NativeOp("reshape", _bind_unflatten, _call_reshape)))
    ravel = NativeOp("reshape", lambda func, args, kwargs: ((_input(args, kwargs),), ((-1,),)), _call_reshape)
    rows.update(dict.fromkeys(find(["ravel"], torch, T), ravel))
    return rows


def _bind_like(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    return (args[0],), (tuple(global_shape(args[1])),)


def _bind_reshape(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if not kwargs and len(args) == 2 and type(args[1]) is tuple:
        return (args[0],), (args[1],)
    return (_input(args, kwargs),), (_int_list(args, kwargs, "shape", "size"),)


# Torch reads numbers faster than a tuple of them.
def _call_view(func: Any, operands: tuple, statics: tuple) -> Any:
    return T.view(operands[0], *statics[0]) if statics[0] else T.view(operands[0], ())


def _call_view_copy(func: Any, operands: tuple, statics: tuple) -> Any:
    return _call_view(func, (operands[0].clone(),), statics)


def _call_reshape(func: Any, operands: tuple, statics: tuple) -> Any:
    return T.reshape(operands[0], *statics[0]) if statics[0] else T.reshape(operands[0], ())


def _bind_flatten(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, start, end = signature("input", start_dim=0, end_dim=-1)(func, args, kwargs)
    shape = tuple(global_shape(x))
    if not shape:
        return (x,), ((1,),)
    start, end = start % len(shape), end % len(shape)
    if start > end:
        raise UnboundCallError  # torch words the error
    merged = 1
    for n in shape[start : end + 1]:
        merged *= n
    return (x,), ((*shape[:start], merged, *shape[end + 1 :]),)


def _bind_unflatten(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim, sizes = signature("input", "dim", "sizes")(func, args, kwargs)
    shape = tuple(global_shape(x))
    if not isinstance(dim, int):
        raise UnboundCallError
    dim %= len(shape)
    sizes = list(sizes)
    if -1 in sizes:
        known = 1
        for n in sizes:
            known *= n if n != -1 else 1
        if not known:
            raise UnboundCallError
        sizes[sizes.index(-1)] = shape[dim] // known
    return (x,), ((*shape[:dim], *sizes, *shape[dim + 1 :]),)


# ---------------------------------------------------------------------------------------------------- permute


@functools.cache
def _swapped(ndim: int, a: int, b: int) -> tuple[int, ...]:
    """The permutation that swaps two dimensions."""
    if not (-ndim <= a < ndim and -ndim <= b < ndim):
        if ndim == 0 and -1 <= a <= 0 and -1 <= b <= 0:
            return ()
        raise IndexError(f"transpose({a}, {b}) is out of range for a tensor of {ndim} dimension(s)")
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _permutations() -> Table:
    rows: Table = {}
    rows.update(dict.fromkeys(find(["permute"], torch, T), NativeOp("permute", _bind_permute, _call_permute)))
    names = ["transpose", "swapaxes", "swapdims"]
    rows.update(dict.fromkeys(find(names, torch, T), NativeOp("permute", _bind_transpose, _call_permute)))
    movedim = NativeOp("permute", _bind_movedim, _call_permute)
    rows.update(dict.fromkeys(find(["movedim", "moveaxis"], torch, T), movedim))
    two = NativeOp("permute", _bind_last_two, _call_permute)
    rows.update(dict.fromkeys([T.mT.__get__, T.t, torch.t], two))
    rows[T.T.__get__] = NativeOp("permute", _bind_reverse, _call_permute)
    adjoint = NativeOp("permute", _bind_last_two, lambda func, ops, statics: ops[0].permute(statics[0]).conj())
    rows.update(dict.fromkeys([T.mH.__get__, T.H.__get__, torch.adjoint, T.adjoint], adjoint))
    return rows


def _call_permute(func: Any, operands: tuple, statics: tuple) -> Any:
    return T.permute(operands[0], *statics[0]) if statics[0] else T.permute(operands[0], ())


def _bind_permute(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    return (_input(args, kwargs),), (_int_list(args, kwargs, "dims"),)


_transpose_arguments = signature("input", "dim0", "dim1")


def _bind_transpose(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if len(args) == 3:
        x, a, b = args
    else:
        kwargs = {{"axis0": "dim0", "axis1": "dim1"}.get(k, k): v for k, v in kwargs.items()}
        x, a, b = _transpose_arguments(func, args, kwargs)
    return (x,), (_swapped(len(global_shape(x)), a, b),)


def _bind_last_two(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x = _input(args, kwargs)
    ndim = len(global_shape(x))
    if ndim != 2 and (func in (T.t, torch.t, T.H.__get__) or ndim < 2):
        if ndim < 2 and func in (T.t, torch.t):
            return (x,), (tuple(range(ndim)),)
        raise UnboundCallError  # torch words the error
    return (x,), (_swapped(ndim, -2, -1),)


def _bind_reverse(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    ndim = len(global_shape(args[0]))
    return (args[0],), (tuple(range(ndim - 1, -1, -1)),)


def _bind_movedim(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, source, destination = signature("input", "source", "destination")(func, args, kwargs)
    ndim = len(global_shape(x))
    sources = [d % ndim for d in to_dims(source) or ()]
    destinations = [d % ndim for d in to_dims(destination) or ()]
    order = [d for d in range(ndim) if d not in sources]
    for to, moved in sorted(zip(destinations, sources, strict=True)):
        order.insert(to, moved)
    return (x,), (tuple(order),)


# ---------------------------------------------------------------------------------------------------- sizes of one


def _sizes_one() -> Table:
    rows: Table = {}
    unsqueeze = NativeOp("unsqueeze", _bind_dim, lambda func, operands, statics: T.unsqueeze(operands[0], statics[0]))
    rows.update(dict.fromkeys(find(["unsqueeze"], torch, T), unsqueeze))
    rows.update(dict.fromkeys(find(["squeeze"], torch, T), NativeOp("squeeze", _bind_squeeze, _call_squeeze)))
    expand = NativeOp("expand", _bind_expand, lambda func, operands, statics: T.expand(operands[0], statics[0]))
    rows.update(dict.fromkeys([T.expand, T.expand_as, torch.broadcast_to, T.broadcast_to], expand))
    repeat = NativeOp("repeat", _bind_repeat, lambda func, operands, statics: T.repeat(operands[0], statics[0]))
    rows.update(dict.fromkeys([T.repeat, torch.tile, T.tile], repeat))
    interleave = NativeOp(
        "repeat_interleave",
        _bind_interleave,
        lambda func, operands, statics: T.repeat_interleave(operands[0], statics[0], statics[1]),
    )
    rows.update(dict.fromkeys([torch.repeat_interleave, T.repeat_interleave], interleave))
    rows[F.pad] = rows[native("pad")] = NativeOp("pad", _bind_pad, _call_pad)
    return rows


def _bind_dim(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim = args if len(args) == 2 else signature("input", "dim")(func, args, kwargs)
    return (x,), (dim,)


def _bind_squeeze(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if len(args) > 2:  # squeeze(0, 1)
        args = (args[0], args[1:])
    x, dim = signature("input", dim=None)(func, args, kwargs)
    return (x,), (to_dims(dim) if dim != () else (),)


def _call_squeeze(func: Any, operands: tuple, statics: tuple) -> Any:
    return T.squeeze(operands[0]) if statics[0] is None else T.squeeze(operands[0], statics[0])


def _bind_expand(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if func is T.expand_as:
        return (args[0],), (tuple(global_shape(args[1])),)
    return (_input(args, kwargs),), (_int_list(args, kwargs, "size", "shape"),)


def _bind_repeat(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, repeats = _input(args, kwargs), _int_list(args, kwargs, "repeats", "dims")
    if func is not T.repeat:
        repeats = (1,) * (len(global_shape(x)) - len(repeats)) + repeats
    return (x,), (repeats,)


def _bind_interleave(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, repeats, dim, _ = signature("input", "repeats", dim=None, output_size=None)(func, args, kwargs)
    if not isinstance(repeats, int) or dim is None:
        raise UnboundCallError
    return (x,), (repeats, dim)


def _bind_pad(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    """Torch lists (before, after) from the last dimension backwards; here each dimension has its pair."""
    x, pad, mode, value = signature("input", "pad", mode="constant", value=None)(func, args, kwargs)
    ndim, pad = len(global_shape(x)), tuple(pad)
    if len(pad) % 2 or len(pad) > 2 * ndim:
        raise UnboundCallError  # torch words the error
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return (x,), ((*((0, 0),) * (ndim - len(pairs)), *reversed(pairs)), mode, value, len(pad))


def _call_pad(func: Any, operands: tuple, statics: tuple) -> Any:
    pairs, mode, value, count = statics
    flat = [n for pair in reversed(pairs) for n in pair]
    return F.pad(operands[0], flat[:count], mode, value)


# ---------------------------------------------------------------------------------------------------- cat and split


def _joins_and_splits() -> Table:
    rows: Table = {}
    cat = NativeOp("cat", _bind_join, _call_cat)
    rows.update(dict.fromkeys(find(["cat", "concat", "concatenate"], torch), cat))
    rows[torch.stack] = NativeOp("stack", _bind_join, _call_stack)
    chunk = NativeOp("chunk", _bind_chunk, lambda func, operands, statics: T.chunk(operands[0], *statics))
    rows.update(dict.fromkeys([torch.chunk, T.chunk], chunk))
    split = NativeOp("split", _bind_split, lambda func, operands, statics: torch.split(operands[0], *statics))
    rows.update(dict.fromkeys(find(["split", "split_with_sizes"], torch, T), split))
    unbind = NativeOp("unbind", _bind_unbind, lambda func, operands, statics: T.unbind(operands[0], statics[0]))
    rows.update(dict.fromkeys([torch.unbind, T.unbind], unbind))
    narrow = NativeOp("narrow", _bind_narrow, lambda func, operands, statics: T.narrow(operands[0], *statics))
    rows.update(dict.fromkeys([torch.narrow, T.narrow], narrow))
    return rows


def _bind_join(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    tensors, dim = signature("tensors", dim=0)(func, args, kwargs)
    return tuple(tensors), (dim,)


def _call_cat(func: Any, operands: tuple, statics: tuple) -> Any:
    if operands[0].dim() == 1 and any(x.shape == (0,) for x in operands):
        # Torch leaves such operands out, also where gradients of gradients go to them and may communicate on the way.
        return torch.cat([x.unsqueeze(0) for x in operands], 1)[0]
    return torch.cat(operands, statics[0])


def _call_stack(func: Any, operands: tuple, statics: tuple) -> Any:
    return torch.stack(operands, statics[0])


def _bind_chunk(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, chunks, dim = signature("input", "chunks", dim=0)(func, args, kwargs)
    return (x,), (chunks, dim)


_split_arguments = signature("input", "size", dim=0)


def _bind_split(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    renamed = {"split_size": "size", "split_sizes": "size", "split_size_or_sections": "size", "tensor": "input"}
    x, size, dim = _split_arguments(func, args, {renamed.get(k, k): v for k, v in kwargs.items()})
    return (x,), (size if isinstance(size, int) else tuple(size), dim)


def _bind_unbind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim = signature("input", dim=0)(func, args, kwargs)
    return (x,), (dim,)


def _bind_narrow(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, dim, start, length = signature("input", "dim", "start", "length")(func, args, kwargs)
    if isinstance(start, T):
        raise UnboundCallError
    return (x,), (dim, start, length)
