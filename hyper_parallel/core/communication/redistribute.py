"""Redistribution: the cheapest sequence of steps between two layouts. Also views of tensors whose gradients are
all-reduced."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.read_past import made_with, summands_of
from hyper_parallel.core.communication.transitions import (
    KINDS,
    AllReduce,
    ConvertCotangent,
    Move,
    ReduceExtreme,
    ReduceProduct,
    identity_reduce_grad,
    linear_key,
)
from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.cuts import cut_order
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Placement, Replicate, Shard
from hyper_parallel.platform.contract.programs import SUMMANDS, step_between

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh


def redistribute(x: Any, layout: Layout) -> Any:
    """Return the DTensor ``x`` redistributed to ``layout``, which must have its mesh and shape. Return ``x`` itself if
    it has that layout."""
    source = x._layout
    if source is layout:
        return x
    for step in _STEPS[source, layout]:
        x = step.move(x)
    return x


def redistribute_local(local: Any, source: Layout, target: Layout) -> Any:
    """Return a local tensor of layout ``source`` redistributed to ``target``. It is differentiable."""
    for step in redistribution_steps(source, target):
        local = step(local)
    return local


def partial_grad_view(x: Any, mesh_dims: tuple[int, ...]) -> Any:
    """Return a view of ``x`` for a consumer whose cotangent is partial over ``mesh_dims``.

    ``x`` is a DTensor that is replicated on these mesh dimensions. The backward of the view all-reduces the cotangent.
    If ``x`` was gathered from a shard, backward does one reduce-scatter instead. If the gradient of ``x`` may stay
    partial, backward does not communicate.

    The view is cached on ``x``, or on the plain tensor that ``x`` was made from. So several consumers share one
    collective. Call it under `Platform.no_dispatch`.
    """
    layout = x._layout
    mesh = layout.mesh
    platform = mesh.platform
    if not mesh_dims or not platform.requires_grad(x):
        return x
    holder, key = x if x._origin is None else x._origin, (mesh, mesh_dims)
    gathered = x._gathered
    if gathered is not None and gathered[5] != x._version:
        gathered = x._gathered = None  # x itself was changed in place since
    if gathered is not None and mesh_dims == (gathered[1].mesh_dim,) and (view := made_with(x)) is not None:
        return view
    view = platform.read_cache(holder, key)
    if view is not None:
        if holder is not x and platform.read_cache(x, key) is not view:
            x._read_past = x._version  # another DTensor of the same plain tensor made it
        return view
    linear = platform.read_cache(holder, linear_key(mesh, mesh_dims))
    if gathered is not None and gathered[3] != (gathered[0]._writes, gathered[0]._version):
        gathered = None  # the shard was changed in place since it was gathered
    summands = summands_of(x)
    if summands is not None or gathered is not None or (linear is not None and holder is not x):
        x._read_past = x._version
    if summands is not None:
        view = summands[1](mesh_dims)
    elif gathered is None:
        if linear is None and isinstance(x, platform.Parameter):
            view = identity_reduce_grad(mesh, mesh_dims).of_parameter(x)
        elif linear is None:
            view = identity_reduce_grad(mesh, mesh_dims)(x)
        else:
            # Another consumer's cotangent may be shared with other tensors, and must not be overwritten.
            view = ConvertCotangent(platform, platform.clone)(linear.reshape(platform.shape_of(x)))
    else:
        source, step, data = gathered[:3]
        others = tuple(d for d in mesh_dims if d != step.mesh_dim)
        shard = partial_grad_view(source, others)
        gather = step if len(others) == len(mesh_dims) else step.for_parts
        view = gather.share(shard, platform.detach(data))
    platform.write_cache(holder, key, view)
    if holder is not x and x._read_past is None:
        platform.write_cache(x, key, view)  # tells that this view was made of x itself
    return view


def parameter_view(mesh: DeviceMesh, mesh_dim: int) -> Callable[[Any], Any]:
    """Return `partial_grad_view` over one mesh dimension as a function ``view(parameter)``, for parameters that are
    replicated there."""
    if mesh.shape[mesh_dim] == 1:
        return lambda x: x
    return identity_reduce_grad(mesh, (mesh_dim,)).of_parameter


def partial_key(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Any:
    """Return the key under which a tensor caches its `partial_grad_view`."""
    return mesh, mesh_dims


def redistribution_steps(source: Layout, target: Layout) -> tuple[Move, ...]:
    """Return the cheapest steps from ``source`` to ``target``, which have the same mesh and shape. All ranks get the
    same steps.

    Several mesh dimensions may shard one tensor dimension, each splitting the shards of the previous one. A step can
    undo only the last split, or add one split after all existing splits. The search over placements ensures this.
    """
    return _STEPS[source, target]


def redistribution_cost(source: Layout, target: Layout) -> float:
    """Return the number of elements that a rank sends and receives, for choosing between strategies."""
    return _COSTS[source, target]


def _steps(key: tuple[Layout, Layout]) -> tuple[Move, ...]:
    key[0].mesh.require_member("a redistribution")
    return tuple(itertools.starmap(_step_between, itertools.pairwise(_search(*key)[1])))


#: (source, target) -> steps. The second table holds their costs.
_STEPS: Table = Table(_steps, 1 << 14, "steps of redistributions")
_COSTS: Table = Table(lambda key: _search(*key)[0], 1 << 14, "costs of redistribution")


def _step_between(before: Layout, after: Layout) -> Move:
    """Return the step from ``before`` to ``after``, which differ on one mesh dimension."""
    pairs = zip(before.placements, after.placements, strict=True)
    mesh_dim = next(i for i, (p, q) in enumerate(pairs) if p is not q)
    source, target = before.placements[mesh_dim], after.placements[mesh_dim]
    kind = KINDS[step_between(_way(source), _way(target)) or ""]
    if kind is AllReduce:
        reductions = {"max": ReduceExtreme, "min": ReduceExtreme, "product": ReduceProduct}
        kind = reductions.get(source.reduce_op, AllReduce)  # type: ignore[attr-defined]
    return kind(before.mesh, mesh_dim, source, target, _sizes(before, mesh_dim), _sizes(after, mesh_dim), after)


def _way(placement: Placement) -> int | str | None:
    """Return a placement in the form that `step_between` takes."""
    return placement.dim if isinstance(placement, Shard) else SUMMANDS if placement.is_partial() else None


def _sizes(layout: Layout, mesh_dim: int) -> tuple[int, ...]:
    placement = layout.placements[mesh_dim]
    if not isinstance(placement, Shard):
        return ()
    return shard_sizes(placement, layout.size_within(placement.dim, mesh_dim), layout.mesh.shape[mesh_dim])


def _search(source: Layout, target: Layout) -> tuple[float, list[Layout]]:
    """Return cost and layouts of the cheapest path, by Dijkstra's algorithm over placements. Meshes have few
    dimensions, so the graph is tiny."""
    if source.mesh is not target.mesh or source.shape != target.shape:
        raise ValueError(f"cannot redistribute {source} to {target}: mesh and shape must be the same")
    candidates = {p for p in (*source.placements, *target.placements) if isinstance(p, Shard)}
    ordered = sorted(candidates, key=repr)
    counter = itertools.count()
    queue: list[tuple[float, int, Layout, list[Layout]]] = [(0.0, next(counter), source, [source])]
    done: set[Layout] = set()
    while queue:
        cost, _, layout, path = heapq.heappop(queue)
        if layout is target:
            return cost, path
        if layout in done:
            continue
        done.add(layout)
        for mesh_dim in range(layout.mesh.ndim):
            for placement, price in _moves(layout, target, mesh_dim, ordered):
                placements = list(layout.placements)
                placements[mesh_dim] = placement
                after = layout.with_placements(placements)
                heapq.heappush(queue, (cost + price, next(counter), after, [*path, after]))
    raise ValueError(
        f"cannot redistribute {source} to {target}: no collective produces the placements {target.placements}"
    )


def _moves(layout: Layout, target: Layout, mesh_dim: int, shards: list[Shard]) -> list[tuple[Placement, float]]:
    placement, size = layout.placements[mesh_dim], layout.mesh.shape[mesh_dim]
    # The size of the largest shard, since all ranks send padded buffers of that size. All ranks must compute the same
    # cost.
    local = math.prod(max(layout.part_sizes(dim)) for dim in range(layout.ndim))
    moves: list[tuple[Placement, float]] = []
    if isinstance(placement, Shard):
        if layout.shard_mesh_dims(placement.dim)[-1] != mesh_dim:  # the innermost split
            return moves
        moves.append((Replicate(), 1.0 + local * (size - 1)))
        if not isinstance(placement, PackedShard):
            moves += [
                (s, 1.0 + local * (size - 1) / size)
                for s in shards
                if not isinstance(s, PackedShard) and s.dim != placement.dim and _can_add(layout, s, mesh_dim)
            ]
    elif isinstance(placement, Partial):
        moves.append((Replicate(), 1.0 + 2 * local * (size - 1) / size))
        if placement.reduce_op in ("sum", "avg"):
            moves += [(s, 1.0 + local * (size - 1) / size) for s in shards if _can_add(layout, s, mesh_dim)]
    else:
        # Slicing is free in forward, and costs an all-gather in backward. So its cost is small, but not zero.
        moves += [(s, 0.25 * local * (size - 1) / size) for s in shards if _can_add(layout, s, mesh_dim)]
        wanted = target.placements[mesh_dim]
        # This must be the last step: zeros on the other ranks would make a later maximum wrong.
        if wanted.is_partial() and all(
            p.is_partial() or p is q for p, q in zip(target.placements, layout.placements, strict=True)
        ):
            moves.append((wanted, 0.0))
    return moves


def _can_add(layout: Layout, shard: Shard, mesh_dim: int) -> bool:
    """Return whether ``shard`` can be added on ``mesh_dim``, as the last split of its tensor dimension."""
    if layout.placements[mesh_dim] is shard or (isinstance(shard, PackedShard) and layout.packed_mesh_dim is not None):
        return False
    placements = (*layout.placements[:mesh_dim], shard, *layout.placements[mesh_dim + 1 :])
    order = cut_order(placements, layout.mesh.shape, shard.dim)
    return order is not None and order[-1] == mesh_dim
