"""Rows for primitives that are called again as they were, whatever arguments they have. Local tensors take the places
of the distributed ones. The shapes of the results are found by a call on small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mindspore import Tensor, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.basics.dtypes import FLOATS
from hyper_parallel.platform.mindspore.basics.private import no_grad
from hyper_parallel.platform.mindspore.op_table.binding import Bound, row
from hyper_parallel.platform.row_text import RowText

__all__ = ["Facts", "Given", "Native", "as_called", "call_native", "shapes_of", "told"]


@dataclass(frozen=True)
class _Held:
    """A tensor of sizes, dimensions and the like: no operand. Every rank has it, or a DTensor of it."""

    values: Any
    dtype: Any

    def tensor(self) -> Tensor:
        return Tensor(self.values, self.dtype)


class Given(NamedTuple):
    """A call taken apart.

    Attributes:
        func: the native function.
        operands: the arguments that are operands, in the order of the row's text; None for one that is not given.
        values: name -> value of the other arguments that the text names.
        places: the position or name of each operand.
        rest, named: the other arguments by position, and (name, value) of those by name; None where operands were.
    """

    func: Any
    operands: tuple
    values: dict[str, Any]
    places: tuple
    rest: tuple
    named: tuple

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Global shapes of the operands."""
        return tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in self.operands)


#: Gives the static arguments that the rule reads.
Facts = Callable[[Given], tuple]
#: ``native(func, args, kwargs, static_args)`` calls the primitive.
Native = Callable[[Any, list, dict, tuple], Any]

_NAMES = RowText({}, {})


def told(value: Any) -> Any:
    """A number, or several as a tuple, which may come in a tensor."""
    if isinstance(value, _Held):
        value = value.values
    return tuple(map(told, value)) if isinstance(value, (list, tuple)) else value


def _kept(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_kept, value))
    if isinstance(value, Tensor):
        values = value.asnumpy().tolist()
        return _Held(told(values), value.dtype)
    return value


def _given(value: Any) -> Any:
    """Return the value that `_kept` has kept."""
    if isinstance(value, tuple):
        return tuple(map(_given, value))
    return value.tensor() if isinstance(value, _Held) else value


def call_native(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    """The call as it came."""
    return func(*args, **kwargs)


def as_called(canonical: str, text: str, facts: Facts, native: Native = call_native) -> NativeOp:
    """A row of the canonical operation.

    Args:
        canonical: its name.
        text: the names of the arguments, as far as they matter, and after an arrow those that are operands: see
            `platform.row_text`. Other tensors among the arguments are numbers.
        facts: gives the static arguments that the rule reads.
        native: makes the call.
    """
    taken, _, made = text.partition("->")
    known = _NAMES.places(taken)
    names = [item.partition("/")[0] for item in taken.split()]
    numbers = [names.index(name) for name in made.split()]

    def bind(func: Any, args: tuple, kwargs: dict) -> Bound:
        given = _taken_apart(func, args, kwargs, known, names, numbers)
        return given.operands, (*facts(given), given.places, given.rest, given.named)

    def call(func: Any, operands: Sequence[Any], static_args: tuple) -> Any:
        return _placed(native, func, operands, static_args)

    return row(canonical, bind, call, by_function=True)


def _taken_apart(
    func: Any, args: tuple, kwargs: dict, known: dict[str, int], names: list[str], numbers: list[int]
) -> Given:
    operands: list[Any] = [None] * len(numbers)
    places: list[Any] = [None] * len(numbers)
    values: dict[str, Any] = {}
    rest: list[Any] = []
    named: dict[str, Any] = {}
    for place, x in (*enumerate(args), *kwargs.items()):
        number = place if isinstance(place, int) else known.get(place)
        kept = None
        if number in numbers and isinstance(x, Tensor):
            operands[numbers.index(number)], places[numbers.index(number)] = x, place
        else:
            kept = _kept(x)
            if number is not None and number < len(names):
                values[names[number]] = told(kept)
        if isinstance(place, int):
            rest.append(kept)
        else:
            named[place] = kept
    return Given(func, tuple(operands), values, tuple(places), tuple(rest), tuple(named.items()))


def _placed(native: Native, func: Any, operands: Sequence[Any], static_args: tuple) -> Any:
    """Make the call with the operands in their places."""
    places, rest, named = static_args[-3:]
    args, kwargs = [_given(x) for x in rest], {name: _given(x) for name, x in named}
    for place, x in zip(places, operands, strict=True):
        if place is not None:
            (args if isinstance(place, int) else kwargs)[place] = x
    return native(func, args, kwargs, static_args)


# -------------------------------------------------------------------- shapes of results
_FOUND: dict[tuple, Any] = {}
_MOST = 1 << 12


def shapes_of(
    given: Given, shapes: tuple, native: Native = call_native, facts: tuple = ()
) -> tuple[tuple[int, ...], ...] | None:
    """The shapes of the results of a call whose operands have ``shapes``, which should be small: the call is made once.
    None where MindSpore refuses it, as it then will the call itself, with a better message.

    Args:
        given: the call.
        shapes: of the operands, None for one that is not given.
        native: makes the call.
        facts: the arguments of ``native`` before the last three static ones.
    """
    which = given.func if hasattr(given.func, "prim") else given.func.name
    dtypes = tuple(x.dtype if isinstance(x, Tensor) else None for x in given.operands)
    key = (which, native, shapes, dtypes, given.places, given.rest, given.named, facts)
    if key not in _FOUND:
        if len(_FOUND) >= _MOST:
            _FOUND.clear()
        _FOUND[key] = _found(given, shapes, native, facts)
    return _FOUND[key]


def _found(given: Given, shapes: tuple, native: Native, facts: tuple) -> Any:
    with no_grad():
        stand_ins = [
            None if shape is None else _stand_in(shape, x.dtype)
            for shape, x in zip(shapes, given.operands, strict=True)
        ]
        try:
            static_args = (*facts, given.places, given.rest, given.named)
            results = _placed(native, given.func, stand_ins, static_args)
            results = results if isinstance(results, (tuple, list)) else (results,)
            return tuple(tuple(y.shape) for y in results)  # also waits for a kernel that fails
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None


def _stand_in(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Unit matrices, which have inverses and factors; zeros where numbers are places."""
    if dtype in FLOATS and len(shape) > 1 and 0 not in shape:
        return ops.broadcast_to(ops.eye(shape[-2], shape[-1], dtype), shape)
    return ops.zeros(shape, dtype)
