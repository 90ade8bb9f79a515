"""Listeners that show collectives in the framework's profiler and in the log, as ``HYPER_PARALLEL_LOG`` requests."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent, attributed, dim_name
from hyper_parallel.platform.contract.autograd import BACKWARD_WRAPPERS
from hyper_parallel.platform.logs import LOG, words

__all__ = ["as_line", "as_range", "watch_as_told"]


def _name(event: CollectiveEvent) -> str:
    """Return the name of an event, such as ``"all_reduce over tp, layers.0.attention.wo, forward"``."""
    what = f"{event.kind} over {dim_name(event.mesh, event.mesh_dim)}"
    return ", ".join(filter(None, (what, event.module, event.direction)))


def as_range(event: CollectiveEvent) -> Callable[[], None] | None:
    """Open a profiler range for the collective, and return the function that closes it."""
    return event.mesh.platform.profiler_range(_name(event)) if event.bytes else None


def as_line(event: CollectiveEvent) -> None:
    """Log the collective before it is issued."""
    if event.bytes and not event.mesh.platform.sends_nothing:
        LOG.info("%s: %d bytes, %s of %s", _name(event), event.bytes, event.shape, event.dtype)


def watch_as_told() -> None:
    """Add the listeners that ``HYPER_PARALLEL_LOG`` requests."""
    for word, listener in (("collectives", as_line), ("ranges", as_range)):
        if word in words() and listener not in LISTENERS:
            LISTENERS.append(listener)
            BACKWARD_WRAPPERS.append(attributed)
