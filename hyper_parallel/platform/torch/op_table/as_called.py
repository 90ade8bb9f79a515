"""Rows for functions that are called again as they were, whatever arguments they have. Local tensors take the places of
the distributed ones. The shapes of the results come from torch, on tensors without data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import (
    Bound,
    Table,
    UnboundCallError,
    argument_numbers,
    find,
    global_shape,
)

__all__ = ["Given", "as_called", "result_shapes"]


class Given(NamedTuple):
    """A call taken apart.

    Attributes:
        func: the native function.
        operands: its arguments that are tensors, in the order of its signature.
        numbers: the number of each in the signature.
        values: number -> value of the arguments that are no tensors.
        places: the position or name of each operand.
        rest, named: the other arguments by position, and (name, value) of those by name; None where tensors were.
    """

    func: Any
    operands: tuple
    numbers: tuple
    values: dict[int, Any]
    places: tuple
    rest: tuple
    named: tuple

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Global shapes of the operands."""
        return tuple(tuple(global_shape(x)) for x in self.operands)

    def need(self, *numbers: int) -> None:
        """Raise UnboundCallError where the operands are not the arguments of these numbers."""
        if self.numbers != numbers:
            raise UnboundCallError


def _taken_apart(func: Any, args: tuple, kwargs: dict, known: dict[str, int]) -> Given:
    if kwargs.get("out") is not None:
        raise UnboundCallError  # `handlers.unknown` copies the result there
    tensors: list[tuple] = []
    values: dict[int, Any] = {}
    for place, x in (*enumerate(args), *kwargs.items()):
        number = place if isinstance(place, int) else known.get(place)
        if isinstance(x, Tensor):
            if number is None:
                raise UnboundCallError
            tensors.append((number, place, x))
        elif number is not None:
            values[number] = x
    tensors.sort(key=lambda found: found[0])
    numbers, places, operands = zip(*tensors, strict=True)
    rest = tuple(map(_value, args))
    named = tuple((name, _value(x)) for name, x in kwargs.items())
    return Given(func, operands, numbers, values, places, rest, named)


def _value(x: Any) -> Any:
    """Return a form of an argument that can be kept: nothing of a tensor."""
    if isinstance(x, (list, tuple)):
        if any(isinstance(y, Tensor) for y in x):
            raise UnboundCallError
        return tuple(map(_value, x))
    return None if isinstance(x, Tensor) else x


def _call(func: Any, operands: tuple, static_args: tuple) -> Any:
    places, rest, named = static_args[-3:]
    args, kwargs = list(rest), dict(named)
    for place, x in zip(places, operands, strict=True):
        (args if isinstance(place, int) else kwargs)[place] = x
    return func(*args, **kwargs)


def as_called(names: str, canonical: str, taken: str, facts: Callable[[Given], tuple], *owners: Any) -> Table:
    """Rows whose operands are the tensors among the arguments.

    Args:
        names: the functions, as words, found in ``owners``: see `binding.find`.
        canonical: the canonical operation.
        taken: names of the arguments, as in the text of a row.
        facts: gives the static arguments that the rule reads.
        owners: where the functions are found.
    """
    known = argument_numbers(taken)

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        given = _taken_apart(func, args, kwargs, known)
        return given.operands, (*facts(given), given.places, given.rest, given.named)

    return dict.fromkeys(find(names, *owners), NativeOp(canonical, bind, _call))


def result_shapes(given: Given, shapes: tuple) -> tuple[tuple[int, ...], ...]:
    """The shapes of the results of a call whose operands have ``shapes``.

    Raises:
        UnboundCallError: when torch does not tell them, or refuses the call: it then has the better message.
    """
    found = _found(given.func, shapes, tuple(x.dtype for x in given.operands), given.places, given.rest, given.named)
    if found is None:
        raise UnboundCallError
    return found


@functools.lru_cache(1 << 12)
def _found(func: Any, shapes: tuple, dtypes: tuple, *static_args: Any) -> tuple | None:
    with no_dispatch(), torch.no_grad():
        stand_ins = [torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True)]
        try:
            results = _call(func, tuple(stand_ins), static_args)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None
    return tuple(tuple(y.shape) for y in (results if isinstance(results, (tuple, list)) else (results,)))
