"""Norms of distributed tensors, from the norms of local shards, for clipping gradients.

There is one all-reduce for each mesh dimension that shards any tensor, regardless of the number of tensors. Tensors on
several slices of one mesh are combined. A tensor is replicated along the dimensions that its slice lacks.
"""

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
    """Return the norm of all elements of several tensors (see `platform.contract.Core.total_norm`), and its mesh.

    A replicated tensor is counted by the first rank that holds it.
    """
    shares = _SHARES[tuple(layouts)]
    norms = [_norm_of_share(share, tensors, order, norm_of) for share in shares]
    total = norms[0]
    if len(norms) > 1:
        total = sum(norms[1:], total) if order == 0 else norm_of(norms)
    return total, shares[0].mesh


@dataclass(frozen=True)
class _Share:
    """This rank's contribution to the norm of all tensors on one mesh and on slices of that mesh.

    Attributes:
        mesh: the mesh.
        mesh_dims: mesh dimensions that shard any of the tensors. Norms are reduced along them.
        members: indices of all tensors of the share.
        counted: indices of the tensors that this rank counts.
        perhaps_empty: indices of uncounted tensors that may be globally empty.
        first: index of the first distributed tensor.
    """

    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    members: list[int]
    counted: list[int]
    perhaps_empty: list[int]
    first: int


def _shares(layouts: Sequence[Layout | None]) -> list[_Share]:
    """Return this rank's contributions to the norm, one for each mesh, in the order of the tensors. Plain tensors,
    which all ranks replicate, belong to the first mesh."""
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
        # A shard with elements is counted by the first of the ranks that hold it.
        counted = [
            i
            for i in members
            if all(d in sharding[i] or not coordinate[d] for d in mesh_dims)
            and ((layout := layouts[i]) is None or 0 not in layout.local_shape)
        ]
        others = [i for i in members if i not in counted and ((layout := layouts[i]) is None or 0 in layout.shape)]
        shares.append(_Share(mesh, mesh_dims, members, counted, others, first))
    return shares


#: layouts of all tensors -> `_shares`.
_SHARES = Table(_shares, 1 << 8, "shares of norms")


def _sharding(layout: Layout | None, mesh: DeviceMesh | None = None) -> tuple[int, ...]:
    """Return the mesh dimensions that shard a tensor, as dimensions of ``mesh`` if that is passed. The layout's mesh
    must then be a slice of ``mesh``."""
    if layout is None:
        return ()
    own = [d for d, p in enumerate(layout.placements) if isinstance(p, Shard)]
    return tuple(own if mesh is None else [mesh.index_of(layout.mesh, d) for d in own])


def _norm_of_share(share: _Share, tensors: Sequence[Any], order: float, norm_of: Callable[[Sequence[Any]], Any]) -> Any:
    platform = share.mesh.platform

    def nothing() -> Any:
        """Return the neutral element of a norm of this order."""
        return platform.full((1,), math.inf if order < 0 else 0.0, tensors[share.first])

    if order:
        mine = [tensors[i] for i in share.counted]
        # Some norms of empty tensors are errors, which all ranks should raise.
        mine += [tensors[i] for i in share.perhaps_empty if 0 in platform.shape_of(tensors[i])]
        return _combined(norm_of(mine or [nothing()]), share.mesh, share.mesh_dims, order)
    # An order of 0 counts the nonzero tensors, so each tensor needs an entry on all ranks.
    counted = set(share.counted)
    found = [norm_of([tensors[i] if i in counted else nothing()]).reshape((1,)) for i in share.members]
    return norm_of(list(_combined(platform.cat(found, 0), share.mesh, share.mesh_dims, order)))


def _combined(norms: Any, mesh: DeviceMesh, mesh_dims: Iterable[int], order: float) -> Any:
    """Return norms of global tensors from the ``norms`` of this rank's shards, which may be overwritten."""
    if math.isinf(order):
        for mesh_dim in mesh_dims:
            norms = collectives.all_reduce_extreme(norms, mesh, mesh_dim, "max" if order > 0 else "min")
        return norms
    along = [d for d in mesh_dims if mesh.shape[d] > 1]
    if order in (0, 1) or not along:
        return collectives.all_reduce_over(norms, mesh, along)
    return collectives.all_reduce_over(norms**order, mesh, along) ** (1.0 / order)


def norms_over_ranks(norms: Sequence[Any], layouts: Sequence[Layout | None], order: float) -> list[Any]:
    """Return the norm of each global tensor (see `platform.contract.Core.norms_over_ranks`)."""
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
    """Return the largest ``value`` of all ranks that share a sharded tensor (see
    `platform.contract.Core.largest_over_ranks`)."""
    known = [layout for layout in layouts if layout is not None]
    joined = joined_meshes(known)
    along = {(mesh, d) for layout in known for mesh in (joined[layout.mesh],) for d in _sharding(layout, mesh)}
    # All ranks must use the same order.
    for mesh, mesh_dim in sorted(along, key=lambda pair: (pair[0].ranks.ravel().tolist(), pair[1])):
        value = collectives.all_reduce(value, mesh, mesh_dim, "max")
    return value
