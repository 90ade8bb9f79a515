"""Meshes that are no slices: made of new groups or of given ones, and forgotten when the default group is gone."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hyper_parallel.core.caches import clear_caches
from hyper_parallel.core.mesh.arrays import rows_along
from hyper_parallel.core.mesh.slices import MESHES, new_mesh, override_of
from hyper_parallel.platform import Platform

_WORLDS: dict[Platform, weakref.ref[Any]] = {}
_Mesh = TypeVar("_Mesh")

#: For each dimension the backend and the options of its groups, None for the platform's own.
Overrides = tuple[tuple[Any, Any], ...]
#: Of a mesh that has none.
NO_OVERRIDES: Overrides = ()


def root_mesh(
    cls: type[_Mesh],
    platform: Platform,
    ranks: np.ndarray,
    names: tuple[str, ...] | None,
    groups: tuple[Any, ...] | None = None,
    overrides: Overrides = NO_OVERRIDES,
    only: Any = None,
) -> _Mesh:
    """The mesh that is no slice, made where it is not there yet, of ``groups`` or new ones.

    Args:
        cls: the class of meshes.
        platform, ranks, names: of the mesh.
        groups: this rank's along each dimension, None where they are to be made.
        overrides: how to make them.
        only: what tells meshes of given groups from those that the library has made groups for.
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
        found = MESHES[key] = new_mesh(cls, platform, ranks, names, groups)
        found._root, found._along = None, tuple((dim,) for dim in range(ranks.ndim))
        found._flat_groups, found._flat_names = {}, {}
        found._overrides = overrides  # options are told apart by identity, so they live as long as the mesh
    mesh: _Mesh = found
    return mesh


def new_groups(platform: Platform, ranks: np.ndarray, overrides: Overrides = NO_OVERRIDES) -> Iterator[Any]:
    """This rank's group along each dimension of an array of ranks. All ranks of the world call it."""
    for dim in range(ranks.ndim):
        backend, options = overrides[dim] if overrides else (None, None)
        yield platform.new_group(rows_along(ranks, (dim,)), backend, options)


def overrides_of(
    backend_override: Any, ndim: int, names: Sequence[str] | None, what: str = "init_device_mesh"
) -> Overrides:
    """``backend_override`` as users give it, dimension by dimension.

    Args:
        backend_override: None; by index or name of the dimension the name of a backend, options, or both as a pair; or
            a sequence of such pairs, one for each dimension.
        ndim, names: of the mesh.
        what: the function, for messages.

    Raises:
        ValueError: for a dimension that the mesh does not have, that is named twice, or of which nothing is said.
    """
    if backend_override is None:
        return NO_OVERRIDES
    if not isinstance(backend_override, Mapping):
        given = tuple(backend_override)
        if len(given) != ndim:
            raise ValueError(f"{what}: backend_override has {len(given)} entries, and the mesh {ndim} dimension(s)")
        return tuple(map(override_of, given))
    found: dict[int, Any] = {}
    for key, value in backend_override.items():
        dim = names.index(key) if names is not None and key in names else key
        if not isinstance(dim, int) or not 0 <= dim < ndim:
            raise ValueError(
                f"{what}: backend_override names the dimension {key!r}, and the mesh has {ndim} dimension(s)"
                f"{'' if names is None else f' named {tuple(names)}'}"
            )
        if dim in found:
            raise ValueError(f"{what}: backend_override names dimension {dim} twice, by its index and by its name")
        found[dim] = override_of(value)
    return tuple(found.get(dim, (None, None)) for dim in range(ndim))


def is_current(platform: Platform) -> bool:
    """Whether the meshes of ``platform`` belong to the process groups that there are now."""
    return platform in _WORLDS and _WORLDS[platform]() is platform.world()


def _forget(platform: Platform) -> None:
    """Drop what belongs to process groups that were destroyed: a mesh with the same ranks gets new groups."""
    for key in [key for key in MESHES if key[0] is platform]:
        del MESHES[key]
    if not platform.sends_nothing:  # caches keep meshes alive; a dry run must leave those of real groups as they are
        clear_caches()
