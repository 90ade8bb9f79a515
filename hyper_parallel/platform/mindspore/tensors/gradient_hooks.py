"""Hooks on the gradients of distributed tensors: functions that users register get and return DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mindspore import Tensor

__all__ = ["hooked", "keep_hooks", "register_hook"]


class _GradientHook:
    """A hook that converts MindSpore's local gradient to a DTensor for a user's hook, and the result back."""

    def __init__(self, hook: Callable[[Any], Any], x: Any) -> None:
        self.hook, self._layout, self._core = hook, x._layout, x._core

    def __call__(self, gradient: Any) -> Any:
        found = self._core.through_hook(self.hook, gradient, self._layout)
        return gradient if found is None else found


def register_hook(x: Any, hook: Callable[[Any], Any]) -> Any:
    """Register a hook of a distributed tensor. The hook gets and returns a DTensor.

    Source: ``mindspore.Tensor.register_hook``.
    """
    x._core.keep_gradient(x, "register_hook()")
    return Tensor.register_hook(x, _GradientHook(hook, x))


def keep_hooks(parameter: Any, hooks: Iterable[Any]) -> None:
    """Register the hooks that a parameter had before it was distributed or redistributed."""
    for hook in hooks:
        register_hook(parameter, hook.hook if isinstance(hook, _GradientHook) else hook)


def hooked(parameter: Any, gradient: Tensor) -> Tensor:
    """Call the parameter's hooks that MindSpore does not call itself on a local gradient, and return the result."""
    for hook in parameter.hooks():
        gradient = hook(gradient)
    return gradient
