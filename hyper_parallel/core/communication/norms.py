"""Norms of distributed tensors from those of the parts that ranks hold, for clipping gradients.

There is one all-reduce for each mesh dimension that shards some of the tensors, whatever their number. Tensors on
slices of one mesh are taken together: along the dimensions that its slice lacks, a tensor is the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication import collectives
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.nesting import joined_meshes
from hyper_parallel.core.layouts.placement_types import Shard

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh


def total_norm(
    tensors: Sequence[Any], layouts: Sequence[Layout | None], order: float, norm_of: Callable[[Sequence[Any]], Any]
) -> tuple[Any, DeviceMesh]:
    """See `platform.contract.Core.total_norm`. A tensor that is the same on several ranks is counted by the first."""
    shares = _SHARES[tuple(layouts)]
    norms = [_norm_of_share(share, tensors, order, norm_of) for share in shares]
    total = norms[0]
    if len(norms) > 1:
        total = sum(norms[1:], total) if order == 0 else norm_of(norms)
    return total, shares[0].mesh


@dataclass(frozen=True)
class _Share:
    """Share of this rank in the tensors on one mesh, and on slices of it.

    Attributes:
        mesh: the mesh.
        mesh_dims: those that some of the tensors are sharded by, along which is summed.
        members: indices of all the tensors.
        counted: those that this rank counts.
        perhaps_empty: others, which may have no elements on any rank.
        first: index of one that is distributed.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    members: list[int]
    counted: list[int]
    perhaps_empty: list[int]
    first: int


def _shares(layouts: Sequence[Layout | None]) -> list[_Share]:
    """The shares of this rank, one for each mesh, in the order of the tensors. Plain tensors, the same on all ranks, go
    with the first mesh."""
    shares = []
    joined = joined_meshes(layouts)
    first_mesh = next(iter(joined.values()))
    for mesh in dict.fromkeys(joined.values()):
        members = [i for i, layout in enumerate(layouts) if (joined[layout.mesh] if layout else first_mesh) is mesh]
        sharding = {i: _sharding(layouts[i], mesh) for i in members}
        mesh_dims = tuple(sorted(set().union(*sharding.values())))
        first = next(i for i in members if layouts[i] is not None)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            shares.append(_Share(mesh, (), members, [], [], first))
            continue
        # The first of the ranks that hold the same part, if that has elements.
        counted = [
            i
            for i in members
            if all(d in sharding[i] or not coordinate[d] for d in mesh_dims)
            and ((layout := layouts[i]) is None or 0 not in layout.local_shape)
        ]
        others = [i for i in members if i not in counted and ((layout := layouts[i]) is None or 0 in layout.shape)]
        shares.append(_Share(mesh, mesh_dims, members, counted, others, first))
    return shares


#: layouts of all tensors -> `_shares` of them.
_SHARES = Table(_shares, 1 << 8, "shares of norms")


def _sharding(layout: Layout | None, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """The mesh dimensions that shard a tensor. With ``mesh``, of which its mesh is a slice, they are those of
    ``mesh``."""
    if layout is None:
        return ()
    own = [d for d, p in enumerate(layout.placements) if isinstance(p, Shard)]
    return tuple(own if mesh is None else [mesh.index_of(layout.mesh, d) for d in own])


def _norm_of_share(share: _Share, tensors: Sequence[Any], order: float, norm_of: Callable[[Sequence[Any]], Any]) -> Any:
    platform = share.mesh.platform

    def nothing() -> Any:
        """The element that does not count in a norm of this order."""
        return platform.full((1,), math.inf if order < 0 else 0.0, tensors[share.first])

    if order:
        mine = [tensors[i] for i in share.counted]
        # Some norms of nothing are errors, which all ranks should raise.
        mine += [tensors[i] for i in share.perhaps_empty if 0 in platform.shape_of(tensors[i])]
        return _combined(norm_of(mine or [nothing()]), share.mesh, share.mesh_dims, order)
    # The number of tensors that are not zero: all ranks must know of each.
    counted = set(share.counted)
    found = [norm_of([tensors[i] if i in counted else nothing()]).reshape((1,)) for i in share.members]
    return norm_of(list(_combined(platform.cat(found, 0), share.mesh, share.mesh_dims, order)))


def _combined(norms: Any, mesh: DeviceMesh, mesh_dims: Iterable[int], order: float) -> Any:
    """Norms of whole tensors, from the ``norms`` of this rank's parts, which may be overwritten."""
    if math.isinf(order):
        for mesh_dim in mesh_dims:
            norms = collectives.all_reduce_extreme(norms, mesh, mesh_dim, "max" if order > 0 else "min")
        return norms
    along = [d for d in mesh_dims if mesh.shape[d] > 1]
    if order in (0, 1) or not along:
        return collectives.all_reduce_over(norms, mesh, along)
    return collectives.all_reduce_over(norms**order, mesh, along) ** (1.0 / order)


def norms_over_ranks(norms: Sequence[Any], layouts: Sequence[Layout | None], order: float) -> list[Any]:
    """See `platform.contract.Core.norms_over_ranks`."""
    groups: dict[tuple[DeviceMesh, tuple[int, ...]], list[int]] = {}
    for i, layout in enumerate(layouts):
        if layout is not None and (mesh_dims := _sharding(layout)):
            groups.setdefault((layout.mesh, mesh_dims), []).append(i)
    found = list(norms)
    for (mesh, mesh_dims), indices in groups.items():
        own = [norms[i] for i in indices]
        combined = collectives.together(own, mesh.platform, _combined, mesh, mesh_dims, order)
        for i, norm in zip(indices, combined, strict=True):
            found[i] = norm
    return found


def largest_over_ranks(value: Any, layouts: Iterable[Layout | None]) -> Any:
    """See `platform.contract.Core.largest_over_ranks`."""
    known = [layout for layout in layouts if layout is not None]
    joined = joined_meshes(known)
    along = {(mesh, d) for layout in known for mesh in (joined[layout.mesh],) for d in _sharding(layout, mesh)}
    # In an order that all ranks share.
    for mesh, mesh_dim in sorted(along, key=lambda pair: (pair[0].ranks.ravel().tolist(), pair[1])):
        value = collectives.all_reduce(value, mesh, mesh_dim, "max")
    return value
