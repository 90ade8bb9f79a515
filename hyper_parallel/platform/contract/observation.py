"""Observation of a program: modules that run, and collectives that the program issues itself. For `CommDebugMode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from hyper_parallel.platform.contract.dispatch import NativeOp

__all__ = ["MARKS", "Follower", "ObservationRole", "Observer", "StepWatcher"]

#: Attribute of a plain tensor with the marks that core has put there: the shards that ranks hold.
MARKS = "_marks_of_plain"

Module = Any
Tensor = Any


class Observer(Protocol):
    """Receiver of the events of a program. It is called in the interception mode of the observed code."""

    def before_module(self, module: Module) -> None:
        """Note that the forward of a module starts."""

    def after_module(self, module: Module) -> None:
        """Note that the module has ended, perhaps with an exception."""

    def backward_of(self, module: Module) -> None:
        """Note that backward has reached the outputs of a module."""

    def backward_before(self, module: Module) -> None:
        """Note that backward has reached the operation that computed the inputs of ``module``."""

    def collective(self, kind: str, tensors: list[Tensor]) -> None:
        """Note a collective that the program issues itself, on plain tensors or on the local tensors of DTensors.

        Args:
            kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"broadcast"``,
                ``"scatter"``, ``"gather"`` or ``"reduce"``.
            tensors: operands of this rank.
        """


class Follower(Protocol):
    """Receiver of the operations of a program on plain tensors.

    Attributes:
        paused: above 0, operations are not the program's own, and are not reported.
    """

    paused: int

    def operation(self, op: NativeOp | None, func: Any, args: tuple, kwargs: dict, call: Callable[[], Any]) -> Any:
        """Run an operation that has an argument with `MARKS`, and return the result.

        Args:
            op: row of the op table, None for an operation without row.
            func, args, kwargs: the native call, for the row.
            call: runs the native call.
        """

    def sizes(self, x: Tensor, given: Sequence[int]) -> tuple[int, ...]:
        """Return the shape ``given`` of a tensor with `MARKS`, for the program that reads it. The returned numbers are
        equal to ``given``, but their arithmetic keeps track of the full tensor's shape."""


class StepWatcher(Protocol):
    """Receiver of the steps of a program, from `ObservationRole.watch_steps`."""

    def called(self, module: Module) -> None:
        """Note that the forward of a module starts."""

    def steps(self, optimizer: Any, gradients: Sequence[Tensor] | None) -> None:
        """Note that a step of an optimizer starts.

        Args:
            optimizer: object for which `StateRole.is_optimizer` is True.
            gradients: arguments of the step, a gradient for each parameter. None where parameters hold their gradients.
        """

    def stepped(self, optimizer: Any) -> None:
        """Note that the step of the optimizer has ended."""


class ObservationRole:
    """Events of the program outside core that a backend can report."""

    def observe(self, observer: Observer) -> AbstractContextManager[Any]:
        """Return a context that reports modules and collectives to ``observer``. Collectives that this backend issues
        for core are omitted: core knows these collectives. The context must not change computations or communication. A
        backend that sees no such events reports none."""
        return nullcontext()

    def watch_steps(self, watcher: StepWatcher, calls: bool) -> AbstractContextManager[Any]:
        """Return a context that reports optimizer steps to ``watcher``, and module calls if ``calls`` is True. The
        context must not change computations or communication. A backend that sees no such events reports none."""
        return nullcontext()

    def on_gradient(self, x: Tensor, tell: Callable[[Tensor], None]) -> None:
        """Let backward call ``tell(cotangent)`` when the cotangent of ``x``, which requires a gradient, is complete.
        The graph does not change. Called with interception off: for a DTensor, ``x`` is the local tensor. A backend
        that cannot observe cotangents never calls ``tell``."""
        return

    def around_calls(
        self, module: Module, before: Callable[[Module, Any], None], after: Callable[[Module, Any], None]
    ) -> Callable[[], None]:
        """Call ``before(module, (args, kwargs))`` and ``after(module, output)`` around each eager call of ``module``.
        The output is None if the call fails. Compilers do not see the two functions, and copies of the module do not
        have them. Returns a function that removes both; ``after`` may call it. A backend that cannot `follow` programs
        need not call them."""
        return lambda: None

    def profiler_range(self, name: str) -> Callable[[], None] | None:
        """Start a range that the framework's profiler, or the device's, shows under ``name``. Returns the function
        that ends the range; several ranges may end in any order. Returns None where there is no profiler, and does
        nothing."""
        return None

    def collective_kind(self, native: Any) -> str | None:
        """Return core's name of the collective for an operation of the framework, such as ``"all_gather"``. Returns
        None for other operations. Users of the framework count collectives by its operations."""
        return None

    def is_collective(self, native: Any) -> bool:
        """Return whether a function, or an operation, of the framework communicates."""
        return self.collective_kind(native) is not None

    def is_made_with(self, x: Tensor, parameter: Tensor) -> bool | None:
        """Return whether the recorded graph of the plain tensor ``x`` leads back to ``parameter``. The class of
        parameters stands for any parameter. None if ``x`` has no recorded graph, or the backend cannot know."""
        return None

    def follow(self, follower: Follower) -> AbstractContextManager[Any] | None:
        """Return a context that passes each operation on plain tensors with a marked argument to ``follower``. For a
        function that is composed of operations, ``follower`` may get these operations instead. Results do not change.
        The program reads the shapes of marked tensors from `Follower.sizes`. None if the backend cannot follow
        operations, or the code is being compiled."""
        return None

    def write_mark(self, x: Tensor, mark: Any) -> None:
        """Set the attribute `MARKS` of a plain tensor to ``mark``; None removes it. Called inside `follow`."""
        x._marks_of_plain = mark

    def base_of(self, x: Tensor) -> Tensor | None:
        """Return the base of the view ``x``, None if ``x`` is no view. A backend that cannot know answers None."""
        return None
