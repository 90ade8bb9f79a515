"""Conversion between meshes of this library and meshes of the framework. The two meshes share process groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from hyper_parallel.core.mesh.arrays import rows_by_dims
from hyper_parallel.core.mesh.roots import root_mesh

if TYPE_CHECKING:
    from hyper_parallel.platform import Platform
    from hyper_parallel.platform.contract import NativeMesh

_Mesh = TypeVar("_Mesh", bound=Any)

#: The framework's mesh -> (weak reference to the default group at the conversion, the converted `DeviceMesh`).
_MADE: weakref.WeakKeyDictionary[Any, tuple[Callable[[], Any], Any]] = weakref.WeakKeyDictionary()


def native_of(mesh: Any) -> Any:
    """Return the framework's mesh for ``mesh``. Slices of one mesh become slices of one framework mesh."""
    platform, root = mesh.platform, mesh.get_root_mesh()
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {platform.rank()} is not part of {mesh} and has no process groups of this mesh: run this code on "
            "the ranks of the mesh alone, under `if mesh.get_coordinate() is not None:`"
        )
    if any(len(dims) > 1 for dims in mesh.slices.along):
        raise ValueError(
            f"a dimension of {mesh} was flattened with this library, so the framework's mesh made from {root} lacks "
            "the flattened dimension. Make and flatten the framework's mesh first, and then convert the result to a "
            "mesh of this library"
        )
    native = root.groups.native_mesh()
    if native is None:
        native = platform.native_mesh(root.ranks, root.mesh_dim_names, root.groups.own)
        root.groups.share_with(weakref.ref(native))
    if root is mesh:
        return native
    return platform.native_mesh(mesh.ranks, mesh.mesh_dim_names, mesh.groups.own, native)


def mesh_of(cls: type[_Mesh], platform: Platform, native: Any) -> _Mesh:
    """Return the `DeviceMesh` for the framework's mesh ``native``. A mesh that was converted in this world already is
    reused."""
    world = platform.world()
    try:
        entry = _MADE.get(native)
    except TypeError:  # an object other than a mesh may have no hash, and no weak references
        entry = None
    made: _Mesh | None = entry[1] if entry is not None and entry[0]() is world else None
    if made is not None and made.get_root_mesh() is made:
        return made
    known = platform.describe_native_mesh(native)
    if known.root is not None:
        root = mesh_of(cls, platform, known.root)
        # Slices of different meshes of the framework are equal if their ranks and names are.
        if made is not None and made.get_root_mesh() is root:
            return made
        mesh: _Mesh = _slice_like(root, known)
    else:
        mesh = root_mesh(cls, platform, known.ranks, known.names, known.groups)
        if mesh.groups.own is known.groups:
            mesh.groups.share_with(weakref.ref(native))
    _MADE[native] = (weakref.ref(world), mesh)
    return mesh


def _slice_like(root: Any, known: NativeMesh) -> Any:
    """Return the slice of ``root`` with the ranks of a slice of the framework's mesh.

    Raises:
        ValueError: when the ranks are not a row along dimensions of ``root``, or this rank is outside ``root``.
    """
    names = known.names or ()
    if root.get_coordinate() is None:
        raise ValueError(
            f"cannot take a slice on a rank outside of the mesh: {root} does not have rank {root.get_rank()}"
        )
    place = next(zip(*(known.ranks == root.get_rank()).nonzero(), strict=True))
    for dim, name in enumerate(names):
        if name in root.mesh_dim_names or name in root.slices.flat_names:
            continue
        row = known.ranks[tuple(slice(None) if d == dim else i for d, i in enumerate(place))].tolist()
        # One dimension may do: one that the framework flattened to rename it.
        dims = next((dims for dims, rows in rows_by_dims(root.ranks) if tuple(row) in rows), None)
        if dims is None:
            raise ValueError(
                f"dimension {name!r} has the ranks {row}, which no dimension of {root} has, flattened or not: make a "
                "mesh with this dimension. If _unflatten of the framework's mesh made the dimension, use "
                "hyper_parallel.init_device_mesh, whose meshes have _unflatten too"
            )
        root.slices.flat_groups.setdefault(dims, known.groups[dim])
        root.slices.flat_names[name] = dims
    return root[names]
