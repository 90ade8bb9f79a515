"""Gradients: one way to define a function with its own backward, and tensors that share data but not history."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

__all__ = ["BACKWARD_WRAPPERS", "AutogradRole", "TensorFunction", "cached_view", "named"]

Tensor = Any
#: From one tensor to another.
TensorFunction = Callable[[Tensor], Tensor]

#: Empty unless an observer asks from which module the collectives of a backward come. The last wrapper is called with
#: the backward of each function when that function is recorded. It returns the backward that runs instead while the
#: list is not empty.
BACKWARD_WRAPPERS: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []


def cached_view(platform: Any, make: TensorFunction, key: Any) -> Callable[..., Tensor]:
    """``view(x)``: ``x`` itself where it requires no gradient, else ``make(x)``. The view is the same each time under
    the conditions of `Platform.read_cache`. It is kept there under ``key``. ``view`` ignores further arguments."""
    requires_grad, read, write = platform.requires_grad, platform.read_cache, platform.write_cache

    def view(x: Tensor, *_: Any) -> Tensor:
        if not requires_grad(x):
            return x
        found = read(x, key)
        if found is None:
            found = make(x)
            write(x, key, found)
        return found

    return view


def named(name: str, function: Callable[..., Any]) -> Any:
    """``function`` under its own name, for functions that are given to `AutogradRole.autograd_function` and its like:
    frameworks show that name in graphs and profiles. A function whose name can be set is renamed, at no extra cost.

    Example:
        >>> named("AllGather", lambda ctx, x: x).__name__, named("Largest", max)(1, 2)
        ('AllGather', 2)
    """
    under_name: Any = function if isinstance(function, FunctionType) else partial(function)
    under_name.__name__ = name
    return under_name


class AutogradRole(ABC):
    """Verbs with which core sends gradients its own way."""

    def requires_grad(self, x: Tensor) -> bool:
        """Return whether an operation on ``x`` right now can carry a gradient back to it: False when gradients are
        switched off. A backend that cannot know answers True.
        """
        return True

    @abstractmethod
    def autograd_function(
        self, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Make a differentiable ``apply(x, *static)`` of one differentiable operand.

        ``forward(ctx, x, *static)`` runs outside autograd and returns a tensor that is not ``x`` itself. It may be a
        view: the platform keeps autograd from treating it as one. ``backward(ctx, cotangent)`` returns the cotangent of
        ``x``. It is itself recorded when gradients of gradients are asked for. ``ctx`` takes attributes. A tensor that
        backward needs goes through ``ctx.save_for_backward(...)`` and comes back as ``ctx.saved_tensors``.
        Interception is off in both. A framework whose graph shows names calls the node ``forward.__name__``; see
        `named`.
        """

    #: Whether a `joint_function` is told which of its results nothing was computed from.
    tells_unused: bool = False

    def joint_function(
        self: Any, forward: Callable[..., Sequence[Tensor]], backward: Callable[..., Sequence[Tensor]]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Make a differentiable ``apply(static, *xs)`` of several operands that gives a tuple of several results.

        Its backward runs once, when the cotangents of all results are there. Called with interception off.
        ``forward(ctx, static, *xs)`` and ``ctx`` are as in `autograd_function`. ``backward(ctx, *cotangents)`` returns
        a cotangent of each operand, or None for no gradient. A framework without absent gradients uses zeros for None,
        and for the cotangent of an unused result. The operands have one floating point dtype, and so have the results.
        Results share memory with the return values of ``forward`` in a backend that `frees_storage`. By default,
        operands and results are joined to one vector each.
        """

        def run_forward(ctx: Any, x: Tensor, static: Any, operands: list, results: list) -> Tensor:
            found = forward(ctx, static, *self.part(x, operands))
            ctx.shapes, ctx.operands, ctx.like = results, operands, self.zeros((0,), x)
            results.extend(map(self.shape_of, found))
            return self.join(found)

        def run_backward(ctx: Any, cotangent: Tensor) -> Tensor:
            found = backward(ctx, *self.part(cotangent, ctx.shapes))
            like = ctx.like
            return self.join(
                [self.zeros(shape, like) if g is None else g for g, shape in zip(found, ctx.operands, strict=True)]
            )

        function = self.autograd_function(run_forward, run_backward)

        def apply(static: Any, *xs: Tensor) -> tuple[Tensor, ...]:
            results: list[tuple[int, ...]] = []
            y = function(self.join(xs), static, list(map(self.shape_of, xs)), results)
            return tuple(self.part(y, results))

        return apply

    def gradient_view(self, convert: Callable[[Tensor, Tensor], Tensor], key: Any) -> TensorFunction:
        """Return ``view(x)``, a read-only view of a tensor whose gradient is converted on its way back.

        A cotangent of the view reaches ``x`` as ``convert(x, cotangent)``. Where ``x`` requires no gradient, the view
        is ``x``. `read_cache` keeps the view under ``key``, and says when it is made again. ``convert`` is recorded
        when gradients of gradients are asked for. Interception is off during this call and the calls of the view."""

        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x = x
            return self.detach(x)

        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            return convert(ctx.x, cotangent)

        return cached_view(self, self.autograd_function(forward, backward), key)

    @abstractmethod
    def detach(self, x: Tensor) -> Tensor:
        """A plain tensor with the data of ``x`` and no gradient."""

    def alias(self, x: Tensor) -> Tensor:
        """A new plain tensor object with the data of ``x``, differentiable with respect to ``x``."""
        return self.autograd_function(lambda ctx, x: self.detach(x), lambda ctx, cotangent: cotangent)(x)

    def no_grad(self) -> AbstractContextManager:
        """Context manager without gradients, for a framework that records unless it is told not to."""
        return nullcontext()

    def with_grad(self) -> AbstractContextManager:
        """Context manager with gradients, inside a backward, for a framework that records none there."""
        return nullcontext()

    def read_cache(self, holder: Tensor, key: Any) -> Tensor | None:
        """The tensor stored on ``holder`` with `write_cache` under ``key``, if it is still valid: the same gradient
        recording, and ``holder`` neither changed in place nor given other data since. Otherwise None. Called with
        interception off. A backend that keeps nothing has more collectives in backward."""
        return None

    def write_cache(self, holder: Tensor, key: Any, value: Tensor) -> None:
        """Keep ``value``, which has the data of ``holder``, for `read_cache`, without keeping either alive for longer
        than it would be. A backend that cannot do so safely for this ``holder`` stores nothing. Called with
        interception off."""
        return  # nothing is kept

    def clear_cache(self, holder: Tensor) -> None:
        """Drop all that `write_cache` stored on ``holder``."""
        return  # nothing was kept
