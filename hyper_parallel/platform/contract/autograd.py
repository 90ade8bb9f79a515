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
#: Function that maps one tensor to another.
TensorFunction = Callable[[Tensor], Tensor]

#: Stack of wrappers, empty unless an observer asks which module issued the collectives of a backward. The last wrapper
#: is called with the backward of each function when that function is recorded. It returns the backward that runs
#: instead while the list is not empty.
BACKWARD_WRAPPERS: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []


def cached_view(platform: Any, make: TensorFunction, key: Any) -> Callable[..., Tensor]:
    """Return a function ``view``. ``view(x)`` returns ``x`` itself if ``x`` requires no gradient, else ``make(x)``.

    ``make(x)`` is cached on ``x`` under ``key``, and valid under the conditions of `Platform.read_cache`. ``view``
    ignores further arguments.
    """
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
    """Return ``function`` with ``__name__`` set to ``name``. In graphs and profiles, frameworks show this name for
    functions made by `AutogradRole.autograd_function` and similar verbs. A Python function is renamed in place, at no
    extra cost.

    Example:
        >>> named("AllGather", lambda ctx, x: x).__name__, named("Largest", max)(1, 2)
        ('AllGather', 2)
    """
    under_name: Any = function if isinstance(function, FunctionType) else partial(function)
    under_name.__name__ = name
    return under_name


class AutogradRole(ABC):
    """Verbs with which core defines its own gradients."""

    def requires_grad(self, x: Tensor) -> bool:
        """Return whether an operation on ``x`` now would be recorded for backward: False when gradients are switched
        off. A backend that cannot know answers True."""
        return True

    @abstractmethod
    def autograd_function(
        self, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Make a differentiable ``apply(x, *static)`` with one differentiable operand.

        ``forward(ctx, x, *static)`` runs outside autograd and returns a tensor that is not ``x`` itself. It may be a
        view, but the platform hides this from autograd. ``backward(ctx, cotangent)`` returns the cotangent of ``x``. It
        is itself recorded when gradients of gradients are asked for. ``ctx`` takes attributes. A tensor that backward
        needs is saved by ``ctx.save_for_backward(...)`` and read from ``ctx.saved_tensors``. Interception is off in
        both functions. If the framework's graph shows names, the node is called ``forward.__name__``; see `named`.
        """

    #: Whether the backward of a `joint_function` gets None for results that nothing was computed from.
    tells_unused: bool = False

    def joint_function(
        self: Any, forward: Callable[..., Sequence[Tensor]], backward: Callable[..., Sequence[Tensor]]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """Make a differentiable ``apply(static, *xs)`` with several operands, which returns a tuple of results.

        Its backward runs once, when the cotangents of all results are there. Called with interception off.
        ``forward(ctx, static, *xs)`` and ``ctx`` are as in `autograd_function`. ``backward(ctx, *cotangents)`` returns
        a cotangent of each operand, or None for no gradient. A framework without absent gradients uses zeros for None,
        and for the cotangent of an unused result. All operands and results have the same floating point dtype. In a
        backend that `frees_storage`, results share memory with the return values of ``forward``. By default, operands
        are joined to one vector, and so are results.
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
        """Return ``view(x)``, a read-only view of a tensor whose gradient is converted in backward.

        A cotangent of the view reaches ``x`` as ``convert(x, cotangent)``. Where ``x`` requires no gradient, the view
        is ``x``. The view is cached under ``key``, and valid under the conditions of `read_cache`. ``convert`` is
        recorded when gradients of gradients are asked for. Interception is off during this call and the calls of the
        view."""

        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x = x
            return self.detach(x)

        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            return convert(ctx.x, cotangent)

        return cached_view(self, self.autograd_function(forward, backward), key)

    @abstractmethod
    def detach(self, x: Tensor) -> Tensor:
        """Return a plain tensor with the data of ``x`` and without gradient."""

    def alias(self, x: Tensor) -> Tensor:
        """Return a new plain tensor object with the data of ``x``, differentiable with respect to ``x``."""
        return self.autograd_function(lambda ctx, x: self.detach(x), lambda ctx, cotangent: cotangent)(x)

    def no_grad(self) -> AbstractContextManager:
        """Return a context manager that disables the recording of gradients, for frameworks that record by default."""
        return nullcontext()

    def with_grad(self) -> AbstractContextManager:
        """Return a context manager that enables the recording of gradients inside a backward, for frameworks that
        record none there."""
        return nullcontext()

    def read_cache(self, holder: Tensor, key: Any) -> Tensor | None:
        """Return the tensor that `write_cache` stored on ``holder`` under ``key``, or None if it is stale. The tensor
        becomes stale when gradient recording is switched, or ``holder`` is changed in place or given other data. Called
        with interception off. A backend without a cache issues more collectives in backward."""
        return None

    def write_cache(self, holder: Tensor, key: Any, value: Tensor) -> None:
        """Store ``value``, which has the data of ``holder``, for `read_cache`. The cache must not prolong the lifetime
        of either tensor. A backend that cannot do so safely for this ``holder`` stores nothing. Called with
        interception off."""
        return  # the default has no cache

    def clear_cache(self, holder: Tensor) -> None:
        """Discard all tensors that `write_cache` stored on ``holder``."""
        return  # the default has no cache
