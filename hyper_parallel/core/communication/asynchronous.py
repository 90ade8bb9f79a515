"""Asynchronous collectives along one mesh dimension, into buffers that the caller allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.errors import explain_along
from hyper_parallel.core.communication.recorder import LISTENERS, record
from hyper_parallel.platform.contract.collectives import FINISHED, Work

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh


class _Started:
    """A `Work` that raises `CollectiveError` if a rank is lost, and that calls ``done`` on completion."""

    def __init__(self, work: Work, done: Callable[[], None] | None, *what: Any) -> None:
        self._work, self._done, self._what = work, done, what

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once. Return False if the framework cannot report it."""
        ask = getattr(self._work, "is_completed", None)
        return ask is not None and bool(ask())

    def wait(self) -> None:
        """Wait for the collective (see `Work.wait`)."""
        try:
            self._work.wait()
        except RuntimeError as error:
            explain_along(error, *self._what)
            raise
        if self._done is not None:
            self._done()


def start(collective: str, out: Any, x: Any, mesh: DeviceMesh, mesh_dim: int, op: str = "") -> Work:
    """Start a collective of ``x`` along a mesh dimension of ``size`` ranks. It is not differentiable.

    A collective without native support in the backend is complete when this returns. Both buffers must be 1-D and
    contiguous, and cover their storage. Until `Work.wait` returns, the result must not be used, and the operand must
    not be written.

    Args:
        collective: ``"all_gather"``, ``"reduce_scatter"``, ``"shift"`` or ``"all_reduce"``.
        out: buffer for the result. It has ``size`` times the elements of ``x`` for an all-gather, and a ``size``-th of
            them for a reduce-scatter. Otherwise it has as many as ``x``.
        x: the operand of this rank.
        mesh: the mesh.
        mesh_dim: the mesh dimension to communicate along.
        op: the reduction, ``"sum"``, ``"avg"``, ...; empty for other collectives.

    Raises:
        CollectiveError: when a rank is lost; here or in `Work.wait`.
    """
    platform, size = mesh.platform, mesh.shape[mesh_dim]
    if size > 1 and 0 not in platform.shape_of(x) and platform.supports(collective, op, x):
        done = record(collective, mesh, mesh_dim, x, op) if LISTENERS else None
        what = collective, x, mesh, mesh_dim
        try:
            work = platform.start_collective(collective, out, x, op, mesh.platform_group(mesh_dim), size)
        except RuntimeError as error:
            explain_along(error, *what)
            raise
        if work is not FINISHED:
            return _Started(work, done, *what)
        if done is not None:
            done()
        return FINISHED
    if collective == "all_gather":
        result = collectives.bind_all_gather(mesh, mesh_dim, 0, platform.shape_of(x) * size)(x)
    elif collective == "reduce_scatter":
        result = collectives.bind_reduce_scatter(mesh, mesh_dim, 0, platform.shape_of(out) * size, op)(x)
    elif collective == "shift":
        result = collectives.shift(x, mesh, mesh_dim)
    else:
        result = collectives.all_reduce(platform.clone(x), mesh, mesh_dim, op)
    platform.write(out, result)
    return FINISHED
