"""Collectives that are under way while linear layers compute: the switch for it, and the layers that look at it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hyper_parallel.core.communication.errors import explain_along
from hyper_parallel.core.communication.recorder import LISTENERS, attributed, record
from hyper_parallel.core.communication.redistribute import partial_grad_view
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.tensor_parallel.program.local_forward import LocalForward
from hyper_parallel.core.tensor_parallel.program.programs import placement_of
from hyper_parallel.platform.contract import NOTHING_FASTER, LinearCollective
from hyper_parallel.platform.contract.programs import KEPT, Program

_MIB = 1 << 20


#: (chunks, least) of the innermost block.
_ACTIVE: ContextVar[tuple[int, int]] = ContextVar("hyper_parallel_overlap", default=(1, 0))
#: One entry for each block that is open anywhere: empty nearly always, and quicker to look at than the variable.
_OPEN: list[tuple[int, int]] = []


@contextmanager
def overlap_collectives(chunks: int = 4, least: int = 4 * _MIB) -> Iterator[None]:
    """Inside, the collective of a linear layer overlaps with its product, where it is large enough to be worth it.

    It is for linear layers with `RowwiseParallel` (all-reduce, or reduce-scatter with sharded ``output_layouts``). It
    is also for those with ``ColwiseParallel(input_layouts=Shard(dim))`` (all-gather). Forward and backward are cut into
    chunks: while one is multiplied, the collective of another is pending. Where one collective went, ``chunks`` go,
    which move as many bytes in all. A gather that `PrepareModuleInput` does for several layers is not overlapped.
    Results are equal up to the order of sums in the gradient of the weight. Gradients of gradients are an error.

    Worth it where transfers take about as long as the products and products are large; measure it. MindSpore does not
    start collectives without waiting for them, so the switch does nothing there.

    Args:
        chunks: how many chunks; the next smaller number that divides the dimension where this one does not.
        least: smallest size of a collective's operand, in elements, below which layers are left as they are.

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
        raise ValueError(f"overlap_collectives(chunks={chunks!r}): a layer is cut into 2 chunks at least")
    if least < 0:
        raise ValueError(f"overlap_collectives(least={least!r}): a number of elements is not negative")
    token = _ACTIVE.set((chunks, least))
    _OPEN.append((chunks, least))
    try:
        yield
    finally:
        _OPEN.remove((chunks, least))
        _ACTIVE.reset(token)


def overlapped_first(local: LocalForward, program: Program) -> LocalForward:
    """``local``, preceded by `Fast.linear_with_collective` where that is asked for, for the inputs that it takes.

    A row-parallel layer multiplies and sums, by an all-reduce or a reduce-scatter. A column-parallel layer whose plain
    input is a shard of another dimension than the features gathers and multiplies.

    Args:
        local: the forward of ``program`` that runs otherwise.
    """
    if program.gives == KEPT:
        return local
    mesh, use_local_output = program.mesh, program.local
    of_weight, of_bias = program.layouts["weight"], program.layouts.get("bias")
    wanted: Any = -1 if program.gives == -1 else program.wanted
    input_layout, output_layout = placement_of(program.given), placement_of(wanted)
    platform, (shard,), size = mesh.platform, of_weight.placements, mesh.size()
    fast = platform.fast or NOTHING_FASTER
    # All ranks must go one way, and where sizes do not divide they have tensors of different shapes.
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
        """``shape`` is the global one of the rows before they are scattered or after they are gathered."""
        dim = 0 if collective == "all_reduce" else moved.dim % len(shape)
        elements = math.prod(shape[:-1]) * (features if rows else shape[-1])
        if dim >= len(shape) - 1 or (collective != "all_reduce" and shape[dim] % size):
            return NotImplemented
        chunks, least = _ACTIVE.get()
        if elements < least or CHECKS:
            chunks = 1  # checks communicate themselves, which must not come between collectives that are under way
        own = platform.own_parameters(module)
        matrix, bias = own.get("weight"), own.get("bias")
        if getattr(matrix, "_layout", None) is not of_weight or getattr(bias, "_layout", bias) is not of_bias:
            return NotImplemented
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
                # A shard of the rows gives a part of the gradient of the bias.
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
