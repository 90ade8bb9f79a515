"""Views and other changes of shape, concatenation and splitting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.torch.basics.private import native_functions
from hyper_parallel.platform.torch.op_table.binding import Table, call_by_position, rows

__all__ = ["table"]


def table() -> Table:
    """Return the op-table rows for all operations on shapes."""
    return {**_reshapes(), **_permutations(), **_sizes_one(), **_joins_and_splits(), **_diagonals(), **_reinterpreted()}


# -------------------------------------------------------------------------------------------------- diagonals, windows


def _diagonals() -> Table:
    def of_last(func: Any, operands: tuple, static_args: tuple) -> Any:
        return torch.diagonal(operands[0], *static_args)

    return {
        **rows("diagonal", "diagonal", "", call_by_position, torch, Tensor),
        **rows("diagonal", "diagonal", "x/A offset=0 dim1=-2 dim2=-1", of_last, torch.linalg),
        **rows("diag_embed", "diag_embed", "", call_by_position, torch, Tensor),
    }


def _reinterpreted() -> Table:
    return {
        **rows("unfold", "windows", "x dim/dimension size step", call_by_position, Tensor),
        **rows("view_as_real", "real_pairs", "", _call_view_as_real, torch),
        **rows("view_as_complex", "complex_pairs", "", _call_view_as_complex, torch),
    }


def _call_view_as_real(func: Any, operands: tuple, static_args: tuple) -> Any:
    pairs = torch.view_as_real(operands[0])
    if pairs.requires_grad and not pairs.numel():  # its backward reads strides of the cotangent even if that is empty
        pairs.register_hook(lambda g: g.clone(memory_format=torch.contiguous_format))
    return pairs


def _call_view_as_complex(func: Any, operands: tuple, static_args: tuple) -> Any:
    (x,) = operands
    if not x.numel():  # torch reads strides even of an empty tensor
        return torch.complex(x[..., 0], x[..., 1])
    return torch.view_as_complex(x)


def _by_numbers(kernel: Callable) -> Callable:
    """Return a ``call`` with sizes or dimensions as separate arguments, which torch parses faster than a tuple."""

    def call(func: Any, operands: tuple, static_args: tuple) -> Any:
        return kernel(operands[0], *static_args[0]) if static_args[0] else kernel(operands[0], ())

    return call


# ---------------------------------------------------------------------------------------------------- reshape


def _reshapes() -> Table:
    reshape, view = _by_numbers(Tensor.reshape), _by_numbers(Tensor.view)
    return {
        **rows("view", "view", "", view, Tensor),
        **rows("view_copy", "reshape_copy"),
        **rows("reshape", "reshape", "", reshape),
        **rows("view_as", "view", "like:", reshape),
        **rows("reshape_as", "reshape", "like:", reshape),
        **rows("flatten", "reshape", "flatten:", reshape),
        **rows("unflatten", "reshape", "unflatten:", reshape),
        **rows("ravel", "reshape", "x sizes:=(-1,)", reshape),
    }


# ---------------------------------------------------------------------------------------------------- permute


def _permutations() -> Table:
    permute = _by_numbers(Tensor.permute)

    def adjoint(func: Any, operands: tuple, static_args: tuple) -> Any:
        return operands[0].permute(static_args[0]).conj()

    return {
        **rows("permute", "permute", "", permute),
        **rows("transpose swapaxes swapdims", "permute", "transpose:", permute),
        **rows("movedim moveaxis", "permute", "movedim:", permute),
        **rows("t", "permute", "matrix:", permute),
        **rows("__get__", "permute", "last_two:", permute, Tensor.mT),
        **rows("__get__", "permute", "reversed:", permute, Tensor.T),
        **rows("__get__", "permute", "last_two:", adjoint, Tensor.mH),
        **rows("__get__", "permute", "matrix:", adjoint, Tensor.H),
        **rows("adjoint", "permute", "last_two:", adjoint),
    }


# ---------------------------------------------------------------------------------------------------- sizes of one


def _sizes_one() -> Table:
    return {
        **rows("unsqueeze", "unsqueeze"),
        **rows("squeeze", "squeeze", "x *removed/dim/axis=None", _call_squeeze),
        **rows("expand broadcast_to", "expand"),
        **rows("expand_as", "expand", "like:", lambda func, xs, static_args: xs[0].expand(*static_args)),
        **rows("repeat", "repeat"),
        **rows("tile", "repeat", "tile:"),
        **rows("repeat_interleave", "repeat_interleave", "x repeats repeated_dim/dim=None output_size=None"),
        **rows("pad", "pad", "pad:", _call_pad, F, native_functions),
    }


def _call_squeeze(func: Any, operands: tuple, static_args: tuple) -> Any:
    return Tensor.squeeze(operands[0]) if static_args[0] is None else Tensor.squeeze(operands[0], static_args[0])


def _call_pad(func: Any, operands: tuple, static_args: tuple) -> Any:
    pairs, mode, value, count = static_args
    flat = [n for pair in reversed(pairs) for n in pair]
    return F.pad(operands[0], flat[:count], mode, value)


# ---------------------------------------------------------------------------------------------------- cat and split


def _joins_and_splits() -> Table:
    return {
        **rows("cat concat concatenate", "cat", "xs/tensors dim=0", _call_cat, torch),
        **rows(
            "stack",
            "stack",
            "xs/tensors dim=0",
            lambda func, operands, static_args: func(operands, static_args[0]),
            torch,
        ),
        **rows("chunk", "chunk"),
        **rows("split split_with_sizes", "split", "x/tensor split_size dim=0"),
        **rows("unbind", "unbind"),
        **rows("narrow", "narrow"),
    }


def _call_cat(func: Any, operands: tuple, static_args: tuple) -> Any:
    if operands[0].dim() == 1 and any(x.shape == (0,) for x in operands):
        # Torch ignores such operands even if gradients of gradients reach them, which may need communication.
        return torch.cat([x.unsqueeze(0) for x in operands], 1)[0]
    return torch.cat(operands, static_args[0])
