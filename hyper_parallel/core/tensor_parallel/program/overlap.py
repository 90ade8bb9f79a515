"""Overlap of collectives with the products of linear layers: `overlap_collectives`, and the forwards that use it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hyper_parallel.core.communication.errors import explain_along
from hyper_parallel.core.communication.recorder import LISTENERS, attributed, record
from hyper_parallel.core.communication.redistribute import partial_grad_view
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.tensor_parallel.program.local_forward import LocalForward
from hyper_parallel.core.tensor_parallel.program.programs import placement_of
from hyper_parallel.platform.contract import NOTHING_FASTER, LinearCollective
from hyper_parallel.platform.contract.programs import KEPT, Program, are_planned

_MIB = 1 << 20


#: (chunks, least) of the innermost `overlap_collectives` block.
_ACTIVE: ContextVar[tuple[int, int]] = ContextVar("hyper_parallel_overlap", default=(1, 0))
#: An entry for each open block of any thread. It is usually empty, and faster to read than the context variable.
_OPEN: list[tuple[int, int]] = []


@contextmanager
def overlap_collectives(chunks: int = 4, least: int = 4 * _MIB) -> Iterator[None]:
    """Overlap the collectives of linear layers with their products, inside this context.

    This applies to layers with `RowwiseParallel` (all-reduce, or reduce-scatter with sharded ``output_layouts``). It
    also applies to ``ColwiseParallel(input_layouts=Shard(dim))`` (all-gather). Forward and backward are split into
    chunks. While one chunk is multiplied, the collective of another chunk is pending. So ``chunks`` collectives replace
    one collective, and move the same number of bytes. An all-gather by `PrepareModuleInput`, which several layers
    share, is not overlapped. Results are equal up to the order of sums in the gradient of the weight. Gradients of
    gradients raise an error.

    Use this context where products are large and collectives take about as long as products, and measure the gain. On
    MindSpore the context does nothing, because collectives there are synchronous.

    Args:
        chunks: number of chunks. If it does not divide the dimension, the next smaller divisor is used.
        least: number of elements of a collective's operand below which layers do not overlap.

    Raises:
        ValueError: for fewer than 2 chunks or a negative size.

    Example:
        >>> from hyper_parallel import overlap_collectives
        >>> with overlap_collectives(chunks=2):
        ...     pass

    Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
    Models"; torch's ``_micro_pipeline_tp``.
    """
    if chunks < 2:
        raise ValueError(f"overlap_collectives(chunks={chunks!r}): chunks must be at least 2")
    if least < 0:
        raise ValueError(f"overlap_collectives(least={least!r}): least must not be negative")
    token = _ACTIVE.set((chunks, least))
    _OPEN.append((chunks, least))
    try:
        yield
    finally:
        _OPEN.remove((chunks, least))
        _ACTIVE.reset(token)


def overlapped_first(local: LocalForward, program: Program) -> LocalForward:
    """Return a `LocalForward` that uses `Fast.linear_with_collective` where possible, and ``local`` otherwise.

    A row-parallel layer multiplies, then all-reduces or reduce-scatters. A column-parallel layer all-gathers a plain
    input that is sharded along another dimension than the features, then multiplies.

    Args:
        local: fast path of ``program`` without overlap.
        program: program of the module.
    """
    if program.gives == KEPT:
        return local
    mesh, use_local_output = program.mesh, program.local
    of_weight, planned = program.layouts["weight"], tuple(program.layouts.items())
    wanted: Any = -1 if program.gives == -1 else program.wanted
    input_layout, output_layout = placement_of(program.given), placement_of(wanted)
    platform, (shard,), size = mesh.platform, of_weight.placements, mesh.size()
    fast = platform.fast or NOTHING_FASTER
    # All ranks must take the same path, and uneven shards have different shapes on the ranks.
    if size == 1 or type(shard) is not Shard or of_weight.shape[shard.dim] % size:
        return local
    rows = shard.dim == 1
    moved: Any = output_layout if rows else input_layout
    if rows and moved is Replicate():
        collective = "all_reduce"
    elif type(moved) is Shard:
        collective = "reduce_scatter" if rows else "all_gather"
    else:
        return local
    features, group = of_weight.shape[0], mesh.platform_group(0)
    run_plain, run_distributed = local.plain, local.distributed

    def multiply(module: Any, x: Any, shape: tuple[int, ...]) -> Any:
        """Run the linear layer with its collective overlapped. ``shape`` is the shape before a scatter or after a
        gather."""
        dim = 0 if collective == "all_reduce" else moved.dim % len(shape)
        elements = math.prod(shape[:-1]) * (features if rows else shape[-1])
        if dim >= len(shape) - 1 or (collective != "all_reduce" and shape[dim] % size):
            return NotImplemented
        chunks, least = _ACTIVE.get()
        if elements < least or CHECKS:
            chunks = 1  # checks communicate, which must not happen between pending collectives
        own = platform.own_parameters(module)
        if not are_planned(own, planned, DTensor):
            return NotImplemented
        matrix, bias = own["weight"], own.get("bias")
        with platform.no_dispatch():
            try:
                tell = attributed(record_native) if LISTENERS else record_native
                how = LinearCollective(collective, group, size, dim, tell, chunks)
                y = fast.linear_with_collective(x, matrix, how)
            except RuntimeError as error:
                explain_along(error, collective, x, mesh, 0)
                raise
            if y is None:
                return NotImplemented
            if bias is not None:
                # The gradient of the bias is partial, because the output is sharded.
                bias = partial_grad_view(bias, (0,)) if collective == "reduce_scatter" else bias
                y = y.add(bias)
            if use_local_output:
                return y
            placement = output_layout if rows else Shard(len(shape) - 1)
            return platform.wrap(y, get_layout(mesh, (placement,), (*shape[:-1], features)))

    def record_native(kind: str, x: Any) -> None:
        if LISTENERS:
            record(kind, mesh, 0, x, "" if kind == "all_gather" else "sum")

    def plain(module: Any, x: Any) -> Any:
        if (_OPEN or fast.fuses_linear) and x.ndim:
            shape = tuple(x.shape)
            if collective == "all_gather" and -x.ndim <= moved.dim < x.ndim:
                dim = moved.dim % x.ndim
                shape = (*shape[:dim], shape[dim] * size, *shape[dim + 1 :])
            y = multiply(module, x, shape)
            if y is not NotImplemented:
                return y
        return NotImplemented if run_plain is None else run_plain(module, x)

    def distributed(module: Any, x: Any) -> Any:
        if _OPEN or fast.fuses_linear:
            layout: Layout = x._layout
            ndim = layout.ndim
            if ndim and layout.mesh is mesh and layout.placements[0] is Shard(ndim - 1 if rows else moved.dim % ndim):
                y = multiply(module, x, tuple(layout.shape))
                if y is not NotImplemented:
                    return y
        return run_distributed(module, x)

    gathers = collective == "all_gather"
    given = moved if gathers else local.given
    return LocalForward(plain if gathers or run_plain else None, distributed, given, local.gives)
