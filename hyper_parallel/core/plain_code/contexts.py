"""Contexts in which the operations of a program on plain tensors are followed, or not, for `check_plain_code`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent
from hyper_parallel.core.plain_code.following import FOLLOWING, Following
from hyper_parallel.core.plain_code.marks import Held, Ways, held
from hyper_parallel.core.plain_code.views import resized
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.modules import APPLIED

__all__ = ["follow", "looking", "marked_like", "platform_of", "unmarked"]


@contextmanager
def follow(model: Any, platform: Platform) -> Iterator[Following]:
    """Report the program's operations on plain tensors to ``following`` inside this context.

    Raises:
        TypeError: if the backend cannot follow programs.
    """
    following = Following(model, platform)
    del model  # a failed call may leave this context open, which must not keep the model alive
    handed_over = platform.follow(following)
    if handed_over is None:
        raise TypeError(f"the platform {platform.name!r} cannot follow plain code: its `follow` returns None")
    FOLLOWING.append(following)
    LISTENERS.append(_hear_nothing)  # styles look for a followed program only if there are listeners
    try:
        with handed_over:
            try:
                yield following
            finally:
                following.ends()
    finally:
        LISTENERS.remove(_hear_nothing)
        FOLLOWING[:] = [other for other in FOLLOWING if other is not following]


@contextmanager
def looking() -> Iterator[None]:
    """Suspend following inside this context, for the library's own operations, such as reading values for a report."""
    following = FOLLOWING[-1] if FOLLOWING and FOLLOWING[-1].is_here else None
    if following is not None:
        following.paused += 1
    try:
        yield
    finally:
        if following is not None:
            following.paused -= 1


@contextmanager
def unmarked() -> Iterator[None]:
    """Context manager in which plain tensors that are made from DTensors are not followed. Programs that shard tensors
    themselves, such as sequences, use this context.

    The gradients of parameters are partial in such programs, which reduce gradients as in data parallelism.
    """
    following = FOLLOWING[-1] if FOLLOWING and FOLLOWING[-1].is_here else None
    if following is None:
        yield
        return
    before, following._own_samples = following._own_samples, True
    try:
        yield
    finally:
        following._own_samples = before


def marked_like(y: Any, x: Any) -> Any:
    """Return ``y`` with the recorded placements of ``x``.

    ``x`` and ``y`` may differ in the sizes of unsharded dimensions.
    """
    following = FOLLOWING[-1] if FOLLOWING and FOLLOWING[-1].is_here else None
    found = held(x)
    if following is not None and found is not None and not following._platform.in_backward():
        ways: Ways = found.ways
        if isinstance(ways, tuple):
            ways = tuple(None if mark is None else resized(mark, tuple(y.shape)) for mark in ways)
        following._platform.write_mark(y, Held(ways, found.source, findings=found.findings))
    return y


def platform_of(model: Any) -> Platform:
    """Return the platform of the styles that were applied to a module or its submodules, else the selected platform."""
    platform = get_platform()
    if isinstance(model, platform.Module):
        for _, module in platform.named_modules(model):
            for _, mesh in getattr(module, APPLIED, ()):
                return mesh.platform
    return platform


def _hear_nothing(event: CollectiveEvent) -> None:
    """Ignore the event: this listener only makes the list of listeners not empty."""
