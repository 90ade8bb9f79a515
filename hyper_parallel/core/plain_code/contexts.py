"""Where a program is followed, and where it is not: contexts around a step, and inside of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent
from hyper_parallel.core.plain_code.following import FOLLOWING, Following
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.modules import APPLIED

__all__ = ["follow", "looking", "platform_of", "unmarked"]


@contextmanager
def follow(model: Any, platform: Platform) -> Iterator[Following]:
    """Inside, the program is followed.

    Raises:
        TypeError: for a backend that cannot do so.
    """
    following = Following(model, platform)
    del model  # a context that a failed call leaves open keeps no model alive
    handed_over = platform.follow(following)
    if handed_over is None:
        raise TypeError(f"the platform {platform.name!r} cannot follow plain code: its `follow` returns None")
    FOLLOWING.append(following)
    LISTENERS.append(_hear_nothing)  # where there are listeners, styles ask whether a program is followed
    try:
        with handed_over:
            yield following
    finally:
        LISTENERS.remove(_hear_nothing)
        FOLLOWING[:] = [other for other in FOLLOWING if other is not following]


@contextmanager
def looking() -> Iterator[None]:
    """Inside, operations are the library's own, such as those that read values for a report: none is followed."""
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
    """Inside, DTensors give plain tensors that the program cuts itself, such as parts of a sequence: none is marked.

    The gradients of parameters are then summands of ranks, which the program adds up as those of data parallelism.
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


def platform_of(model: Any) -> Platform:
    """The platform on which styles were applied to a module or one below it, else the selected one."""
    platform = get_platform()
    if isinstance(model, platform.Module):
        for _, module in platform.named_modules(model):
            for _, mesh in getattr(module, APPLIED, ()):
                return mesh.platform
    return platform


def _hear_nothing(event: CollectiveEvent) -> None:
    """Stand in the list of listeners."""
