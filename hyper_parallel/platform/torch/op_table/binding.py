"""Helpers that bring native calls into canonical form: argument names, defaults, and rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.private import native_functions

__all__ = [
    "Table",
    "UnboundCallError",
    "autocast_dtype",
    "elementwise",
    "find",
    "global_shape",
    "leave_out",
    "signature",
    "to_dims",
    "words",
]

Table = dict[Any, NativeOp]
Bind = Callable[[Any, tuple, dict], tuple[tuple, Any]]

#: Other spellings that torch accepts for an argument.
_SYNONYMS = {
    "self": "input",
    "x": "input",
    "x1": "input",
    "x2": "other",
    "axis": "dim",
    "axes": "dims",
    "keepdims": "keepdim",
}
_REQUIRED: Any = object()


class UnboundCallError(Exception):
    """Raised by a bind whose row does not cover the arguments: the call then runs on gathered operands."""


def global_shape(x: Any) -> tuple[int, ...]:
    """Global shape of a distributed or plain tensor, whether dispatch is on or off."""
    layout = getattr(x, "_layout", None)
    return x.shape if layout is None else layout.shape


def to_dims(dim: Any) -> tuple[int, ...] | None:
    """One dimension, several, or none at all (all of them) as a tuple or None."""
    if dim is None:
        return None
    if isinstance(dim, int):
        return (dim,)
    return tuple(dim) or None


def leave_out(kwargs: dict) -> None:
    """Leave a call with ``out=`` to `handlers.unknown`, which copies the result there.

    Raises:
        UnboundCallError: when ``out`` is given.
    """
    if kwargs.get("out") is not None:
        raise UnboundCallError


def signature(*required: str, **defaults: Any) -> Callable[[Any, tuple, dict], list[Any]]:
    """Make ``unpack(func, args, kwargs)`` that returns the values of the named arguments in order.

    Raises (from ``unpack``):
        UnboundCallError: for arguments that are missing or not named here.
    """
    names = (*required, *defaults)
    values_by_default = [_REQUIRED] * len(required) + list(defaults.values())
    index = {name: i for i, name in enumerate(names)}
    total, needed = len(names), len(required)

    def unpack(func: Any, args: tuple, kwargs: dict) -> list[Any]:
        given = len(args)
        if given > total:
            raise UnboundCallError
        values = [*args, *values_by_default[given:]]
        for key, value in kwargs.items():
            i = index.get(_SYNONYMS.get(key, key))
            if i is None:
                i = index.get(key)
            if i is None:
                if value is None:
                    continue
                raise UnboundCallError
            values[i] = value
        if given < needed and any(v is _REQUIRED for v in values[given:needed]):
            raise UnboundCallError
        return values

    return unpack


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


def find(names: Iterable[str], *owners: Any) -> list[Any]:
    """Every function of these names in ``owners`` (default: torch, its tensor methods, functional and special)."""
    found = []
    for name in names:
        for owner in owners or (torch, torch.Tensor, F, torch.special, native_functions):
            function = getattr(owner, name, None)
            if function is not None and function not in found:
                found.append(function)
    return found


def call_elementwise(func: Any, operands: tuple, statics: Any) -> Any:
    """Run an element-wise function on locals."""
    return func(*operands) if statics is None else func(*operands, *statics[0], **statics[1])


def elementwise(name: str, *operands: str, call: Callable[..., Any] = call_elementwise) -> NativeOp:
    """Row of an element-wise operation whose first positional arguments are the named tensor operands."""
    count = len(operands)
    positions = {operand: i for i, operand in enumerate(operands)}

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
        if not kwargs:
            return (args, None) if len(args) <= count else (args[:count], (args[count:], {}))
        leave_out(kwargs)
        values, rest = list(args[:count]), dict(kwargs)
        for key in kwargs:
            i = positions.get(_SYNONYMS.get(key, key))
            if i is not None:
                if i > len(values):
                    values += [None] * (i - len(values))
                values.insert(i, rest.pop(key))
        return tuple(values), (args[count:], rest)

    return NativeOp(name, bind, call)
