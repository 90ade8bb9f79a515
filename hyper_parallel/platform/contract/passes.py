"""Backward passes: their beginning and end, their gradients, and memory that is freed between forward and backward.

Data parallelism asks here when to make parameters whole, when to free them, and when to accumulate gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["PassRole"]

Tensor = Any


class PassRole:
    """Facts about the backward passes of a framework, and the memory of tensors that these read."""

    def in_backward(self) -> bool:
        """Return whether a backward pass is running on this thread. A backend that cannot know answers False."""
        return False

    def backward_is_recorded(self) -> bool:
        """Return whether the computation of the running backward is recorded, for gradients of gradients. A backend
        that cannot know answers False."""
        return False

    def backward_pass(self) -> Any:
        """Return an object that stands for the backward pass on this thread. It is equal within one pass, and
        differs in a pass inside of another. Returns None outside, and in a backend that does not know when a pass
        ends."""
        return None

    def after_backward(self, callback: Callable[[], None]) -> None:
        """Have ``callback()`` called when the pass that `backward_pass` stands for is complete, before the caller of
        that pass continues. It is not called where the pass fails."""
        raise TypeError(
            f"{type(self).__name__} cannot tell when a backward pass ends: its `backward_pass` returns None"
        )

    #: Whether `before_backward` calls.
    tells_beginning: bool = False

    def before_backward(self, callback: Callable[[Callable[[Any], bool]], None]) -> None:
        """Have the bound method ``callback(runs)`` called at the beginning of each backward pass, inside of it, while
        its object lives. ``runs(ctx)`` says whether the pass will reach the function whose ``ctx`` it is: see
        `autograd_function`. Data parallelism gathers parameters in time with it. A backend that cannot know never
        calls it; features that need it are refused then."""
        return

    #: Whether backward adds gradients to those that tensors have (`TensorMembers.grad`, which can be set then), where a
    #: framework does not return them instead.
    accumulates_gradients: bool = False

    #: ``differentiates_again(module)``: whether backward will compute the module again and differentiate that by
    #: itself, by the parameters that it had when it was told to. None where a framework has no such thing. To fill in
    #: again the tensors that forward has kept is no such thing.
    differentiates_again: Callable[[Any], bool] | None = None

    #: Whether `free_storage` gives memory back. Where it does not, core keeps the tensors that it would have freed as
    #: long as a graph needs them, and neither verb is called.
    frees_storage: bool = False

    def free_storage(self, x: Tensor) -> None:
        """Give back the memory of ``x``, a plain tensor that is all of its storage. ``x``, its views and the
        tensors that autograd keeps of them stay the same objects. They are not read until `refill_storage`."""
        raise TypeError(f"{type(self).__name__} frees no storage, as its `frees_storage` says")

    def refill_storage(self, x: Tensor, pieces: Sequence[Tensor]) -> None:
        """Give ``x``, which is 1-D, memory again, if it was freed. Write the values there that `join` makes of
        ``pieces``, of its dtype. All views of it have these values, and to autograd nothing has changed. Called without
        gradients."""
        raise TypeError(f"{type(self).__name__} frees no storage, as its `frees_storage` says")
