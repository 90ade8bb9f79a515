"""Tools for rows of the op table, which bring native calls into canonical form.

One text names the arguments of the native function, and which of them are operands or static arguments: see
`platform.row_text`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.row_text import (
    Bind,
    Bound,
    Call,
    RowText,
    UnboundCallError,
    call_again,
    call_by_position,
    dims_of,
    hashable,
    ints,
)
from hyper_parallel.platform.torch.basics.private import native_functions

__all__ = [
    "Bound",
    "Table",
    "UnboundCallError",
    "argument_numbers",
    "arguments",
    "autocast_dtype",
    "binds",
    "call_again",
    "call_by_position",
    "call_elementwise",
    "dims_of",
    "elementwise",
    "find",
    "global_shape",
    "hashable",
    "repeated",
    "rows",
    "sizes_of",
    "words",
]

Table = dict[Any, NativeOp]


def global_shape(x: Any) -> tuple[int, ...]:
    """Global shape of a distributed or plain tensor, whether dispatch is on or off."""
    layout = getattr(x, "_layout", None)
    return x.shape if layout is None else layout.shape


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(global_shape(x))


def _number(value: Any) -> Any:
    """A number, where neither a tensor nor nothing at all will do."""
    if value is None or isinstance(value, Tensor):
        raise UnboundCallError
    return value


def sizes_of(given: Any) -> tuple[int, ...]:
    """Sizes or dimensions as a tuple, also where they come as ``((2, 3),)``."""
    if isinstance(given[0] if isinstance(given, (tuple, list)) and given else given, torch.dtype):
        raise TypeError("a distributed tensor cannot be viewed as another dtype: use to_local(), or .to(dtype)")
    return ints(given)


def _number_of_classes(given: int) -> int:
    if given == -1:
        raise UnboundCallError  # it depends on the data
    return given


_TEXTS = RowText(
    #: Other spellings that torch accepts for an argument.
    {"input": "self x x1", "other": "x2", "dim": "axis", "dims": "dim axis axes", "keepdim": "keepdims"},
    {
        **dict.fromkeys(("keepdim", "is_causal"), bool),
        **dict.fromkeys(("repeats", "repeated_dim", "start"), _number),
        "dims": dims_of,
        "like": _shape,
        "normalized_shape": lambda shape: 1 if isinstance(shape, int) else len(shape),
        "num_classes": _number_of_classes,
        "sizes": sizes_of,
    },
)
arguments, binds, argument_numbers = _TEXTS.arguments, _TEXTS.binds, _TEXTS.places


def autocast_dtype(x: Any) -> torch.dtype | None:
    """The dtype in which autocast runs an operation on ``x`` that it wants in full precision, None for its own.

    For operations that core computes itself: autocast sees native ones only.
    """
    device = x.device.type
    if x.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(device):
        return torch.float32
    return None


def words(text: str) -> list[str]:
    """The words of a text: long lists of names read better without quotes."""
    return text.split()


def find(names: str, *owners: Any) -> list[Any]:
    """Every function of these names in ``owners`` (default: torch, its tensor methods, functional and special)."""
    found = []
    for name in names.split():
        for owner in owners or (torch, Tensor, F, torch.special, native_functions):
            function = getattr(owner, name, None)
            if callable(function) and function not in found:
                found.append(function)
    return found


def rows(names: str, canonical: str, bind: str | Bind, call: Call = call_by_position, *owners: Any) -> Table:
    """One row for all functions of these names.

    Args:
        names: the functions, as words, found in ``owners``: see `find`.
        canonical: the canonical operation.
        bind: as a text, or see `NativeOp`.
        call: see `NativeOp`.
        owners: where the functions are found.
    """
    return dict.fromkeys(find(names, *owners), NativeOp(canonical, arguments(bind), call))


def repeated(names: str, canonical: str, bind: str | Bind, *owners: Any) -> Table:
    """As `rows`, of functions of one operand that are called again as they were: their arguments differ too much."""
    return rows(names, canonical, _TEXTS.repeated(bind), call_again, *owners)


def call_elementwise(func: Any, operands: tuple, static_args: Any) -> Any:
    """Run an element-wise function on locals."""
    return func(*operands) if static_args is None else func(*operands, *static_args[0], **static_args[1])


def elementwise(names: str, canonical: str, operands: str, *owners: Any) -> Table:
    """One row for the element-wise functions of these names, whose first positional arguments are the operands."""
    count = len(operands.split())
    positions = _TEXTS.places(operands)

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        if not kwargs:
            return (args, None) if len(args) <= count else (args[:count], (args[count:], {}))
        if kwargs.get("out") is not None:
            raise UnboundCallError  # `handlers.unknown` copies the result there
        values, rest = list(args[:count]), dict(kwargs)
        for key in kwargs:
            i = positions.get(key)
            if i is not None:
                if i > len(values):
                    values += [None] * (i - len(values))
                values.insert(i, rest.pop(key))
        return tuple(values), (args[count:], rest)

    return rows(names, canonical, bind, call_elementwise, *owners)
