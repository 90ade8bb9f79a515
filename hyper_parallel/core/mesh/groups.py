"""Meshes made of process groups that are there, or by cutting a dimension of another mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from hyper_parallel.core.mesh.arrays import check_ranks_of_mesh, ranks_of, rows_along
from hyper_parallel.core.mesh.native import NativeMeshes
from hyper_parallel.core.mesh.roots import overrides_of, root_mesh
from hyper_parallel.core.mesh.slices import MESHES, new_mesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.registry import get_platform_for_device

_Mesh = TypeVar("_Mesh", bound="MeshGroups")


class MeshGroups(NativeMeshes):
    """What `DeviceMesh` has to do with process groups that others have made."""

    @classmethod
    def from_group(
        cls: type[_Mesh],
        group: Any,
        device_type: str | None = None,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> _Mesh:
        """The mesh of process groups that there are. Makes none.

        All ranks of the groups call it. Where there is a mesh of these ranks, names and groups already, it is that.

        Args:
            group: one process group of the framework, for a 1-D mesh; or this rank's along each dimension.
            device_type: as in `DeviceMesh`.
            mesh: array of the global ranks; needed for several groups.
            mesh_dim_names: one name per dimension; needed for several groups.

        Raises:
            TypeError: for what is no process group of the framework.
            ValueError: when ranks or names are missing, or do not fit the groups.

        Example:
            >>> from hyper_parallel import DeviceMesh, init_device_mesh
            >>> world = init_device_mesh("cpu", (1,)).get_group()
            >>> DeviceMesh.from_group(world, "cpu", mesh_dim_names=("tp",)).get_group() is world
            True

        Source: ``torch.distributed.device_mesh.DeviceMesh.from_group``.
        """
        platform = get_platform() if device_type is None else get_platform_for_device(device_type)
        several = isinstance(group, (list, tuple))
        known = [platform.describe_group(each) for each in (group if several else [group])]
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        if not known:
            raise ValueError("from_group needs a process group for each dimension of the mesh, got none")
        if several and len(known) > 1 and (mesh is None or names is None):
            raise ValueError(f"from_group needs mesh and mesh_dim_names for {len(known)} process groups")
        ranks = ranks_of(known[0].ranks if mesh is None else mesh)
        if ranks.ndim != len(known):
            raise ValueError(f"the mesh {ranks.tolist()} has {ranks.ndim} dimension(s), got {len(known)} group(s)")
        check_ranks_of_mesh(ranks, names, platform.world_size())
        for dim, each in enumerate(known):
            if list(each.ranks) not in rows_along(ranks, (dim,)):
                raise ValueError(
                    f"the process group of dimension {dim} has the ranks {list(each.ranks)}, which are no row of the "
                    f"mesh {ranks.tolist()} along it"
                )
        made: _Mesh | None = MESHES.get((platform, ranks.shape, tuple(ranks.ravel().tolist()), names))
        if made is not None and made._coordinate is not None:
            own = [platform.describe_group(platform.native_group(g)).key for g in made._groups]
            if own == [each.key for each in known]:
                return made
        groups, keys = tuple(each.group for each in known), tuple(each.key for each in known)
        return root_mesh(cls, platform, ranks, names, groups, only=keys)

    def _unflatten(
        self: _Mesh,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[int | str, Any] | None = None,
    ) -> _Mesh:
        """The mesh with several dimensions in place of one. All ranks of the world must call it.

        It is a mesh with a root of its own. Of two meshes that one was cut into, dimensions with the same ranks in the
        same order are the same: a plan may be on the one, and `fully_shard` on the other.

        Args:
            dim: the dimension, by index or name.
            mesh_sizes: sizes of the new ones, in row-major order.
            mesh_dim_names: their names.
            backend_override: for their groups, as in `init_device_mesh`.

        Raises:
            ValueError: for a dimension that the mesh does not have or that was flattened, sizes that do not multiply to
                its size, or names that the mesh has already.

        Example:
            >>> from hyper_parallel import init_device_mesh
            >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("world",))
            >>> mesh._unflatten("world", (1, 1), ("dp", "tp")).mesh_dim_names
            ('dp', 'tp')

        Source: ``torch.distributed.device_mesh.DeviceMesh._unflatten``.
        """
        at, sizes, names = self._dim(dim, "_unflatten"), tuple(mesh_sizes), tuple(mesh_dim_names)
        if len(sizes) != len(names):
            raise ValueError(f"_unflatten takes one name for each size, got mesh_sizes={sizes}, mesh_dim_names={names}")
        if math.prod(sizes) != self.shape[at]:
            raise ValueError(
                f"_unflatten: mesh_sizes={sizes} multiply to {math.prod(sizes)}, and dimension {self.dim_label(at)} of "
                f"{self} has {self.shape[at]} rank(s)"
            )
        if self.mesh_dim_names is None:
            raise ValueError(f"{self} has no mesh_dim_names: give them to init_device_mesh to cut a dimension by name")
        root = self.get_root_mesh()
        (in_root, *more) = self._along[at]
        if more:
            raise ValueError(f"dimension {self.dim_label(at)} of {self} was flattened: use the mesh that it is made of")
        whole = _cut(root, in_root, sizes, names, backend_override)
        if root is self:
            return whole
        wanted = (*self.mesh_dim_names[:at], *names, *self.mesh_dim_names[at + 1 :])
        sliced: _Mesh = whole[wanted]
        return sliced

    def _get_all_submeshes(self: _Mesh, mesh_dim_name: str) -> list[_Mesh]:
        """The slices along one dimension, of all ranks of this mesh; those without this rank have no groups here.

        Args:
            mesh_dim_name: name of the dimension.

        Raises:
            ValueError: when the mesh has no such dimension.

        Source: ``torch.distributed.device_mesh.DeviceMesh._get_all_submeshes``.
        """
        dim = self._dim(mesh_dim_name, "_get_all_submeshes")
        mine: _Mesh = self[mesh_dim_name]
        found = []
        for ranks in map(ranks_of, rows_along(self.ranks, (dim,))):
            if ranks.tolist() == mine.ranks.tolist():
                found.append(mine)
                continue
            key = (self.platform, self.get_root_mesh(), self._along[dim], mesh_dim_name, tuple(ranks.tolist()))
            if key not in MESHES:
                MESHES[key] = new_mesh(type(self), self.platform, ranks, (mesh_dim_name,), (None,))
                MESHES[key]._root, MESHES[key]._along = mine._root, mine._along
            found.append(MESHES[key])
        return found


def _cut(root: Any, dim: int, sizes: tuple[int, ...], names: tuple[str, ...], backend_override: Any) -> Any:
    """A root mesh with dimension ``dim`` of another one cut into several."""
    overrides = overrides_of(backend_override, len(sizes), names, "_unflatten")
    ranks = root.ranks.reshape(*root.shape[:dim], *sizes, *root.shape[dim + 1 :])
    own = root.mesh_dim_names
    all_names = (*own[:dim], *names, *own[dim + 1 :])
    check_ranks_of_mesh(ranks, all_names, root.platform.world_size())
    if CHECKS:
        CHECKS[-1].agree("DeviceMesh._unflatten", {"the mesh": str(ranks.tolist()), "mesh_dim_names": str(all_names)})
    key = (root.platform, ranks.shape, tuple(ranks.ravel().tolist()), all_names)
    found = MESHES.get(key)
    if found is not None and not overrides:
        return found
    every = overrides and (*[(None, None)] * dim, *overrides, *[(None, None)] * (root.ndim - dim - 1))
    made = [
        root.platform.new_group(rows_along(ranks, (d,)), *(every[d] if every else (None, None)))
        for d in range(dim, dim + len(sizes))
    ]
    groups = (*root._groups[:dim], *made, *root._groups[dim + 1 :])
    return root_mesh(type(root), root.platform, ranks, all_names, groups, every)
