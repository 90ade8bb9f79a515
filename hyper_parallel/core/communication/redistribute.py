"""Redistribution: the cheapest sequence of steps between two layouts, and the views through which gradients reduce."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.caches import Table
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
    """The DTensor ``x`` with ``layout``, which has its mesh and shape; ``x`` itself when it has that layout already.

    Call it under `Platform.no_dispatch`.
    """
    source = x._layout
    if source is layout:
        return x
    for step in _PLANS[source, layout]:
        x = step.move(x)
    return x


def redistribute_local(local: Any, source: Layout, target: Layout) -> Any:
    """`redistribute` for a local tensor of layout ``source``; differentiable."""
    for step in plan_redistribution(source, target):
        local = step(local)
    return local


def partial_grad_view(x: Any, mesh_dims: tuple[int, ...]) -> Any:
    """The local tensor of ``x`` for a consumer whose cotangent is partial over ``mesh_dims``.

    ``x`` is a DTensor replicated on these mesh dimensions. The view has the same data. Its backward all-reduces. Where
    ``x`` was gathered from a shard, it does one reduce-scatter instead. Where the gradient of ``x`` is left as
    summands, it sends nothing. The view is kept on ``x``, or on the plain tensor that ``x`` was made from. So several
    consumers share one collective. Call it under `Platform.no_dispatch`.
    """
    layout = x._layout
    mesh = layout.mesh
    platform = mesh.platform
    if not mesh_dims or not platform.requires_grad(x):
        return x
    holder, key = x if x._origin is None else x._origin, (mesh, mesh_dims)
    gathered = x._gathered
    if gathered is not None and (view := made_with(x, gathered)) is not None and mesh_dims == (gathered[1].mesh_dim,):
        return view
    view = platform.read_cache(holder, key)
    if view is not None:
        return view
    linear = platform.read_cache(holder, linear_key(mesh, mesh_dims))
    if gathered is not None and gathered[3] != (gathered[0]._writes, gathered[0]._version):
        gathered = None  # the shard has another value and another history by now
    if x._summands is not None:
        view = x._summands[1](mesh_dims)
    elif gathered is None:
        if linear is None and isinstance(x, platform.Parameter):
            view = identity_reduce_grad(mesh, mesh_dims).of_parameter(x)
        elif linear is None:
            view = identity_reduce_grad(mesh, mesh_dims)(x)
        else:
            # Other consumers may return a cotangent that has another owner too, which must not be overwritten.
            view = ConvertCotangent(platform, platform.clone)(linear.reshape(platform.shape_of(x)))
    else:
        source, step, data = gathered[:3]
        others = tuple(d for d in mesh_dims if d != step.mesh_dim)
        shard = partial_grad_view(source, others)
        gather = step if len(others) == len(mesh_dims) else step.for_parts
        view = gather.share(shard, platform.detach(data))
    platform.write_cache(holder, key, view)
    return view


def made_with(x: Any, gathered: tuple) -> Any:
    """Return the tensor that was made together with the DTensor ``x``, whose `DTensor._gathered` is given. It serves
    consumers whose cotangent is partial over the mesh dimension of its shards. Returns None where there is none, or
    ``x`` has changed since."""
    return gathered[4] if gathered[5] == x._version else None


def parameter_view(mesh: DeviceMesh, mesh_dim: int) -> Callable[[Any], Any]:
    """`partial_grad_view` over one mesh dimension as ``view(parameter)``, of parameters that are replicated there."""
    if mesh.shape[mesh_dim] == 1:
        return lambda x: x
    return identity_reduce_grad(mesh, (mesh_dim,)).of_parameter


def partial_key(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Any:
    """The key under which a tensor keeps its `partial_grad_view`."""
    return mesh, mesh_dims


def plan_redistribution(source: Layout, target: Layout) -> tuple[Move, ...]:
    """The cheapest steps from ``source`` to ``target`` (same mesh and shape), the same on every rank.

    Several mesh dimensions may shard one tensor dimension: each cuts the parts of those before it. Only the last cut
    can be undone. A new cut can only be the last. The search over placements respects that by construction.
    """
    return _PLANS[source, target]


def redistribution_cost(source: Layout, target: Layout) -> float:
    """Elements that a rank sends and receives in all, for choosing between strategies."""
    return _COSTS[source, target]


def _plan(key: tuple[Layout, Layout]) -> tuple[Move, ...]:
    key[0].mesh.require_member("a redistribution")
    return tuple(itertools.starmap(_step_between, itertools.pairwise(_search(*key)[1])))


#: (source, target) -> steps, and their cost.
_PLANS: Table = Table(_plan, 1 << 14, "plans of redistribution")
_COSTS: Table = Table(lambda key: _search(*key)[0], 1 << 14, "costs of redistribution")


def _step_between(before: Layout, after: Layout) -> Move:
    """The step from ``before`` to ``after``, which differ on one mesh dimension."""
    pairs = zip(before.placements, after.placements, strict=True)
    mesh_dim = next(i for i, (p, q) in enumerate(pairs) if p is not q)
    source, target = before.placements[mesh_dim], after.placements[mesh_dim]
    kind = KINDS[step_between(_way(source), _way(target)) or ""]
    if kind is AllReduce:
        reductions = {"max": ReduceExtreme, "min": ReduceExtreme, "product": ReduceProduct}
        kind = reductions.get(source.reduce_op, AllReduce)  # type: ignore[attr-defined]
    return kind(before.mesh, mesh_dim, source, target, _sizes(before, mesh_dim), _sizes(after, mesh_dim), after)


def _way(placement: Placement) -> int | str | None:
    """A placement as `step_between` takes it."""
    return placement.dim if isinstance(placement, Shard) else SUMMANDS if placement.is_partial() else None


def _sizes(layout: Layout, mesh_dim: int) -> tuple[int, ...]:
    placement = layout.placements[mesh_dim]
    if not isinstance(placement, Shard):
        return ()
    return shard_sizes(placement, layout.size_within(placement.dim, mesh_dim), layout.mesh.shape[mesh_dim])


def _search(source: Layout, target: Layout) -> tuple[float, list[Layout]]:
    """Dijkstra's algorithm over placements. Meshes have few dimensions, so the graph is tiny."""
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
    raise ValueError(f"no way to redistribute {source} to {target}: nothing can be turned into {target.placements}")


def _moves(layout: Layout, target: Layout, mesh_dim: int, shards: list[Shard]) -> list[tuple[Placement, float]]:
    placement, size = layout.placements[mesh_dim], layout.mesh.shape[mesh_dim]
    # Of the rank that has most, since all send buffers of that size: the answer must be the same on every rank.
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
        # Slicing is free now and costs an all-gather in backward: cheap, but not for nothing.
        moves += [(s, 0.25 * local * (size - 1) / size) for s in shards if _can_add(layout, s, mesh_dim)]
        wanted = target.placements[mesh_dim]
        # Last of all: a value on one rank and zeros on the others would spoil a maximum still to be taken.
        if wanted.is_partial() and all(
            p.is_partial() or p is q for p, q in zip(target.placements, layout.placements, strict=True)
        ):
            moves.append((wanted, 0.0))
    return moves


def _can_add(layout: Layout, shard: Shard, mesh_dim: int) -> bool:
    """Return whether ``shard`` on ``mesh_dim`` would be the last cut of its tensor dimension."""
    if layout.placements[mesh_dim] is shard or (isinstance(shard, PackedShard) and layout.packed_mesh_dim is not None):
        return False
    placements = (*layout.placements[:mesh_dim], shard, *layout.placements[mesh_dim + 1 :])
    order = cut_order(placements, layout.mesh.shape, shard.dim)
    return order is not None and order[-1] == mesh_dim
