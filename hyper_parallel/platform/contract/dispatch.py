"""A row of a backend's op table, and core's dispatcher, which runs native operations by such rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

__all__ = ["Bind", "Bound", "Call", "Dispatch", "Facts", "Given", "NativeOp", "UnboundCallError", "Words"]

#: Operands and static arguments of a canonical operation.
Bound = tuple[tuple, Any]
#: ``bind(func, args, kwargs)`` converts a native call to canonical form.
Bind = Callable[[Any, tuple, dict], Bound]
#: ``call(func, operands, static_args)`` runs the native operation on local tensors.
Call = Callable[[Any, tuple, Any], Any]


class UnboundCallError(RuntimeError):
    """Raised if a row does not cover the arguments of a call: the call then runs on gathered operands."""


class Given(NamedTuple):
    """A native call, split into operands and other arguments.

    Attributes:
        func: the native function.
        operands: arguments that are operands, in the order of the signature.
        values: name -> value of the other arguments that the row's text names.
        places: position or name of each operand in the call; None for an absent operand.
        rest, named: the other arguments by position, and (name, value) of those by name; None in place of operands.
        shapes: global shapes of the operands; None for an operand that is no tensor.
        behind: number of dimensions that the text names for each operand.
    """

    func: Any
    operands: tuple
    values: dict[str, Any]
    places: tuple
    rest: tuple
    named: tuple
    shapes: tuple[Any, ...]
    behind: tuple[int, ...]


#: Function that returns the static arguments that the rule reads.
Facts = Callable[[Given], tuple]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, eq=False)
class Words:
    """Conventions of a framework for the arguments of its functions; one object serves all rows of its table.

    Attributes:
        tensor: the framework's tensor class.
        spellings: argument of a signature -> alternative names in the framework's functions, separated by spaces.
        conversions: argument -> the function that converts its value, in addition to core's conversion or replacing it.
        drops: whether arguments that a row does not name are ignored, because they do not affect results. Otherwise the
            row does not cover such a call.
        kept: converts a non-operand argument to the form that static arguments store.
        told: returns the numbers in a form that ``kept`` has returned.
        number: returns the number in a tensor without dimensions, and any other value unchanged. It converts arguments
            that are not operands, before recipes are looked up by them. Every rank calls it: a DTensor may hold a
            partial sum, which it reduces.
    """

    tensor: type = object
    spellings: Mapping[str, str] = field(default_factory=dict)
    conversions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    drops: bool = False
    kept: Callable[[Any], Any] = _same
    told: Callable[[Any], Any] = _same
    number: Callable[[Any], Any] = _same


@dataclass(frozen=True, eq=False)
class NativeOp:
    """One row of a backend's op table: how a native operation maps to a canonical one.

    Attributes:
        name: the canonical operation (``"linear"``, ``"pointwise"``, ...); docs/rules.md lists them.
        takes: the arguments of the native function as text, in their order, where they differ from the operation's
            signature. For other cases, a function ``bind(func, args, kwargs) -> (operands, static_args)``. ``operands``
            is the tuple of tensor operands (tensors, Python scalars or ``None``). ``static_args`` is the tuple of the
            remaining arguments in the order of the signature; it must be hashable. For element-wise operations
            ``static_args`` may be any object: core passes it to `call` unread.
        call: ``call(func, operands, static_args) -> result`` runs the native operation on local tensors. The result is
            a tensor or a tuple or list of tensors.
        binds_by_function: whether `takes`, a function, may read ``func``. It must be False if a framework makes a new
            function object for each call, because calls are otherwise cached by function.
        varies: ``varies()`` returns whether a mode of the framework, such as autocast, affects the binding of a call.
            Such a call is not cached. None if no mode ever does.
        words: the framework's conventions for arguments.
        facts: returns the static arguments that the rule reads, for a call that runs again with local operands. None
            where the text gives them.
        adjust: ``adjust(func, operands, static_args)`` replaces the operands and static arguments that the text gives,
            or rejects them.
    """

    name: str
    takes: str | Bind
    call: Call
    binds_by_function: bool = True
    varies: Callable[[], bool] | None = None
    words: Words | None = None
    facts: Facts | None = None
    adjust: Callable[[Any, tuple, tuple], Bound] | None = None

    @property
    def in_place(self) -> bool:
        """Return whether the operation overwrites its first operand with its result, as its canonical name says."""
        return self.name.endswith("_")


class Dispatch(Protocol):
    """Core's dispatcher, which runs native operations that have a DTensor argument."""

    def __call__(self, op: NativeOp | None, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run ``func(*args, **kwargs)``. ``op`` is its row of the op table, or None if it has no row."""

    def bind(self, op: NativeOp | None) -> Callable[[Any, tuple, dict], Any]:
        """Return the dispatcher of one row, as ``run(func, args, kwargs)``."""

    def result_shapes(self, name: str, shapes: tuple, static_args: Any) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the results of a canonical operation, computed by its rule. ``shapes`` has None for an
        operand that is no tensor. Backends whose kernels fail for empty tensors use the shapes."""
