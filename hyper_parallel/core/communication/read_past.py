"""Reads that go past a DTensor: an operation reads a view of the tensor that the DTensor was made from, which saves
communication in backward.

The view's cotangent never reaches the DTensor. So its gradient is complete only if all operations read the DTensor
itself. A program asks for that gradient by a hook, for example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def made_with(x: Any) -> Any:
    """Return the view of the DTensor ``x`` that its all-gather created, for consumers with partial cotangents.

    The cotangents are partial over the mesh dimension of the gathered shards. Return None if there is no view, or if
    ``x`` was changed since.
    """
    gathered = x._gathered
    if gathered is None or gathered[4] is None or gathered[5] != x._version:
        return None
    x._read_past = x._version
    return gathered[4]


def summands_of(x: Any) -> tuple[tuple[int, ...], Callable[[tuple[int, ...]], Any]] | None:
    """Return the first two items of `DTensor._summands`, or None if there are none, or if ``x`` was changed since."""
    return x._summands[:2] if x._summands is not None and x._summands[2] == x._version else None


def forget_sources(x: Any) -> None:
    """Let later operations read the DTensor ``x`` itself."""
    x._gathered = x._origin = x._summands = x._read_past = None


def forget_history(x: Any) -> None:
    """Forget the tensors that the DTensor ``x`` was made from, after the framework detached or wrote ``x`` in place.
    Interception is off."""
    x._layout.mesh.platform.clear_cache(x)
    forget_sources(x)


def keep_gradient(x: Any, what: str) -> None:
    """Let later operations read the DTensor ``x`` itself, because the program asks for its gradient by ``what``.

    Raises:
        ValueError: on all ranks, when an operation has read past ``x``.
    """
    with x._layout.mesh.platform.no_dispatch():
        if x._read_past is not None and x._read_past == x._version:
            raise ValueError(
                f"{what} asks for the gradient of a DTensor of shape {tuple(x._layout.shape)} placed "
                f"{list(x._layout.placements)}, but an operation has read the tensor before. Each rank computes a "
                "summand of that gradient, and the summands go directly to the tensor that the DTensor was made from. "
                "Call x.register_hook(hook) or x.retain_grad() before the first operation that reads x: then its "
                "gradient is complete"
            )
        forget_sources(x)
