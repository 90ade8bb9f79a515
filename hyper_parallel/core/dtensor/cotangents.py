"""Conversion of gradients between the framework's backward, which has local tensors, and users, who have DTensors.

A backend calls these functions for hooks, for gradients that a function returns, and for those that a user gives. The
gradient of a tensor of ``layout`` is placed as ``layout.cotangent``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.communication.transitions import to_owner, to_summands
from hyper_parallel.core.layouts.layout import Layout

__all__ = ["as_cotangent", "for_user", "through_hook"]


def for_user(gradient: Any, layout: Layout) -> Any:
    """Return a plain local gradient, which reached a tensor of ``layout``, as a new DTensor."""
    platform = layout.mesh.platform
    with platform.no_dispatch():
        local = platform.alias(to_owner(gradient, layout))
    return platform.wrap(local, layout.cotangent)


def as_cotangent(gradient: Any, layout: Layout, what: str) -> Any:
    """Redistribute a user's gradient to the placements of gradients of a tensor of ``layout``.

    Raises:
        TypeError: for a gradient that is not distributed. ``what`` is its name in messages.
        ValueError: for a gradient of another shape.
    """
    given, wanted = getattr(gradient, "_layout", None), layout.cotangent
    if given is wanted:
        return gradient
    if given is None:
        raise TypeError(
            f"{what} of a distributed tensor must be distributed too, with placements {list(wanted.placements)}, got "
            f"{type(gradient).__name__}: use distribute_tensor or DTensor.from_local"
        )
    if tuple(given.shape) != tuple(layout.shape):
        raise ValueError(
            f"{what} has shape {tuple(given.shape)}, but the tensor has {tuple(layout.shape)}: pass a gradient of the "
            "tensor's shape"
        )
    return gradient.redistribute(placements=list(wanted.placements))


def through_hook(hook: Callable[[Any], Any], gradient: Any, layout: Layout) -> Any:
    """Call a user's hook on the gradient of a tensor of ``layout``, and return the local gradient for backward.

    The hook gets a DTensor. The result is None where the hook returns None.
    """
    given = getattr(gradient, "_layout", None)
    result = hook(for_user(gradient, layout) if given is None else gradient)
    if result is None:
        return None
    result, platform = as_cotangent(result, layout, "what a hook returns for the gradient"), layout.mesh.platform
    with platform.no_dispatch():
        return to_summands(platform.alias(result), layout)
