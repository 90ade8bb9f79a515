"""The recorder that notifies listeners of every collective before it is issued.

`CommDebugMode` counts these events, and `CommTrace` measures them. `explain` and dry runs list them, and `check_ranks`
compares them over the ranks. `as_line` and `as_range` show them in the log and in the framework's profiler, as
``HYPER_PARALLEL_LOG`` requests. Without a listener, a collective only checks an empty list.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.contract.autograd import BACKWARD_WRAPPERS
from hyper_parallel.platform.forks import check_not_forked
from hyper_parallel.platform.logs import LOG, words

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

_MODULE: ContextVar[str] = ContextVar("hyper_parallel_module", default="")
_DIRECTION: ContextVar[str] = ContextVar("hyper_parallel_direction", default="")


@dataclass(frozen=True)
class CollectiveEvent:
    """A collective that this rank is about to issue along one mesh dimension.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"shift"``, ``"broadcast"``,
            ``"scatter"``, or ``"all_gather_object"`` for pickled values.
        mesh, mesh_dim: the mesh dimension to communicate along. Both are None for a collective that the program itself
            issues on a group.
        op: the reduction, such as ``"sum"``; empty for other collectives.
        shape: shape of the local operand. For shards of different sizes, it is that of the largest shard on all ranks.
        dtype: the framework's dtype of the operand; None for pickled values.
        bytes: size of a tensor of this shape and dtype. 0 if no rank has elements, in which case no message is sent.
        details: further arguments of the collective, by their names in messages, such as the tensor dimension.
        uneven_dim: tensor dimension in which local sizes may differ between ranks, or None.
        module: path of the module whose forward is running, as the plan names it, or its class if no plan names it.
            Empty outside of modules that have a style. In backward it is empty too, except in a recomputed forward.
            Inside `attributed_backwards`, it is the module of the corresponding forward.
        direction: ``"backward"`` during a backward pass and for the reductions of `coalesce_gradients`; else
            ``"forward"``.
    """

    kind: str
    mesh: Any
    mesh_dim: Any
    op: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    details: Mapping[str, Any]
    uneven_dim: int | None
    module: str
    direction: str


def dim_name(mesh: Any, mesh_dim: int) -> str:
    """Return the name of a mesh dimension, or its index if it has no name."""
    names = mesh.mesh_dim_names
    return names[mesh_dim] if names else str(mesh_dim)


#: Function that is called with an event. It may return a callback for the completion of the collective.
Listener = Callable[[CollectiveEvent], Callable[[], None] | None]
#: Listeners, called in this order. If one raises, the collective is not issued and raises the error.
LISTENERS: list[Listener] = []


def _refuse_in_fork(event: CollectiveEvent) -> None:
    check_not_forked(event.mesh.platform, event.kind)


def _listen_in_fork() -> None:
    LISTENERS.insert(0, _refuse_in_fork)


if hasattr(os, "register_at_fork"):  # the check costs nothing in processes that are not forked
    os.register_at_fork(after_in_child=_listen_in_fork)


def record(
    kind: str,
    mesh: DeviceMesh,
    mesh_dim: int,
    local: Any,
    op: str = "",
    details: Mapping[str, Any] | None = None,
    uneven: tuple[int, int] | None = None,
) -> Callable[[], None] | None:
    """Notify the `LISTENERS` of a collective, right before it is issued. Call it only if there are listeners.

    Return a function to call on completion, or None if no listener needs it.

    Args:
        kind, mesh, mesh_dim, op, details: attributes of the `CollectiveEvent`.
        local: the local operand, or None.
        uneven: the dimension of ``local`` in which ranks may differ, and the largest size on any rank.
    """
    shape, dtype, size = [], None, 0
    if local is not None:
        shape, dtype = list(mesh.platform.shape_of(local)), local.dtype
        if uneven is not None:
            shape[uneven[0]] = uneven[1]
        size = math.prod(shape) * local.itemsize
    direction = _DIRECTION.get() or ("backward" if mesh.platform.in_backward() else "forward")
    event = CollectiveEvent(
        kind=kind,
        mesh=mesh,
        mesh_dim=mesh_dim,
        op=op,
        shape=tuple(shape),
        dtype=dtype,
        bytes=size,
        details=details or {},
        uneven_dim=uneven[0] if uneven else None,
        module=_MODULE.get(),
        direction=direction,
    )
    waiting = [done for listener in tuple(LISTENERS) if (done := listener(event)) is not None]
    return partial(_call_all, waiting) if waiting else None


def _call_all(callbacks: list[Callable[[], None]]) -> None:
    for callback in callbacks:
        callback()


def set_module(path: str) -> str:
    """Attribute events to the module at ``path`` from now on, and return the previous path."""
    before = _MODULE.get()
    _MODULE.set(path)
    return before


def current_module() -> str:
    """Return the `CollectiveEvent.module` of events that are recorded now."""
    return _MODULE.get()


def run_in_module(path: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``call(*args, **kwargs)``, run as a part of the forward of the module at ``path``."""
    token = _MODULE.set(path)
    try:
        return call(*args, **kwargs)
    finally:
        _MODULE.reset(token)


def attributed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, bound to the module whose forward is running now. Its events are attributed to that module."""
    return partial(run_in_module, _MODULE.get(), call)


@contextmanager
def attributed_backwards() -> Iterator[None]:
    """Context manager that attributes events of a backward to the module of the corresponding forward. The forward must
    run inside, too."""
    BACKWARD_WRAPPERS.append(attributed)
    try:
        yield
    finally:
        BACKWARD_WRAPPERS.remove(attributed)


@contextmanager
def recorded_as(direction: str) -> Iterator[None]:
    """Context manager that sets `CollectiveEvent.direction` where the framework cannot know it."""
    token = _DIRECTION.set(direction)
    try:
        yield
    finally:
        _DIRECTION.reset(token)


def _described(event: CollectiveEvent) -> str:
    """Return the name of an event, such as ``"all_reduce over tp, layers.0.attention.wo, forward"``."""
    what = f"{event.kind} over {dim_name(event.mesh, event.mesh_dim)}"
    return ", ".join(filter(None, (what, event.module, event.direction)))


def as_range(event: CollectiveEvent) -> Callable[[], None] | None:
    """Open a profiler range for the collective, and return the function that closes it."""
    return event.mesh.platform.profiler_range(_described(event)) if event.bytes else None


def as_line(event: CollectiveEvent) -> None:
    """Log the collective before it is issued."""
    if event.bytes and not event.mesh.platform.sends_nothing:
        LOG.info("%s: %d bytes, %s of %s", _described(event), event.bytes, event.shape, event.dtype)


def watch_as_told() -> None:
    """Add the listeners that ``HYPER_PARALLEL_LOG`` requests."""
    for word, listener in (("collectives", as_line), ("ranges", as_range)):
        if word in words() and listener not in LISTENERS:
            LISTENERS.append(listener)
            BACKWARD_WRAPPERS.append(attributed)
