"""Layouts of tensors on several slices of one mesh: sharded shards, and layouts extended to a larger mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hyper_parallel.core.layouts.cuts import as_last_cut, in_order
from hyper_parallel.core.layouts.layout import Layout, get_layout, normalize_placements
from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Replicate, Shard

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh


def nest(inner: Layout | None, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor whose local shard under ``inner`` is placed as ``placements`` on ``mesh``.

    Tensor parallelism shards the tensor first, and the ranks of ``mesh`` then shard each local tensor. The result is on
    the mesh along both meshes, which must be slices of one root. The function uses facts that all ranks share, and does
    not communicate.

    Args:
        inner: the layout on another mesh; None for a tensor that every rank holds in full.
        mesh: the mesh over which each local tensor is distributed.
        placements: placements of the local tensor, one for each dimension of ``mesh``.
        shape: the global shape.

    Raises:
        ValueError: when ``shape`` is not that of ``inner``, the meshes have no common root or share a dimension, or the
            placements cannot be combined: a `PackedShard` must be the first split of its dimension.
        TypeError: when an item is not a placement.

    Example:
        >>> from hyper_parallel import Shard, init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        >>> inner = get_layout(mesh["tp"], (Shard(0),), (8, 4))
        >>> nest(inner, mesh["dp"], [Shard(0)], (8, 4)).placements
        (Shard(dim=0), Shard(dim=0))

    Source: the two-dimensional parameters of ``torch.distributed.fsdp.fully_shard``.
    """
    what = f"the part of a tensor of shape {tuple(shape)}"
    normal = normalize_placements(placements, mesh, len(shape), what)
    if inner is None:
        return get_layout(mesh, normal, shape)
    if tuple(inner.shape) != tuple(shape):
        raise ValueError(f"{inner} is not the layout of a tensor of shape {tuple(shape)}")
    both = mesh._concatenate([mesh, inner.mesh])
    found: list[Placement] = [Replicate()] * both.ndim
    for own, its_placements in ((inner.mesh, inner.placements), (mesh, normal)):
        for mesh_dim in in_order(its_placements, own.shape):
            place, placement = both.index_of(own, mesh_dim), its_placements[mesh_dim]
            if isinstance(placement, PackedShard):
                _check_first(found, placement, inner)
            elif isinstance(placement, Shard):
                placement = as_last_cut(found, both.shape, place, placement.dim)
            found[place] = placement
    return get_layout(both, tuple(found), shape)


def joined_meshes(layouts: Sequence[Layout | None]) -> dict[DeviceMesh, DeviceMesh]:
    """Return a mapping from each mesh of ``layouts`` to the joined mesh of the meshes with the same root.

    The joined mesh has the dimensions of all of them. A mesh maps to itself if there is no joined mesh.
    """
    meshes = list({layout.mesh: None for layout in layouts if layout is not None})
    found: dict[DeviceMesh, DeviceMesh] = {}
    for mesh in meshes:
        same_root = [other for other in meshes if mesh.shares_root(other)]
        found[mesh] = mesh.slices.union(same_root) or mesh
    return found


def on_joined_meshes(layouts: Sequence[Layout | None]) -> list[Layout | None]:
    """Return ``layouts``, extended to a common mesh if their meshes are slices of one root.

    Local tensors stay the same. A tensor is replicated along the dimensions that its own mesh lacks.
    """
    joined = joined_meshes(layouts)
    return [layout and _replicated_elsewhere(layout, joined[layout.mesh]) for layout in layouts]


def _replicated_elsewhere(layout: Layout, mesh: DeviceMesh) -> Layout:
    if mesh is layout.mesh:
        return layout
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for mesh_dim, placement in enumerate(layout.placements):
        placements[mesh.index_of(layout.mesh, mesh_dim)] = placement
    return get_layout(mesh, tuple(placements), layout.shape)


def _check_first(others: Sequence[Placement], packed: PackedShard, inner: Layout) -> None:
    """Raise ValueError if ``others`` shard the dimension of a packed shard, whose sizes refer to the global
    dimension."""
    if any(p.is_shard(packed.dim) for p in others):
        raise ValueError(
            f"{packed!r} must be the first placement that shards tensor dimension {packed.dim}, but a tensor of shape "
            f"{tuple(inner.shape)} is placed {list(inner.placements)} on {inner.mesh} already. Use "
            f"Shard({packed.dim}), or shard another dimension"
        )
