"""Hooks on the gradients of distributed tensors, called before or after a gradient is accumulated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.basics.tensor import State, replaces

__all__ = ["keep_hooks"]


class _GradientHook:
    """A tensor hook that gets and returns DTensors.

    Autograd sometimes calls hooks with None as gradient. This happens for a parameter of `fully_shard` whose gradient
    stays pending until a later backward. The user's hook is called when the pending gradient is reduced.
    """

    __slots__ = ("_hook", "_layout")

    def __init__(self, hook: Callable[[Any], Any], layout: Any) -> None:
        self._hook, self._layout = hook, layout

    def with_layout(self, layout: Any) -> _GradientHook:
        """Return a hook with the same user function, for a parameter with another layout."""
        return _GradientHook(self._hook, layout)

    def __call__(self, gradient: Any) -> Any:
        return None if gradient is None else State.core.through_hook(self._hook, gradient, self._layout)


class _AccumulatedHook:
    """A hook that is called after a gradient was accumulated. The hook skips autograd's calls without a gradient."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook

    def __call__(self, parameter: Any) -> None:
        with no_dispatch():
            accumulated = parameter.grad is not None
        if accumulated:
            self._hook(parameter)


@replaces(Tensor.register_hook)
def register_hook(x: Any, hook: Callable) -> Any:
    """Register a hook on the gradient. The hook gets and returns a DTensor."""
    State.core.keep_gradient(x, "register_hook()")
    with no_dispatch():
        return x.register_hook(_GradientHook(hook, x._layout))


@replaces(Tensor.retain_grad)
def retain_grad(x: Any) -> None:
    """Keep the gradient in ``x.grad``."""
    State.core.keep_gradient(x, "retain_grad()")
    with no_dispatch():
        x.retain_grad()


@replaces(Tensor.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(x: Any, hook: Callable) -> Any:
    """Register a hook that is called with the parameter once its gradient is accumulated."""
    with no_dispatch():
        return x.register_post_accumulate_grad_hook(_AccumulatedHook(hook))


def keep_hooks(parameter: Any) -> None:
    """Let hooks get DTensors if they were registered before the parameter was distributed.

    Args:
        parameter: a DTensor. Its layout may have changed since hooks were registered.
    """
    with no_dispatch():
        before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        for key, hook in () if before is None else before.items():
            known = isinstance(hook, _GradientHook)
            before[key] = hook.with_layout(parameter._layout) if known else _GradientHook(hook, parameter._layout)
        for key, hook in () if after is None else after.items():
            after[key] = hook if isinstance(hook, _AccumulatedHook) else _AccumulatedHook(hook)
