"""Unpickling of meshes, which finds each mesh among the existing ones."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import numpy as np

from hyper_parallel.core.mesh.roots import is_current
from hyper_parallel.core.mesh.slices import MESHES
from hyper_parallel.platform import Platform

__all__ = ["rebuilt"]

_Mesh = TypeVar("_Mesh", bound=Any)


def rebuilt(
    cls: type[_Mesh],
    platform: Platform,
    ranks: list,
    names: tuple[str, ...] | None,
    root_ranks: list | None = None,
    root_names: tuple[str, ...] | None = None,
) -> _Mesh:
    """Return the mesh of this process that equals a pickled one.

    Creating process groups takes all ranks of the world, and a rank cannot know whether all ranks are unpickling. So
    the mesh must exist, need no new group, or equal a dimension of an existing mesh. A slice of the root mesh from
    which the pickled mesh was sliced is preferred.

    Raises:
        RuntimeError: when no mesh of this process fits.
    """
    wanted = np.asarray(ranks, dtype=np.int64)
    world = platform.world()
    for exactly in (True, False):
        if not exactly and (world is None or platform.world_size() == 1):
            if wanted.size == 1 and not wanted.any():
                return cls(platform.device_type, wanted, mesh_dim_names=names)
        elif not exactly and wanted.ndim == 1 and ranks == list(range(platform.world_size())):
            return cls(platform.device_type, wanted, mesh_dim_names=names)
        for mesh in [m for m in list(MESHES.values()) if m.platform is platform and is_current(platform)]:
            root = mesh.get_root_mesh()
            if exactly and (root.ranks.tolist(), root.mesh_dim_names) != (root_ranks or ranks, root_names or names):
                continue
            with contextlib.suppress(KeyError):  # the mesh has other names
                mesh = mesh if names is None else mesh[names]
            if mesh.mesh_dim_names == names and mesh.ranks.tolist() == ranks:
                return mesh
    size = 1 if world is None else platform.world_size()
    raise RuntimeError(
        f"the loaded tensor or mesh was saved on the mesh {ranks} with mesh_dim_names={names}, which rank "
        f"{0 if world is None else platform.rank()} of a world of {size} rank(s) has not made. Make the mesh first, "
        "with init_device_mesh on all ranks, and slice the dimension for parallelize_module. Then load the file of "
        "each rank on this rank. To load on another number of ranks, save full_tensor() of each entry, which all "
        "ranks must call"
    )
