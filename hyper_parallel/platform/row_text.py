"""Rows of an op table as text: the arguments of a native call, and those of the canonical operation.

    "input other/mat2 dim=-1 -> input other | dim 1"

Before the arrow stand the arguments in the native order, with other spellings after a slash and the default after an
equals sign. A star before the last one, as in ``"input *sizes"``, lets it take the rest of ``f(x, 2, 3)`` or of
``f(x, (2, 3))``. After the arrow stand the operands, and after the bar the static arguments, in the order of the
canonical operation; a word that names no argument is a constant. Without an arrow, the first argument is the operand,
and the others are static.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Mapping
from typing import Any

__all__ = [
    "Bind",
    "Bound",
    "Call",
    "RowText",
    "UnboundCallError",
    "call_again",
    "call_by_position",
    "dims_of",
    "hashable",
    "ints",
]

#: Operands and static arguments.
Bound = tuple[tuple, Any]
#: `NativeOp.bind` and `NativeOp.call`.
Bind = Callable[[Any, tuple, dict], Bound]
Call = Callable[[Any, tuple, Any], Any]

_REQUIRED: Any = object()


class UnboundCallError(RuntimeError):
    """Raised by a ``bind`` whose row does not cover the arguments: the call then runs on gathered operands."""


def ints(given: Any) -> tuple[int, ...]:
    """Sizes or dimensions as a tuple of ints: a number, or several, as they come in ``f(2, 3)`` or ``f((2, 3))``.
    Tensors stand for the numbers in them.

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
    """One dimension or several as a tuple. None and an empty tuple give None, which means all dimensions."""
    return None if given is None else ints(given) or None


class RowText:
    """Reads the texts of one backend.

    Args:
        spellings: argument -> further names that the framework's functions have for it, as words.
        conversions: argument -> the function that converts its value.
        drops: whether arguments that a text does not name are left out, because they change nothing that is computed.
            Otherwise such a call is not covered by the row.
    """

    def __init__(
        self, spellings: Mapping[str, str], conversions: Mapping[str, Callable[[Any], Any]], drops: bool = False
    ) -> None:
        self._spellings, self._conversions, self._drops = spellings, conversions, drops

    def places(self, text: str) -> dict[str, int]:
        """Return the number of each argument that ``text`` names, by each of its spellings."""
        found: dict[str, int] = {}
        for i, item in enumerate(text.split()):
            names = item.partition("=")[0].lstrip("*").split("/")
            for name in (*names, *self._spellings.get(names[0], "").split()):
                found.setdefault(name, i)
        return found

    def signature(self, text: str) -> Callable[[tuple, dict], list[Any]]:
        """Make ``unpack(args, kwargs)``, which returns the values of the arguments that ``text`` names, in order.

        Raises (from ``unpack``):
            UnboundCallError: for arguments that are missing, or not named (TypeError where such are dropped).
        """
        items, places, drops = text.split(), self.places(text), self._drops
        names = _names(text)
        defaults = [literal_eval(item.partition("=")[2]) if "=" in item else _REQUIRED for item in items]
        conversions = [(i, self._conversions[name]) for i, name in enumerate(names) if name in self._conversions]
        starred = len(items) - 1 if items[-1].startswith("*") else None
        if starred is not None:
            defaults[starred] = ()
        total, needed = len(items), sum(value is _REQUIRED for value in defaults)

        def unpack(args: tuple, kwargs: dict) -> list[Any]:
            if starred is not None and len(args) > starred:
                args = (*args[:starred], args[starred:])
            given = len(args)
            if given > total and not drops:
                raise UnboundCallError(f"{given} arguments")
            values = [*args[:total], *defaults[given:]]
            for key, value in kwargs.items():
                i = places.get(key, starred if drops else None)
                if i is not None:
                    values[i] = value
                elif value is not None and not drops:
                    raise UnboundCallError(f"argument {key!r}")
            for name, value in zip(names[given:needed], values[given:needed], strict=True):
                if value is _REQUIRED:
                    raise (TypeError if drops else UnboundCallError)(f"argument {name!r} is missing")
            for i, convert in conversions:
                values[i] = convert(values[i])
            return values

        return unpack

    def binds(self, text: str) -> Callable[[Callable[..., Bound]], Bind]:
        """Make a ``bind`` of the decorated function of the arguments that ``text`` names, by position."""
        unpack = self.signature(text)
        return lambda arrange: lambda func, args, kwargs: arrange(*unpack(args, kwargs))

    def arguments(self, text: str | Bind) -> Bind:
        """Make the ``bind`` that a text declares; a function is one already."""
        if not isinstance(text, str):
            return text
        taken, arrow, made = text.partition("->")
        unpack, names = self.signature(taken), _names(taken)
        heads, tails = (part.split() for part in made.partition("|")[::2]) if arrow else (names[:1], names[1:])
        constants = [item for item in (*heads, *tails) if item not in names]
        places = [*names, *constants]
        operands, static_args = [places.index(item) for item in heads], [places.index(item) for item in tails]
        fixed = [literal_eval(item) for item in constants]

        def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
            values = unpack(args, kwargs) + fixed
            return tuple([values[i] for i in operands]), tuple([values[i] for i in static_args])

        return bind

    def repeated(self, text: str | Bind) -> Bind:
        """As `arguments`, of one operand, for `call_again`: the native call is made as it came. The static arguments
        end with the other arguments, by position and by name."""
        bind = self.arguments(text)

        def bind_all(func: Any, args: tuple, kwargs: dict) -> Bound:
            operands, static_args = bind(func, args, kwargs)
            named = tuple((name, hashable(value)) for name, value in kwargs.items() if value is not operands[0])
            return operands, (*static_args, hashable(args[1:]), named)

        return bind_all


def _names(text: str) -> list[str]:
    return [item.partition("=")[0].lstrip("*").partition("/")[0] for item in text.split()]


def hashable(value: Any) -> Any:
    """``value`` with lists turned into tuples."""
    return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value


def call_again(func: Any, operands: tuple, static_args: tuple) -> Any:
    """Repeat the native call with its original arguments: the ``call`` of `RowText.repeated`."""
    return func(operands[0], *static_args[-2], **dict(static_args[-1]))


def call_by_position(func: Any, operands: tuple, static_args: tuple) -> Any:
    """A ``call`` of the native function with the operands, then the static arguments."""
    return func(*operands, *static_args)
