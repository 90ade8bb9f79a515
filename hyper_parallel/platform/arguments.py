"""Conversion of arguments, and repeated native calls, for the op tables of all backends and for
`core.operations.binding`.

This module names no framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "call_again",
    "call_by_position",
    "call_elementwise",
    "dims_of",
    "hashable",
    "ints",
    "placed",
]


def ints(given: Any) -> tuple[int, ...]:
    """Return sizes or dimensions as a tuple of ints. The input is a number, or several numbers as in ``f(2, 3)`` or
    ``f((2, 3))``. A tensor is replaced by its values.

    Example:
        >>> ints((2, 3)), ints(([2, 3],)), ints(2)
        ((2, 3), (2, 3), (2,))
    """
    if isinstance(given, (tuple, list)) and len(given) == 1:
        (given,) = given
    if hasattr(given, "tolist"):
        given = given.tolist()
    return tuple(int(v) for v in given) if isinstance(given, (tuple, list)) else (int(given),)


def dims_of(given: Any) -> tuple[int, ...] | None:
    """Return one dimension or several as a tuple. None and an empty tuple give None, which means all dimensions."""
    return None if given is None else ints(given) or None


def hashable(value: Any) -> Any:
    """Return ``value`` with lists turned into tuples."""
    return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value


def call_by_position(func: Any, operands: tuple, static_args: tuple) -> Any:
    """Call the native function with the operands, followed by the static arguments. This is a ``call`` of
    `NativeOp`."""
    return func(*operands, *static_args)


def call_again(func: Any, operands: tuple, static_args: tuple) -> Any:
    """Repeat the native call with its original arguments and new operands, for op-table texts that end in ``...``.

    This is a ``call`` of `NativeOp`. The static arguments end with the remaining arguments, by position and by name.
    """
    return func(*operands, *static_args[-2], **dict(static_args[-1]))


def call_elementwise(func: Any, operands: tuple, static_args: Any) -> Any:
    """Run an element-wise function with new operands and its other original arguments. It is a ``call`` of
    `NativeOp`."""
    return func(*operands) if static_args is None else func(*operands, *static_args[0], **dict(static_args[1]))


def placed(operands: Sequence[Any], static_args: tuple) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of an original call, with new ``operands`` inserted.

    The last three static arguments are the places of the operands, and all other arguments by position and name
    (`Given`).
    """
    places, rest, named = static_args[-3:]
    args, kwargs = [*rest], dict(named)
    for place, x in zip(places, operands, strict=True):
        if place is not None:
            (args if isinstance(place, int) else kwargs)[place] = x
    return args, kwargs
