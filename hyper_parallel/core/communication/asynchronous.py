"""Collectives that are started now and waited for later, along one mesh dimension.

`start` writes into buffers that the caller allocates. `start_redistribution` starts the last collective of a
redistribution. That collective overlaps with computation, and the first use of the result waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.errors import explain_along
from hyper_parallel.core.communication.recorder import LISTENERS, dim_name, record
from hyper_parallel.core.communication.redistribute import redistribution_steps
from hyper_parallel.core.communication.shard_steps import Gather, ReduceScatter
from hyper_parallel.core.communication.transitions import AllReduce, Move, ReduceExtreme, ReduceProduct, Step
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import PackedShard
from hyper_parallel.platform.contract.collectives import FINISHED, Work

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh


class _CheckedWork:
    """A `Work` that raises `CollectiveError` if a rank is lost, and that calls ``done`` on completion."""

    def __init__(self, work: Work, done: Callable[[], None] | None, *what: Any) -> None:
        self._work, self._done, self._what = work, done, what

    def is_completed(self) -> bool:
        """Return whether the collective is complete, so that `wait` returns at once. Return False if the framework does
        not report completion."""
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
            return _CheckedWork(work, done, *what)
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


class Pending:
    """A collective that a DTensor must wait for before it has a layout.

    Attributes:
        layout: layout of the DTensor after the collective.
    """

    __slots__ = ("_finish", "_work", "layout")

    def __init__(self, work: Work, finish: Callable[[], None] | None, layout: Layout) -> None:
        self._work, self._finish, self.layout = work, finish, layout

    def wait(self) -> None:
        """Wait until the values are complete."""
        platform = self.layout.mesh.platform
        with platform.no_dispatch(), platform.no_grad():
            self._work.wait()
            if self._finish is not None:
                self._finish()


def can_start(source: Layout, target: Layout) -> bool:
    """Return whether `start_redistribution` can overlap the last step, which must be one collective of equal-size
    shards."""
    if source is target:
        return False
    step = redistribution_steps(source, target)[-1]
    if isinstance(step, Gather):
        return step.size > 1 and len(set(step.source_sizes)) == 1 and not isinstance(step.source, PackedShard)
    if isinstance(step, ReduceScatter):
        return step.size > 1 and len(set(step.target_sizes)) == 1 and not isinstance(step.target, PackedShard)
    return step.size > 1 and isinstance(step, AllReduce) and not isinstance(step, (ReduceExtreme, ReduceProduct))


def start_redistribution(x: Any, target: Layout) -> Any:
    """Return the DTensor ``x`` redistributed to ``target``, with the last collective still pending. `can_start` must be
    true."""
    platform = target.mesh.platform
    *before, last = redistribution_steps(x._layout, target)
    for move in before:
        x = move.move(x)
    step = _Started(last)
    y = platform.wrap(step(x), target)
    if step.work is not FINISHED:
        y._pending = Pending(step.work, step.finish, target)
        del y._layout  # `views.CurrentLayout` computes it instead
    return y


class _Started(Step):
    """A step on one tensor whose collective is pending.

    Attributes:
        work: the pending collective, after the step was called.
        finish: a function to call after the collective, or None.
    """

    work: Work = FINISHED
    finish: Callable[[], None] | None = None

    def __init__(self, step: Move) -> None:
        super().__init__(step.platform, f"{type(step).__name__}_{dim_name(step.mesh, step.mesh_dim)}")
        self._step = step

    def backward(self, ctx: Any, g: Any) -> Any:
        return self._step.backward(ctx, g)

    def forward(self, ctx: Any, x: Any) -> Any:
        step, platform = self._step, self.platform
        shape = tuple(platform.shape_of(x))
        if isinstance(step, AllReduce):
            buffer = platform.clone(x).reshape((math.prod(shape),))
            return self._start("all_reduce", buffer, buffer, step.source.reduce_op).reshape(shape)
        size = step.size
        if isinstance(step, Gather):
            dim = step.source.dim
            operand = platform.clone(x).reshape((math.prod(shape),))
            out = self._start("all_gather", platform.zeros((size * math.prod(shape),), x), operand)
            by_rows = out.reshape((size * shape[0], *shape[1:]))
            if not dim:
                return by_rows
            if self.work is FINISHED:
                return platform.cat(platform.chunk(by_rows, size, 0), dim)
            whole = platform.zeros((*shape[:dim], size * shape[dim], *shape[dim + 1 :]), x)
            self.finish = lambda: platform.write(whole, platform.cat(platform.chunk(by_rows, size, 0), dim))
            return whole
        dim = step.target.dim
        parts = platform.cat(platform.chunk(x, size, dim), 0) if dim else platform.clone(x)
        operand = parts.reshape((math.prod(shape),))
        out = platform.zeros((math.prod(shape) // size,), x)
        out = self._start("reduce_scatter", out, operand, step.source.reduce_op)
        return out.reshape((*shape[:dim], shape[dim] // size, *shape[dim + 1 :]))

    def _start(self, collective: str, out: Any, operand: Any, op: str = "") -> Any:
        step = self._step
        self.work = start(collective, out, operand, step.mesh, step.mesh_dim, op)
        return out
