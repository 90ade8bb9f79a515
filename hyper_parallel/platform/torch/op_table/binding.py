"""Tools for rows of the op table, which bring native calls into canonical form.

A row says in one text what the native function takes, and what of it are operands and static arguments::

    "input other/mat2 dim=-1 -> input other | dim 1"

Before the arrow stand the arguments in order, with other spellings after a slash and the default after an equals sign.
A star, as in ``"input *dims"``, takes what is left of ``f(x, 2, 3)`` or ``f(x, (2, 3))``. After the arrow stand the
operands, and after the bar the static arguments; what is no argument is a constant.
"""

from __future__ import annotations

import functools
from ast import literal_eval
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.private import native_functions

__all__ = [
    "Bound",
    "Table",
    "UnboundCallError",
    "arguments",
    "autocast_dtype",
    "binds",
    "call_by_position",
    "call_elementwise",
    "elementwise",
    "find",
    "global_shape",
    "number",
    "one",
    "rows",
    "signature",
    "sizes",
    "to_dims",
    "words",
]

Table = dict[Any, NativeOp]
#: Operands and static arguments.
Bound = tuple[tuple, Any]
Bind = Callable[[Any, tuple, dict], Bound]
Call = Callable[[Any, tuple, Any], Any]

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


class UnboundCallError(RuntimeError):
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


def one(value: Any) -> tuple[Any]:
    """A tuple of one value."""
    return (value,)


def number(value: Any) -> Any:
    """A number, where neither a tensor nor nothing at all will do."""
    if value is None or isinstance(value, Tensor):
        raise UnboundCallError
    return value


def sizes(given: Any) -> tuple[int, ...]:
    """Sizes or dimensions as a tuple, also where they come as ``((2, 3),)``."""
    if isinstance(given, int):
        return (given,)
    if isinstance(given, (tuple, list)) and len(given) == 1 and not isinstance(given[0], int):
        (given,) = given
    if isinstance(given, torch.dtype):
        raise TypeError("a distributed tensor cannot be viewed as another dtype: use to_local(), or .to(dtype)")
    return tuple(given)


def _spellings(text: str) -> list[list[str]]:
    return [item.partition("=")[0].lstrip("*").split("/") for item in text.split()]


@functools.cache
def signature(text: str) -> Callable[[tuple, dict], list[Any]]:
    """Make ``unpack(args, kwargs)`` that returns the values of the arguments that ``text`` names, in order.

    Raises (from ``unpack``):
        UnboundCallError: for arguments that are missing or not named.
    """
    items = text.split()
    index = {spelling: i for i, spellings in enumerate(_spellings(text)) for spelling in spellings}
    defaults = [literal_eval(item.partition("=")[2]) if "=" in item else _REQUIRED for item in items]
    starred = len(items) - 1 if items[-1].startswith("*") else None
    if starred is not None:
        defaults[starred] = ()
    total, needed = len(items), sum(value is _REQUIRED for value in defaults)

    def unpack(args: tuple, kwargs: dict) -> list[Any]:
        if starred is not None and len(args) > starred:
            args = (*args[:starred], args[starred:])
        given = len(args)
        if given > total:
            raise UnboundCallError
        values = [*args, *defaults[given:]]
        for key, value in kwargs.items():
            i = index.get(key, index.get(_SYNONYMS.get(key, key)))
            if i is not None:
                values[i] = value
            elif value is not None:
                raise UnboundCallError
        if starred is not None:
            values[starred] = sizes(values[starred])
        if given < needed and any(v is _REQUIRED for v in values[given:needed]):
            raise UnboundCallError
        return values

    return unpack


def binds(text: str) -> Callable[[Callable[..., Bound]], Bind]:
    """Make ``bind`` of a row from the decorated function of the arguments that ``text`` names, by position."""
    unpack = signature(text)
    return lambda arrange: lambda func, args, kwargs: arrange(*unpack(args, kwargs))


def arguments(text: str, **convert: Callable[[Any], Any]) -> Bind:
    """Make ``bind`` of a row from a text (see above); ``convert`` has what is done to the arguments of these names."""
    taken, _, made = text.partition("->")
    unpack, names = signature(taken), [spellings[0] for spellings in _spellings(taken)]
    heads, tails = ([*part.split()] for part in made.partition("|")[::2])
    constants = [item for item in tails if item not in names]
    places = [*names, *constants]
    operands, static_args = [places.index(item) for item in heads], [places.index(item) for item in tails]
    fixed = [literal_eval(item) for item in constants]
    converted = [(names.index(name), function) for name, function in convert.items()]

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        values = unpack(args, kwargs)
        for i, function in converted:
            values[i] = function(values[i])
        values += fixed
        return tuple([values[i] for i in operands]), tuple([values[i] for i in static_args])

    return bind


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


def call_by_position(func: Any, operands: tuple, static_args: tuple) -> Any:
    """Run a function on locals: operands, then static arguments."""
    return func(*operands, *static_args)


def rows(
    names: str,
    canonical: str,
    bind: str | Bind,
    call: Call = call_by_position,
    *owners: Any,
    **convert: Callable[[Any], Any],
) -> Table:
    """One row for all functions of these names.

    Args:
        names: the functions, as words, found in ``owners``: see `find`.
        canonical: the canonical operation.
        bind: as a text, or see `NativeOp`.
        call: see `NativeOp`; without it: the function, with operands, then static arguments, by position.
        owners: where the functions are found.
        convert: of a text, what is done to the arguments of these names.
    """
    made = arguments(bind, **convert) if isinstance(bind, str) else bind
    return dict.fromkeys(find(names, *owners), NativeOp(canonical, made, call))


def call_elementwise(func: Any, operands: tuple, static_args: Any) -> Any:
    """Run an element-wise function on locals."""
    return func(*operands) if static_args is None else func(*operands, *static_args[0], **static_args[1])


def elementwise(names: str, canonical: str, operands: str, *owners: Any) -> Table:
    """One row for the element-wise functions of these names, whose first positional arguments are the operands."""
    count = len(operands.split())
    positions = {operand: i for i, operand in enumerate(operands.split())}

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        if not kwargs:
            return (args, None) if len(args) <= count else (args[:count], (args[count:], {}))
        if kwargs.get("out") is not None:
            raise UnboundCallError  # `handlers.unknown` copies the result there
        values, rest = list(args[:count]), dict(kwargs)
        for key in kwargs:
            i = positions.get(_SYNONYMS.get(key, key))
            if i is not None:
                if i > len(values):
                    values += [None] * (i - len(values))
                values.insert(i, rest.pop(key))
        return tuple(values), (args[count:], rest)

    return rows(names, canonical, bind, call_elementwise, *owners)
