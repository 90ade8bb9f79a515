"""A row of a backend's op table, and core's dispatcher, which runs native operations by such rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

__all__ = ["Bind", "Bound", "Call", "Dispatch", "Facts", "Given", "NativeOp", "UnboundCallError", "Words"]

#: Operands and static arguments.
Bound = tuple[tuple, Any]
#: ``bind(func, args, kwargs)`` brings a native call into canonical form.
Bind = Callable[[Any, tuple, dict], Bound]
#: ``call(func, operands, static_args)`` runs the native operation on local tensors.
Call = Callable[[Any, tuple, Any], Any]


class UnboundCallError(RuntimeError):
    """Raised where a row does not cover the arguments of a call: the call then runs on gathered operands."""


class Given(NamedTuple):
    """A call taken apart.

    Attributes:
        func: the native function.
        operands: its arguments that are operands, in the order of the signature.
        values: name -> value of the other arguments that the text names.
        places: the position or name of each operand in the call; None for one that is not given.
        rest, named: the other arguments by position, and (name, value) of those by name; None where operands were.
        shapes: global shapes of the operands; None for one that is no tensor.
        behind: how many dimensions the text names for each operand.
    """

    func: Any
    operands: tuple
    values: dict[str, Any]
    places: tuple
    rest: tuple
    named: tuple
    shapes: tuple[Any, ...]
    behind: tuple[int, ...]


#: Gives the static arguments that the rule reads.
Facts = Callable[[Given], tuple]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, eq=False)
class Words:
    """How a framework words the arguments of its functions; one object serves all rows of its table.

    Attributes:
        tensor: the class of its tensors.
        spellings: argument of a signature -> further names that the framework's functions have for it, as words.
        conversions: argument -> the function that converts its value, besides or in place of core's.
        drops: whether arguments that a row does not name are left out, because they change nothing that is computed.
            Otherwise the row does not cover such a call.
        kept: gives the form in which an argument that is no operand can be kept in static arguments.
        told: gives the numbers that such a form stands for.
    """

    tensor: type = object
    spellings: Mapping[str, str] = field(default_factory=dict)
    conversions: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    drops: bool = False
    kept: Callable[[Any], Any] = _same
    told: Callable[[Any], Any] = _same


@dataclass(frozen=True, eq=False)
class NativeOp:
    """One row of a backend's op table: how a native operation maps to a canonical one.

    Attributes:
        name: the canonical operation (``"linear"``, ``"pointwise"``, ...); docs/rules.md lists them.
        takes: the arguments of the native function as text, in their order, where they are not those of the
            operation's signature. Or a function ``bind(func, args, kwargs) -> (operands, static_args)``, for what no
            text can say.
            ``operands`` is the tuple of tensor operands (tensors, Python scalars or ``None``), ``static_args`` the
            tuple of the remaining arguments in the order of the signature; it must be hashable.
            For element-wise operations ``static_args`` may be any object: it is handed to `call` and never looked at.
        call: ``call(func, operands, static_args) -> result`` runs the native operation on local tensors. The result is
            a tensor or a tuple or list of tensors.
        binds_by_function: whether `takes`, a function, may look at ``func``. False where it does not, as it must be
            where a framework makes a new function object for each call: calls are remembered under the function
            otherwise.
        varies: ``varies()`` is whether a mode of the framework, such as autocast, has a say in the binding of a call:
            then a call is not remembered. None where none ever has.
        words: how the framework words arguments.
        facts: gives the static arguments that the rule reads, of a call that is made again with local tensors in the
            places of the operands. None where the text gives them.
        adjust: ``adjust(func, operands, static_args)`` gives others in place of those that the text gives, or refuses
            them.
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
        """Return whether the operation writes its result over its first operand: its canonical name says so."""
        return self.name.endswith("_")


class Dispatch(Protocol):
    """Core's dispatcher, which runs native operations of which some argument is a DTensor."""

    def __call__(self, op: NativeOp | None, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run ``func(*args, **kwargs)``, of which ``op`` is the row of the op table, None when it has none."""

    def bind(self, op: NativeOp | None) -> Callable[[Any, tuple, dict], Any]:
        """Return the dispatch of one row, as ``run(func, args, kwargs)``."""

    def result_shapes(self, name: str, shapes: tuple, static_args: Any) -> tuple[tuple[int, ...], ...]:
        """Shapes of the results of a canonical operation, as its rule gives them. ``shapes`` has None for an operand
        that is no tensor. It serves backends whose kernels fail for tensors without elements."""
