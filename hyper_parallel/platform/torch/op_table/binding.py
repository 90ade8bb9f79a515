"""Rows of torch's op table: names of functions, and their arguments where they differ from the operation's signature.

`core.rules.signature` describes the language of these texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.arguments import (
    call_again,
    call_by_position,
    call_elementwise,
    dims_of,
    hashable,
    ints,
    placed,
)
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.contract.dispatch import Bind, Bound, Call, Facts, UnboundCallError, Words
from hyper_parallel.platform.torch.basics.private import native_functions

__all__ = [
    "WORDS",
    "Bound",
    "Table",
    "UnboundCallError",
    "as_called",
    "autocast_dtype",
    "call_again",
    "call_by_position",
    "call_placed",
    "dims_of",
    "elementwise",
    "find",
    "global_shape",
    "hashable",
    "number_in",
    "repeated",
    "rows",
    "sizes_of",
    "words",
]

Table = dict[Any, NativeOp]


def global_shape(x: Any) -> tuple[int, ...]:
    """Return the global shape of a distributed or plain tensor, whether dispatch is on or off."""
    layout = getattr(x, "_layout", None)
    return x.shape if layout is None else layout.shape


def number_in(value: Any) -> Any:
    """Return the number in a tensor without dimensions, any other value unchanged. See `Words.number`.

    A tensor that requires grad is returned too: torch refuses it in place of a number.
    """
    return value if not isinstance(value, Tensor) or value.dim() or value.requires_grad else value.item()


def _sizes_of_parts(size: Any) -> Any:
    """Return the size of each part, or the sizes of all parts."""
    size = number_in(size)
    return size if isinstance(size, int) else tuple(map(number_in, size))


def sizes_of(given: Any) -> tuple[int, ...]:
    """Return sizes or dimensions as a tuple, also for ``((2, 3),)``."""
    if isinstance(given[0] if isinstance(given, (tuple, list)) and given else given, torch.dtype):
        raise TypeError("a distributed tensor cannot be viewed as another dtype: use to_local(), or .to(dtype)")
    return ints(given)


def _number_of_classes(given: Any) -> Any:
    given = number_in(given)
    if given == -1:
        raise UnboundCallError  # it depends on the data
    return given


def _kept(x: Any) -> Any:
    """Return an argument in a hashable form, for the cache; raise UnboundCallError for a tensor with dimensions."""
    x = number_in(x)
    if isinstance(x, Tensor):
        raise UnboundCallError
    return tuple(map(_kept, x)) if isinstance(x, (list, tuple)) else x


WORDS = Words(
    tensor=Tensor,
    #: Other names that torch accepts for an argument.
    spellings={
        "x": "input self x1",
        "other": "x2",
        "dim": "axis",
        "dims": "dim axis axes",
        "keepdim": "keepdims",
        "like": "other",
        "sizes": "size shape dtype",
        "order": "dims",
        "tiles": "repeats dims",
        "split_size": "split_sizes split_size_or_sections",
        "dim0": "axis0",
        "dim1": "axis1",
    },
    conversions={
        # An older overload of std and var has ``unbiased`` in the position of dimensions.
        "dims": lambda dims: None if isinstance(dims, bool) else dims_of(dims),
        "num_classes": _number_of_classes,
        "removed": lambda dims: dims if dims is None else () if dims in ((), ((),)) else ints(dims),
        "sizes": sizes_of,
        "split_size": _sizes_of_parts,
    },
    kept=_kept,
    number=number_in,
)


def autocast_dtype(x: Any) -> torch.dtype | None:
    """Return the dtype in which autocast runs a full-precision operation on ``x``; None for the dtype of ``x``.

    Used for operations that core computes itself, because autocast sees native operations only.
    """
    device = x.device.type
    if x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(device):
        return torch.float32
    return None


def words(text: str) -> list[str]:
    """Split a text into words: long lists of names are easier to read without quotes."""
    return text.split()


def find(names: str, *owners: Any) -> list[Any]:
    """Return every function of these names in ``owners`` (default: torch, its tensor methods, functional and
    special)."""
    found = []
    for name in names.split():
        for owner in owners or (torch, Tensor, F, torch.special, native_functions):
            function = getattr(owner, name, None)
            if callable(function) and function not in found:
                found.append(function)
    return found


def rows(
    names: str,
    canonical: str,
    takes: str | Bind = "",
    call: Call = call_by_position,
    *owners: Any,
    adjust: Callable[[Any, tuple, tuple], Bound] | None = None,
) -> Table:
    """Return one op-table row for all functions of these names.

    Args:
        names: names of the functions, separated by spaces.
        canonical: the canonical operation.
        takes: their arguments, where they differ from the operation's signature: see `NativeOp`.
        call, adjust: see `NativeOp`.
        owners: modules and classes that `find` searches.
    """
    return dict.fromkeys(find(names, *owners), NativeOp(canonical, takes, call, words=WORDS, adjust=adjust))


def repeated(names: str, canonical: str, takes: str, *owners: Any) -> Table:
    """Return `rows` of functions that are called again with their original arguments, which differ too much from a
    signature."""
    return rows(names, canonical, f"{takes} ...", call_again, *owners)


def elementwise(names: str, canonical: str, operands: str, *owners: Any) -> Table:
    """Return one op-table row for element-wise functions of these names. Their first arguments are the operands."""
    return rows(names, canonical, operands, call_elementwise, *owners)


def call_placed(func: Any, operands: tuple, static_args: tuple) -> Any:
    """Repeat the native call with ``operands`` in place of the original operands. A ``call`` of `NativeOp`."""
    args, kwargs = placed(operands, static_args)
    return func(*args, **kwargs)


def as_called(names: str, canonical: str, takes: str, facts: Facts, *owners: Any) -> Table:
    """Return `rows` of functions that are called again with their original arguments, in which operands may be
    anywhere.

    Args:
        names, canonical, takes, owners: see `rows`.
        facts: returns the static arguments that the rule reads.
    """
    row = NativeOp(canonical, takes, call_placed, words=WORDS, facts=facts)
    return dict.fromkeys(find(names, *owners), row)
