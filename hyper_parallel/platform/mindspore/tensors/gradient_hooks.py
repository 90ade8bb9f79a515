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
        layout, platform = self._layout, self._layout.mesh.platform
        if layout.summed_mesh_dims:
            with platform.no_dispatch():
                gradient = self._core.to_owner(gradient, layout)
        result = self.hook(platform.wrap(platform.alias(gradient), layout.cotangent))
        given = getattr(result, "_layout", None)
        if given is None:
            raise TypeError(
                "a hook of a distributed tensor must return a distributed gradient with placements "
                f"{list(layout.cotangent.placements)}, got {type(result).__name__}: use distribute_tensor or "
                "DTensor.from_local"
            )
        if tuple(given.shape) != tuple(layout.shape):
            raise ValueError(
                f"a hook returns a gradient of shape {tuple(given.shape)} for a tensor of shape {tuple(layout.shape)}"
            )
        if given is not layout.cotangent:
            result = result.redistribute(placements=layout.cotangent.placements)
        with platform.no_dispatch():
            return self._core.to_summands(Tensor._make_subclass(Tensor, result), layout)


def register_hook(x: Any, hook: Callable[[Any], Any]) -> Any:
    """Register a hook of a distributed tensor. The hook gets and returns a DTensor.

    Source: ``mindspore.Tensor.register_hook``.
    """
    return Tensor.register_hook(x, _GradientHook(hook, x))


def keep_hooks(parameter: Any, hooks: Iterable[Any]) -> None:
    """Register the hooks that a parameter had before it was distributed or redistributed."""
    for hook in hooks:
        register_hook(parameter, hook.hook if isinstance(hook, _GradientHook) else hook)


def hooked(parameter: Any, gradient: Tensor) -> Tensor:
    """Call the hooks of a parameter on a local gradient, where MindSpore calls none, and return the result."""
    for hook in parameter.hooks():
        gradient = hook(gradient)
    return gradient
