"""The one place that every collective passes before it is issued, where listeners are told of it.

`CommDebugMode` counts the collectives that pass here, and `CommTrace` measures them. `explain` and dry runs list them,
and `check_ranks` compares them over the ranks. Without a listener, a collective pays one look at an empty list.
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

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

_MODULE: ContextVar[str] = ContextVar("hyper_parallel_module", default="")
_DIRECTION: ContextVar[str] = ContextVar("hyper_parallel_direction", default="")


@dataclass(frozen=True)
class CollectiveEvent:
    """A collective that this rank is about to issue along one mesh dimension.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``, ``"shift"``,
            ``"broadcast"``, ``"scatter"``, or ``"all_gather_object"`` for values that are pickled.
        mesh, mesh_dim: along which the ranks communicate; None for a collective that the program itself issues, on a
            group.
        op: of a reduction, ``"sum"`` for example; empty otherwise.
        shape: of the local tensor that the rank gives. Where shards differ in size, the largest one's on all ranks.
        dtype: the framework's dtype of that tensor; None for values that are pickled.
        bytes: of a tensor of this shape and dtype. 0 where no rank has elements, and nothing is sent.
        details: further arguments of the collective, by their names in messages: tensor dimension, sizes of shards,
            source.
        uneven_dim: dimension of the tensor in which the sizes of the ranks may differ, or None.
        module: path of the module whose forward is running, as the plan names it. Its class where no plan names it,
            and empty outside of modules that have a style: in backward, unless a forward is computed again there, or
            inside `attributed_backwards` the one whose forward has made the backward necessary.
        direction: ``"backward"`` while a backward pass is running, or is completed by `coalesce_gradients`; else
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
    """Return the name of a mesh dimension, or its number where it has no name."""
    names = mesh.mesh_dim_names
    return names[mesh_dim] if names else str(mesh_dim)


#: The function that a listener returns is called when the collective is done, where that is known.
Listener = Callable[[CollectiveEvent], Callable[[], None] | None]
#: Called with each event, in this order. If one raises, the collective raises its error instead of being issued.
LISTENERS: list[Listener] = []


def _refuse_in_fork(event: CollectiveEvent) -> None:
    check_not_forked(event.mesh.platform, event.kind)


def _listen_in_fork() -> None:
    LISTENERS.insert(0, _refuse_in_fork)


if hasattr(os, "register_at_fork"):  # so that the ranks themselves pay nothing
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
    """Tell the `LISTENERS` of a collective, right before it. Call it only where there are listeners. Gives a function
    to call when it is done, None where no listener needs that.

    Args:
        kind, mesh, mesh_dim, op, details: see `CollectiveEvent`.
        local: the tensor that this rank gives, or None.
        uneven: the dimension of ``local`` in which ranks may differ, and the largest size of a rank there.
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
    """Let events be recorded as those of the module at ``path`` from now on; returns the path before it."""
    before = _MODULE.get()
    _MODULE.set(path)
    return before


def current_module() -> str:
    """Return the `CollectiveEvent.module` of events that are recorded now."""
    return _MODULE.get()


def run_in_module(path: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``call(*args, **kwargs)`` as a part of the forward of the module at ``path``."""
    token = _MODULE.set(path)
    try:
        return call(*args, **kwargs)
    finally:
        _MODULE.reset(token)


def attributed(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, as a part of the module whose forward is running now, whenever it is called."""
    return partial(run_in_module, _MODULE.get(), call)


@contextmanager
def attributed_backwards() -> Iterator[None]:
    """Inside, the events of a backward have the `CollectiveEvent.module` of the forward that it belongs to. That
    forward must have run inside too."""
    BACKWARD_WRAPPERS.append(attributed)
    try:
        yield
    finally:
        BACKWARD_WRAPPERS.remove(attributed)


@contextmanager
def recorded_as(direction: str) -> Iterator[None]:
    """Inside, events have this `CollectiveEvent.direction`, where the framework cannot know it."""
    token = _DIRECTION.set(direction)
    try:
        yield
    finally:
        _DIRECTION.reset(token)
