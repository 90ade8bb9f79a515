"""Reductions over dimensions.

If a reduced dimension is sharded, `mean`, `amax`, `amin` and `vector_norm` replace the native operation on local
tensors. A mean of means would be wrong for uneven shards. Elements that tie must share a gradient. Norms are combined
by the norm of the local norms.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from hyper_parallel.core.communication.redistribute import redistribute_local
from hyper_parallel.core.communication.transitions import differs
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.rules.labels import axes, named, unary, whole, without
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.core.rules.registry import rule

_TAKES = "x | dims=None keepdim=False"


def _reduction(x: tuple[int, ...], dims: Any, keepdim: bool, **how: Any) -> OpSharding:
    reduced, labels = axes(dims, len(x)), named(x)
    return unary(labels, without(labels, reduced, keepdim), without(x, reduced, keepdim, 1), **how)


@rule("sum", f"{_TAKES} dtype=None", repeatable=True, memory="fresh")
def sum_(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Sum."""
    return _reduction(shapes[0], static_args[0], static_args[1], terms=((0,),), reduce="sum")


@rule("mean", f"{_TAKES} dtype=None", repeatable=True, memory="fresh")
def mean(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Mean. Over a sharded dimension, it is the local sum divided by the global count."""
    return _reduction(shapes[0], static_args[0], static_args[1], terms=((0,),), reduce="sum", call=_mean)


def _mean(call: LocalCall) -> Any:
    layout = call.operand_layouts[0]
    reduced = axes(call.static_args[0], layout.ndim)
    local = math.prod(layout.local_shape[d] for d in reduced)
    everywhere = math.prod(layout.shape[d] for d in reduced)
    if local == everywhere:
        return call.run()
    x = call.operands[0]
    if local == 0:
        # The mean of an empty tensor is NaN. Its sum is 0, and keeps x in the graph, because backward may communicate.
        for dim in reduced:
            x = call.platform.sum_along(x, dim)
        kept = [
            1 if d in reduced else n
            for d, n in enumerate(layout.local_shape)
            if call.static_args[1] or d not in reduced
        ]
        return x.reshape(tuple(kept))
    return call.native((x,), call.static_args) * (local / everywhere)


@rule("amax", f"{_TAKES} nans=None")
def amax(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Largest element. Every rank needs at least one element."""
    return _extreme(shapes[0], static_args, "max")


@rule("amin", f"{_TAKES} nans=None")
def amin(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Smallest element (see `amax`)."""
    return _extreme(shapes[0], static_args, "min")


def _extreme(x: tuple[int, ...], static_args: tuple, op: str) -> OpSharding:
    dims, keepdim = static_args[:2]
    return _compared(x, dims, keepdim, op, "whole" in static_args[2:])


def _compared(
    x: tuple[int, ...], dims: Any, keepdim: bool, op: str, nans_tie: bool, magnitudes: bool = False
) -> OpSharding:
    """Return the sharding of a reduction to the largest or smallest element, or, for ``magnitudes``, to its absolute
    value. With ``nans_tie``, NaNs tie with each other. Otherwise the gradient of a NaN result is NaN."""
    reduced = axes(dims, len(x))
    return _reduction(
        x,
        dims,
        keepdim,
        reduce=op,
        nonempty=_only(x, reduced),
        call=partial(_extreme_of_part, op, sorted(reduced), keepdim, nans_tie, magnitudes),
        native_if=lambda layouts: all(layouts[0].shard_count(dim) == 1 for dim in reduced),
    )


def _extreme_of_part(op: str, dims: list[int], keepdim: bool, nans_tie: bool, magnitudes: bool, call: LocalCall) -> Any:
    """Return the extreme value of this rank's elements, which `ReduceExtreme` compares over ranks.

    NaN is propagated explicitly if the kernel does not do so. The result also stores how many elements tie for the
    value. All of them share the gradient evenly, on any rank.
    """
    platform = call.platform
    (x,), y = call.operands, call.run()
    if not platform.is_floating_point(y):
        return y
    values = platform.detach(x)
    if magnitudes:
        values = platform.to_dtype(abs(values), y.dtype)
    shape = platform.shape_of(values)
    if not platform.extremes_keep_nan:
        fill, number = (platform.zeros, 0.0) if op == "max" else (platform.ones, 1.0)
        of_nan = platform.masked_fill(fill(shape, values), values != values, 1.0 - number)
        y = platform.masked_fill(y, call.native((of_nan,), call.static_args) != number, math.nan)
    if platform.requires_grad(x):
        found = platform.detach(y)
        for dim in () if keepdim else dims:
            found = platform.unsqueeze(found, dim)
        others = differs(values, found) if nans_tie else values != found
        ties = platform.masked_fill(platform.ones(shape, values), others, 0.0)
        for dim in dims:
            ties = platform.sum_along(ties, dim)
        y._ties = ties.reshape(platform.shape_of(y))
    return y


def _only(x: tuple[int, ...], dims: Any) -> tuple[str, ...]:
    return tuple(label for i, label in enumerate(named(x)) if i in dims)


@rule("reduce_whole", _TAKES)
def reduce_whole(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Reductions whose local results cannot be combined: argmax, var, all. The reduced dimensions are unsharded."""
    return _reduce_whole(shapes[0], static_args, results=1)


@rule("reduce_pair", _TAKES)
def reduce_pair(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Reductions like `reduce_whole` with two results: values and indices, variance and mean."""
    return _reduce_whole(shapes[0], static_args, results=2)


def _reduce_whole(x: tuple[int, ...], static_args: tuple, results: int) -> OpSharding:
    reduced = axes(static_args[0], len(x))
    labels = whole(named(x), reduced)
    keepdim = static_args[1]
    return unary(labels, without(labels, reduced, keepdim), without(x, reduced, keepdim, 1), results)


@rule("vector_norm", "x | p=2.0 dims=None keepdim=False dtype=None")
def vector_norm(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """The p-norm.

    For p = 0 and 1, the local norms are summed. For an infinite p, they are compared, and elements that tie share the
    gradient. Otherwise all local norms are gathered, and the result is the norm of these. The native operation raises
    the same values to a power, so no value overflows that would not on one device.
    """
    x, (p, dims, keepdim) = shapes[0], static_args[:3]
    if p in (0, 1):
        return _reduction(x, dims, keepdim, reduce="sum")
    if math.isinf(p):
        return _compared(x, dims, keepdim, "max" if p > 0 else "min", nans_tie=True, magnitudes=True)
    # The norm of an empty tensor is 0. For some p it is not neutral, and for others it has no second derivative.
    nonempty = _only(x, axes(dims, len(x))) if p != 2 else ()
    return _reduction(x, dims, keepdim, reduce="call", call=_norm_of_norms, nonempty=nonempty)


def _norm_of_norms(call: LocalCall) -> Any:
    layout, (result,) = call.operand_layouts[0], call.result_layouts
    norm = call.run()
    reduced = axes(call.static_args[1], layout.ndim)
    split = [mesh_dim for dim in reduced for mesh_dim in layout.shard_mesh_dims(dim)]
    if not split:
        return norm
    # One norm per shard in a new leading dimension, which is sharded like the reduced dimensions.
    parts = math.prod(layout.mesh.shape[mesh_dim] for mesh_dim in split)
    gathered = tuple(p.with_dim(p.dim + 1) if isinstance(p, Shard) else p for p in result.placements)
    scattered = tuple(Shard(0) if i in split else p for i, p in enumerate(gathered))
    shape = (parts, *result.shape)
    norms = redistribute_local(
        call.platform.unsqueeze(norm, 0),
        get_layout(layout.mesh, scattered, shape),
        get_layout(layout.mesh, gathered, shape),
    )
    # The call may have a dtype argument. It is omitted, because the norms have that dtype, and complex norms are real.
    return call.native((norms,), (call.static_args[0], (0,), False, *(None for _ in call.static_args[3:])))
