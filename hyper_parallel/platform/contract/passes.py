"""Backward passes: start and end, gradients, and memory that is freed between forward and backward.

Data parallelism uses these verbs to time the all-gather of parameters, their freeing, and the accumulation of
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["PassRole", "PassServices"]

Tensor = Any
Layout = Any
Mesh = Any


class PassRole:
    """Facts about the backward passes of a framework, and the storage of tensors that these passes read."""

    def in_backward(self) -> bool:
        """Return whether a backward pass is running on this thread. A backend that cannot know answers False."""
        return False

    def backward_is_recorded(self) -> bool:
        """Return whether the running backward is itself recorded, for gradients of gradients. A backend that cannot
        know answers False."""
        return False

    def backward_pass(self) -> Any:
        """Return an object that identifies the backward pass on this thread. The object is equal within one pass, and
        differs in a nested pass. Returns None outside of backward, and in a backend that does not know when a pass
        ends."""
        return None

    def after_backward(self, callback: Callable[[], None], failed: Callable[[], None] = lambda: None) -> None:
        """Register ``callback()`` for the end of the pass that `backward_pass` identifies, before the caller of that
        pass continues. If the pass fails, ``failed()`` is called instead, before the caller gets the error."""
        raise TypeError(
            f"{type(self).__name__} cannot detect the end of a backward pass: its `backward_pass` returns None"
        )

    #: Whether `before_backward` ever calls its callback.
    tells_beginning: bool = False

    def before_backward(self, callback: Callable[[Callable[[Any], bool], Callable[[Any], bool]], None]) -> None:
        """Call the bound method ``callback(runs, leads)`` at the start of each backward pass, while its object lives.

        ``runs(ctx)`` returns whether the pass will reach the function with this ``ctx`` of `autograd_function`.
        ``leads(ctx)`` returns whether the graph of the pass contains that function. A pass to given inputs may stop
        before it. Data parallelism unshards parameters in the callback. A backend that does not see this start never
        calls it. Core then rejects features that need the callback.
        """
        return

    #: Whether backward accumulates gradients in `TensorMembers.grad`, which can be set then. Otherwise a framework
    #: returns gradients.
    accumulates_gradients: bool = False

    #: ``differentiates_again(module)``: whether backward will recompute the module and differentiate the recomputation
    #: itself. It then differentiates by the parameters that the module had when recomputation was requested. None where
    #: a framework has no such feature. Recomputing the tensors that forward saved does not count.
    differentiates_again: Callable[[Any], bool] | None = None

    #: Whether `free_storage` frees memory. Where it does not, core keeps unfreed tensors as long as a graph needs them,
    #: and calls neither verb.
    frees_storage: bool = False

    def free_storage(self, x: Tensor) -> None:
        """Free the memory of ``x``, a plain tensor that occupies its entire storage. ``x``, its views and the tensors
        that autograd saved of either stay the same objects. No code reads these tensors until `refill_storage`."""
        raise TypeError(f"{type(self).__name__} cannot free storage: its `frees_storage` is False")

    def refill_storage(self, x: Tensor, pieces: Sequence[Tensor]) -> None:
        """Allocate the freed memory of the 1-D ``x`` again, and write `join` of ``pieces`` into it. ``pieces`` have the
        dtype of ``x``. All views of ``x`` see these values, and autograd sees no change. Called without gradients."""
        raise TypeError(f"{type(self).__name__} cannot free storage: its `frees_storage` is False")


class PassServices(Protocol):
    """Services for a backend about the gradients of distributed tensors; a part of `Core`."""

    def to_owner(self, gradient: Tensor, layout: Layout) -> Tensor:
        """Convert the plain local gradient of a tensor with ``layout`` to the local tensor of the DTensor that users
        get. In gradients of gradients, a value computed from the result counts once. Interception is off.
        """

    def to_summands(self, gradient: Tensor, layout: Layout) -> Tensor:
        """Convert the local tensor of a user's gradient to the local gradient with which backward continues."""

    def for_user(self, gradient: Tensor, layout: Layout) -> Any:
        """Return a gradient as a new DTensor, which users may see.

        ``gradient`` is the local gradient of a tensor of ``layout``.
        """

    def as_cotangent(self, gradient: Any, layout: Layout, what: str) -> Any:
        """Redistribute a user's gradient to the placements of gradients of a tensor of ``layout``. Raises TypeError if
        the gradient is not distributed, and ValueError if its shape differs. Messages call the gradient ``what``."""

    def through_hook(self, hook: Callable[[Any], Any], gradient: Tensor, layout: Layout) -> Tensor | None:
        """Call a user's ``hook`` on the gradient of a tensor of ``layout`` as a DTensor. Returns the local gradient
        with which backward goes on, or None where the hook returns None."""

    def keep_gradient(self, x: Tensor, what: str) -> None:
        """Let later operations read the DTensor ``x`` itself, because the program asks for its gradient by ``what``.
        Raises ValueError on all ranks if an earlier operation has read past it."""

    def forget_history(self, x: Tensor) -> None:
        """Forget the tensors that the DTensor ``x`` was made from, after the framework detached or wrote ``x`` in
        place. Interception is off."""

    def failed_in_backward(self, error: Exception, meshes: Iterable[Mesh]) -> None:
        """Tell the other ranks of ``meshes`` that a backward pass raised ``error`` (`Platform.tell_of_failure`)."""

    def open_block(self) -> AbstractContextManager[Any] | None:
        """Return a nested `coalesce_gradients` block if the caller is inside such a block, else None."""
