"""Views and other changes of shape, concatenation and splitting."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.basics.private import native_functions
from hyper_parallel.platform.torch.op_table.binding import (
    Bound,
    Table,
    UnboundCallError,
    binds,
    call_by_position,
    dims_of,
    global_shape,
    rows,
)

__all__ = ["table"]


def table() -> Table:
    """Rows of all operations on shapes."""
    return {**_reshapes(), **_permutations(), **_sizes_one(), **_joins_and_splits(), **_diagonals(), **_reinterpreted()}


# -------------------------------------------------------------------------------------------------- diagonals, windows


def _diagonals() -> Table:
    def of_last(func: Any, operands: tuple, static_args: tuple) -> Any:
        return torch.diagonal(operands[0], *static_args)

    return {
        **rows("diagonal", "diagonal", "input offset=0 dim1=0 dim2=1", call_by_position, torch, Tensor),
        **rows("diagonal", "diagonal", "A offset=0 dim1=-2 dim2=-1", of_last, torch.linalg),
        **rows("diag_embed", "diag_embed", "input offset=0 dim1=-2 dim2=-1", call_by_position, torch, Tensor),
    }


def _reinterpreted() -> Table:
    return {
        **rows("unfold", "windows", "input dimension size step", call_by_position, Tensor),
        **rows("view_as_real", "real_pairs", "input", _call_view_as_real, torch),
        **rows("view_as_complex", "complex_pairs", "input", _call_view_as_complex, torch),
    }


def _call_view_as_real(func: Any, operands: tuple, static_args: tuple) -> Any:
    pairs = torch.view_as_real(operands[0])
    if pairs.requires_grad and not pairs.numel():  # its backward looks at strides of a cotangent also of nothing
        pairs.register_hook(lambda g: g.clone(memory_format=torch.contiguous_format))
    return pairs


def _call_view_as_complex(func: Any, operands: tuple, static_args: tuple) -> Any:
    (x,) = operands
    if not x.numel():  # torch looks at strides also of nothing
        return torch.complex(x[..., 0], x[..., 1])
    return torch.view_as_complex(x)


def _by_numbers(kernel: Callable) -> Callable:
    """Call with the sizes or dimensions one by one: torch reads numbers faster than a tuple of them."""

    def call(func: Any, operands: tuple, static_args: tuple) -> Any:
        return kernel(operands[0], *static_args[0]) if static_args[0] else kernel(operands[0], ())

    return call


# ---------------------------------------------------------------------------------------------------- reshape


def _reshapes() -> Table:
    reshape, view = _by_numbers(Tensor.reshape), _by_numbers(Tensor.view)
    to, like = "input *sizes/shape/size/dtype", "input like/other"
    return {
        **rows("view", "view", to, view, Tensor),
        **rows("view_copy", "reshape_copy", to),
        **rows("reshape", "reshape", to, reshape),
        **rows("view_as", "view", like, reshape),
        **rows("reshape_as", "reshape", like, reshape),
        **rows("flatten", "reshape", _bind_flatten, reshape),
        **rows("unflatten", "reshape", _bind_unflatten, reshape),
        **rows("ravel", "reshape", "input -> input | (-1,)", reshape),
    }


@binds("input start_dim=0 end_dim=-1")
def _bind_flatten(x: Any, start: int, end: int) -> Bound:
    shape = tuple(global_shape(x))
    if not shape:
        return (x,), ((1,),)
    start, end = start % len(shape), end % len(shape)
    if start > end:
        raise UnboundCallError  # torch words the error
    return (x,), ((*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]),)


@binds("input dim sizes")
def _bind_unflatten(x: Any, dim: int, sizes: Any) -> Bound:
    shape = tuple(global_shape(x))
    if not isinstance(dim, int):
        raise UnboundCallError
    dim %= len(shape)
    sizes = list(sizes)
    if -1 in sizes:
        known = math.prod(n for n in sizes if n != -1)
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
    permute = _by_numbers(Tensor.permute)

    def adjoint(func: Any, operands: tuple, static_args: tuple) -> Any:
        return operands[0].permute(static_args[0]).conj()

    return {
        **rows("permute", "permute", "input *sizes/dims", permute),
        **rows("transpose swapaxes swapdims", "permute", _bind_transpose, permute),
        **rows("movedim moveaxis", "permute", _bind_movedim, permute),
        **rows("t", "permute", _bind_last_two, permute),
        **rows("__get__", "permute", _bind_last_two, permute, Tensor.mT),
        **rows("__get__", "permute", _bind_reverse, permute, Tensor.T),
        **rows("__get__", "permute", _bind_last_two, adjoint, Tensor.mH, Tensor.H),
        **rows("adjoint", "permute", _bind_last_two, adjoint),
    }


@binds("input dim0/axis0 dim1/axis1")
def _bind_transpose(x: Any, a: int, b: int) -> Bound:
    return (x,), (_swapped(len(global_shape(x)), a, b),)


def _bind_last_two(func: Any, args: tuple, kwargs: dict) -> Bound:
    x = args[0] if args else kwargs["input"]
    ndim = len(global_shape(x))
    if ndim != 2 and (func in (Tensor.t, torch.t, Tensor.H.__get__) or ndim < 2):
        if ndim < 2 and func in (Tensor.t, torch.t):
            return (x,), (tuple(range(ndim)),)
        raise UnboundCallError  # torch words the error
    return (x,), (_swapped(ndim, -2, -1),)


def _bind_reverse(func: Any, args: tuple, kwargs: dict) -> Bound:
    return (args[0],), (tuple(reversed(range(len(global_shape(args[0]))))),)


@binds("input source destination")
def _bind_movedim(x: Any, source: Any, destination: Any) -> Bound:
    ndim = len(global_shape(x))
    sources = [d % ndim for d in dims_of(source) or ()]
    destinations = [d % ndim for d in dims_of(destination) or ()]
    order = [d for d in range(ndim) if d not in sources]
    for to, moved in sorted(zip(destinations, sources, strict=True)):
        order.insert(to, moved)
    return (x,), (tuple(order),)


# ---------------------------------------------------------------------------------------------------- sizes of one


def _sizes_one() -> Table:
    interleave = "input repeats repeated_dim/dim=None output_size=None -> input | repeats repeated_dim"
    return {
        **rows("unsqueeze", "unsqueeze", "input dim"),
        **rows("squeeze", "squeeze", _bind_squeeze, _call_squeeze),
        **rows("expand broadcast_to", "expand", "input *sizes/size/shape"),
        **rows("expand_as", "expand", "input like/other", lambda func, xs, static_args: xs[0].expand(*static_args)),
        **rows("repeat", "repeat", "input *sizes/repeats"),
        **rows("tile", "repeat", _bind_tile),
        **rows("repeat_interleave", "repeat_interleave", interleave),
        **rows("pad", "pad", _bind_pad, _call_pad, F, native_functions),
    }


def _bind_squeeze(func: Any, args: tuple, kwargs: dict) -> Bound:
    if len(args) > 2:  # squeeze(0, 1)
        args = (args[0], args[1:])
    return _bind_squeezed(func, args, kwargs)


@binds("input removed/dim/axis=None")
def _bind_squeezed(x: Any, dim: Any) -> Bound:
    return (x,), (() if dim == () else dims_of(dim),)


def _call_squeeze(func: Any, operands: tuple, static_args: tuple) -> Any:
    return Tensor.squeeze(operands[0]) if static_args[0] is None else Tensor.squeeze(operands[0], static_args[0])


@binds("input *sizes/dims")
def _bind_tile(x: Any, dims: tuple[int, ...]) -> Bound:
    return (x,), ((1,) * (len(global_shape(x)) - len(dims)) + dims,)


@binds("input pad mode='constant' value=None")
def _bind_pad(x: Any, pad: Any, mode: str, value: Any) -> Bound:
    """Torch lists (before, after) from the last dimension backwards; here each dimension has its pair."""
    ndim, pad = len(global_shape(x)), tuple(pad)
    if len(pad) % 2 or len(pad) > 2 * ndim:
        raise UnboundCallError  # torch words the error
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    return (x,), ((*((0, 0),) * (ndim - len(pairs)), *reversed(pairs)), mode, value, len(pad))


def _call_pad(func: Any, operands: tuple, static_args: tuple) -> Any:
    pairs, mode, value, count = static_args
    flat = [n for pair in reversed(pairs) for n in pair]
    return F.pad(operands[0], flat[:count], mode, value)


# ---------------------------------------------------------------------------------------------------- cat and split


def _joins_and_splits() -> Table:
    return {
        **rows("cat concat concatenate", "cat", _bind_join, _call_cat, torch),
        **rows("stack", "stack", _bind_join, lambda func, operands, static_args: func(operands, static_args[0]), torch),
        **rows("chunk", "chunk", "input chunks dim=0"),
        **rows("split split_with_sizes", "split", _bind_split),
        **rows("unbind", "unbind", "input dim=0"),
        **rows("narrow", "narrow", "input dim start length"),
    }


@binds("tensors dim=0")
def _bind_join(tensors: Any, dim: int) -> Bound:
    return tuple(tensors), (dim,)


def _call_cat(func: Any, operands: tuple, static_args: tuple) -> Any:
    if operands[0].dim() == 1 and any(x.shape == (0,) for x in operands):
        # Torch leaves such operands out, also where gradients of gradients go to them and may communicate on the way.
        return torch.cat([x.unsqueeze(0) for x in operands], 1)[0]
    return torch.cat(operands, static_args[0])


@binds("input/tensor size/split_size/split_sizes/split_size_or_sections dim=0")
def _bind_split(x: Any, size: Any, dim: int) -> Bound:
    return (x,), (size if isinstance(size, int) else tuple(size), dim)
