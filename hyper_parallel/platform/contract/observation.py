"""Watching a program: the modules that run, and the collectives that it issues by itself. For `CommDebugMode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from hyper_parallel.platform.contract.dispatch import NativeOp

__all__ = ["MARKS", "Follower", "ObservationRole", "Observer", "StepWatcher"]

#: Attribute of a plain tensor: the marks that core has put there: the parts that ranks hold.
MARKS = "_marks_of_plain"

Module = Any
Tensor = Any


class Observer(Protocol):
    """Receiver of the events of a program. It is called with interception as it is there."""

    def before_module(self, module: Module) -> None:
        """The forward of a module begins."""

    def after_module(self, module: Module) -> None:
        """Note that the module has ended, perhaps with an exception."""

    def backward_of(self, module: Module) -> None:
        """Backward has come to the outputs of a module."""

    def backward_before(self, module: Module) -> None:
        """Backward has reached the operation that computed the inputs of ``module``."""

    def collective(self, kind: str, tensors: list[Tensor]) -> None:
        """The program issues a collective by itself, on plain tensors or on the local tensors of DTensors.

        Args:
            kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``,
                ``"scatter"``, ``"gather"`` or ``"reduce"``.
            tensors: that this rank gives.
        """


class Follower(Protocol):
    """Receiver of the operations of a program on plain tensors.

    Attributes:
        paused: above 0, operations are none of the program's own, and are not handed over.
    """

    paused: int

    def operation(self, op: NativeOp | None, func: Any, args: tuple, kwargs: dict, call: Callable[[], Any]) -> Any:
        """Run an operation of which some argument has `MARKS`; returns the result.

        Args:
            op: its row of the op table, None for an operation without one.
            func, args, kwargs: the native call, for the row.
            call: runs it.
        """


class StepWatcher(Protocol):
    """Receiver of the steps of a program, from `ObservationRole.watch_steps`."""

    def called(self, module: Module) -> None:
        """The forward of a module begins."""

    def steps(self, optimizer: Any, gradients: Sequence[Tensor] | None) -> None:
        """A step of an optimizer begins.

        Args:
            optimizer: as `StateRole.is_optimizer` knows it.
            gradients: that it is called with, for each of its parameters. None where parameters hold their gradients.
        """

    def stepped(self, optimizer: Any) -> None:
        """The step has ended."""


class ObservationRole:
    """Events of the program around core that a backend can report."""

    def observe(self, observer: Observer) -> AbstractContextManager[Any]:
        """Inside, ``observer`` is told of modules and collectives. Collectives that this backend issues for core are
        left out: core knows those. It must not change computations or communication. A backend that sees neither tells
        nothing."""
        return nullcontext()

    def watch_steps(self, watcher: StepWatcher, calls: bool) -> AbstractContextManager[Any]:
        """Inside, ``watcher`` is told of steps of optimizers, and of calls of modules if it asks for ``calls``. It must
        not change computations or communication. A backend that sees neither tells nothing."""
        return nullcontext()

    def on_gradient(self, x: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Have ``tell(cotangent)`` called in backward when the cotangent of ``x``, which requires a gradient, is there.
        The graph stays as it is. Called with interception off: of a DTensor the local tensor is meant. A backend that
        cannot do so tells nothing."""
        return

    def around_calls(
        self, module: Module, before: Callable[[Module], None], after: Callable[[Module, Any], None]
    ) -> Callable[[], None]:
        """Call ``before(module)`` and ``after(module, output)`` around each eager call of ``module``. Of a call that
        fails the output is None. Compilers see neither, and copies of the module have neither. Returns a function that
        takes both away, which ``after`` may call. A backend that cannot `follow` programs need not call them."""
        return lambda: None

    def profiler_range(self, name: str) -> Callable[[], None] | None:
        """Begin a range that the framework's profiler, or the device's, shows under ``name``. Returns the function that
        ends it; several ranges may end in any order. None, having done nothing, where there is no such thing."""
        return None

    def collective_kind(self, native: Any) -> str | None:
        """Return core's name of the collective that an operation of the framework is, such as ``"all_gather"``.
        Other operations give None. Users of the framework count by its operations."""
        return None

    def is_collective(self, native: Any) -> bool:
        """Return whether a function, or an operation, of the framework communicates."""
        return self.collective_kind(native) is not None

    def is_made_with(self, x: Tensor, parameter: Tensor) -> bool | None:
        """Return whether the recorded operations that have led to the plain tensor ``x`` lead back to ``parameter``:
        None where nothing is recorded of ``x``. A backend that cannot know answers None.
        """
        return None

    def follow(self, follower: Follower) -> AbstractContextManager[Any] | None:
        """Inside, each operation on plain tensors of which some argument has marks goes to ``follower``. Functions that
        are made of others may hand over these instead. Numbers do not change. None in a backend that cannot do so, and
        inside of code that is compiled."""
        return None

    def write_mark(self, x: Tensor, mark: Any) -> None:
        """Put ``mark`` on a plain tensor, as the attribute `MARKS`; None takes it away. Called inside `follow`."""
        x._marks_of_plain = mark

    def base_of(self, x: Tensor) -> Tensor | None:
        """The tensor of which ``x`` is a view, None where it is none. A backend that cannot know answers None."""
        return None
