"""Root meshes: made of new process groups, of existing groups, or by splitting a dimension of another root.

They are discarded when the default group is destroyed.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hyper_parallel.core.caches import clear_caches
from hyper_parallel.core.mesh.arrays import check_ranks_of_mesh, ranks_of, rows_along
from hyper_parallel.core.mesh.groups import NO_OVERRIDES, Overrides, override_of
from hyper_parallel.core.mesh.slices import MESHES, new_mesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.platform.registry import get_platform_for_device

_WORLDS: dict[Platform, weakref.ref[Any]] = {}
_Mesh = TypeVar("_Mesh", bound=Any)


def platform_for(device_type: str | None) -> Platform:
    """Return the platform that serves a device type; None for the selected platform."""
    if device_type is not None and not isinstance(device_type, str):
        raise TypeError(
            f"device_type must be a string such as 'cpu', got {device_type!r}. For the device of the platform, leave "
            "it out: init_device_mesh(mesh_shape=...)"
        )
    return get_platform() if device_type is None else get_platform_for_device(device_type)


def root_mesh(
    cls: type[_Mesh],
    platform: Platform,
    ranks: np.ndarray,
    names: tuple[str, ...] | None,
    groups: tuple[Any, ...] | None = None,
    overrides: Overrides = NO_OVERRIDES,
    only: Any = None,
) -> _Mesh:
    """Return the root mesh of ``ranks``. If no such mesh exists, create one, with ``groups`` or new process groups.

    Args:
        cls: the class of meshes.
        platform, ranks, names: platform, ranks and dimension names of the mesh.
        groups: this rank's group along each dimension; None to create them.
        overrides: how to create the groups.
        only: a key that separates meshes of existing groups from meshes whose groups the library created.
    """
    world = platform.world()
    if not is_current(platform):
        _forget(platform)
        _WORLDS[platform] = weakref.ref(world)
    key: tuple[Any, ...] = (platform, ranks.shape, tuple(ranks.ravel().tolist()), names)
    if any(backend is not None or options is not None for backend, options in overrides):
        key += (tuple((backend, id(options)) for backend, options in overrides),)
    if only is not None:
        key += (only,)
    found = MESHES.get(key)
    if found is None:
        if groups is None:
            groups = tuple(new_groups(platform, ranks, overrides))
        found = MESHES[key] = new_mesh(cls, platform, ranks, names, groups, overrides)
    mesh: _Mesh = found
    return mesh


def new_groups(platform: Platform, ranks: np.ndarray, overrides: Overrides = NO_OVERRIDES) -> Iterator[Any]:
    """Create process groups along each dimension of an array of ranks, and yield this rank's group for each dimension.
    All ranks of the world must call this function."""
    for dim in range(ranks.ndim):
        backend, options = overrides[dim] if overrides else (None, None)
        yield platform.new_group(rows_along(ranks, (dim,)), backend, options)


def overrides_of(
    backend_override: Any, ndim: int, names: Sequence[str] | None, what: str = "init_device_mesh"
) -> Overrides:
    """Return ``backend_override`` as one (backend, options) pair per dimension.

    Args:
        backend_override: None, a mapping, or one entry per dimension. Keys of a mapping are indices or names of
            dimensions. An entry is the name of a backend, options, or both as a pair.
        ndim, names: number and names of the mesh dimensions.
        what: the function that messages name.

    Raises:
        ValueError: for an unknown dimension, a dimension that is named twice, or a sequence of the wrong length.
    """
    if backend_override is None:
        return NO_OVERRIDES
    if not isinstance(backend_override, Mapping):
        given = tuple(backend_override)
        if len(given) != ndim:
            raise ValueError(f"{what}: backend_override has {len(given)} entries, but the mesh has {ndim} dimension(s)")
        return tuple(map(override_of, given))
    found: dict[int, Any] = {}
    for key, value in backend_override.items():
        dim = names.index(key) if names is not None and key in names else key
        if not isinstance(dim, int) or not 0 <= dim < ndim:
            raise ValueError(
                f"{what}: backend_override names the dimension {key!r}, but the mesh has {ndim} "
                f"dimension(s){'' if names is None else f' named {tuple(names)}'}"
            )
        if dim in found:
            raise ValueError(f"{what}: backend_override names dimension {dim} twice, by its index and by its name")
        found[dim] = override_of(value)
    return tuple(found.get(dim, (None, None)) for dim in range(ndim))


def is_current(platform: Platform) -> bool:
    """Return whether the known meshes of ``platform`` belong to the current default process group."""
    return platform in _WORLDS and _WORLDS[platform]() is platform.world()


def _forget(platform: Platform) -> None:
    """Discard all meshes of destroyed process groups, so that a mesh with the same ranks gets new groups."""
    for key in [key for key in MESHES if key[0] is platform]:
        del MESHES[key]
    if not platform.sends_nothing:  # caches keep meshes alive; a dry run must not clear caches of real groups
        clear_caches()


def mesh_of_groups(
    cls: type[_Mesh], platform: Platform, group: Any, mesh: Any, mesh_dim_names: Sequence[str] | None
) -> _Mesh:
    """Return the mesh of existing process groups (see `DeviceMesh.from_group`)."""
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
                f"the process group of dimension {dim} has the ranks {list(each.ranks)}, but no row of the mesh "
                f"{ranks.tolist()} along this dimension has them: pass one group for each dimension, in order"
            )
    made: _Mesh | None = MESHES.get((platform, ranks.shape, tuple(ranks.ravel().tolist()), names))
    groups, keys = tuple(each.group for each in known), tuple(each.key for each in known)
    if made is not None and made.get_coordinate() is not None and made.groups.keys() == keys:
        return made
    return root_mesh(cls, platform, ranks, names, groups, only=keys)


def unflattened(
    mesh: _Mesh, dim: int | str, mesh_sizes: Sequence[int], mesh_dim_names: Sequence[str], override: Any
) -> _Mesh:
    """Return a mesh in which one dimension of ``mesh`` is split into several (see `DeviceMesh._unflatten`)."""
    at, sizes, names = mesh._dim(dim, "_unflatten"), tuple(mesh_sizes), tuple(mesh_dim_names)
    if len(sizes) != len(names):
        raise ValueError(f"_unflatten takes one name for each size, got mesh_sizes={sizes}, mesh_dim_names={names}")
    if math.prod(sizes) != mesh.shape[at]:
        raise ValueError(
            f"_unflatten: the product of mesh_sizes={sizes} is {math.prod(sizes)}, but dimension {mesh.dim_label(at)} "
            f"of {mesh} has {mesh.shape[at]} rank(s)"
        )
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"{mesh} has no mesh_dim_names: pass mesh_dim_names to init_device_mesh to unflatten a dimension by name"
        )
    root = mesh.get_root_mesh()
    (in_root, *more) = mesh.slices.along[at]
    if more:
        raise ValueError(
            f"dimension {mesh.dim_label(at)} of {mesh} is a flattened dimension: use the mesh that was flattened"
        )
    whole: _Mesh = _cut(root, in_root, sizes, names, override)
    if root is mesh:
        return whole
    wanted = (*mesh.mesh_dim_names[:at], *names, *mesh.mesh_dim_names[at + 1 :])
    sliced: _Mesh = whole[wanted]
    return sliced


def _cut(root: Any, dim: int, sizes: tuple[int, ...], names: tuple[str, ...], backend_override: Any) -> Any:
    """Return the root mesh in which dimension ``dim`` of ``root`` is split into several."""
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
    groups = (*root.groups.own[:dim], *made, *root.groups.own[dim + 1 :])
    return root_mesh(type(root), root.platform, ranks, all_names, groups, every)
