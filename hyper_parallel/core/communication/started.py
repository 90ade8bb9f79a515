"""Asynchronous redistribution: the last collective overlaps with computation, and the first use of the result waits for
it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.communication.recorder import dim_name
from hyper_parallel.core.communication.redistribute import plan_redistribution
from hyper_parallel.core.communication.shard_steps import Gather, ReduceScatter
from hyper_parallel.core.communication.transitions import AllReduce, Move, ReduceExtreme, ReduceProduct, Step
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import PackedShard
from hyper_parallel.platform.contract.collectives import FINISHED, Work


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
    step = plan_redistribution(source, target)[-1]
    if isinstance(step, Gather):
        return step.size > 1 and len(set(step.source_sizes)) == 1 and not isinstance(step.source, PackedShard)
    if isinstance(step, ReduceScatter):
        return step.size > 1 and len(set(step.target_sizes)) == 1 and not isinstance(step.target, PackedShard)
    return step.size > 1 and isinstance(step, AllReduce) and not isinstance(step, (ReduceExtreme, ReduceProduct))


def start_redistribution(x: Any, target: Layout) -> Any:
    """Return the DTensor ``x`` redistributed to ``target``, with the last collective still pending. `can_start` must be
    true."""
    platform = target.mesh.platform
    *before, last = plan_redistribution(x._layout, target)
    for move in before:
        x = move.move(x)
    step = _Started(last)
    y = platform.wrap(step(x), target)
    if step.work is not FINISHED:
        y._pending = Pending(step.work, step.finish, target)
        del y._layout  # `views.CurrentLayout` computes it instead
    return y


class _Started(Step):
    """A step on one tensor whose collective is started, but not waited for.

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
        self.work = asynchronous.start(collective, out, operand, step.mesh, step.mesh_dim, op)
        return out
