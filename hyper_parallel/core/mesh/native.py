"""Meshes of this library made from a framework's own meshes, and the other way round. Both share their groups."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.mesh.arrays import sub_array
from hyper_parallel.core.mesh.slices import Slices
from hyper_parallel.platform.mesh_methods import MeshMethods

if TYPE_CHECKING:
    from hyper_parallel.platform.contract import NativeMesh

#: The framework's mesh -> the world that there was when a mesh was made of it, and that mesh.
_MADE: weakref.WeakKeyDictionary[Any, tuple[Callable[[], Any], Any]] = weakref.WeakKeyDictionary()


class NativeMeshes(Slices, MeshMethods):
    """Relation of a `DeviceMesh` to the framework's own meshes."""

    #: Of a root: the framework's mesh that shares its groups, while somebody holds it. Kept weakly, because it may hold
    #: groups, which must not outlive the default group.
    _native: Callable[[], Any] | None = None

    def _get_root_mesh(self) -> Any:
        """`get_root_mesh`, by the name that torch's wrappers ask a mesh for."""
        return self.get_root_mesh()

    def _to_native(self) -> Any:
        platform, root = self.platform, self.get_root_mesh()
        if self._coordinate is None:
            raise ValueError(
                f"rank {platform.rank()} is not part of {self}, and has no groups to share: let only the ranks of the "
                "mesh do this, as in `if mesh.get_coordinate() is not None:`"
            )
        if any(len(dims) > 1 for dims in self._along):
            raise ValueError(
                f"a dimension of {self} was flattened here, and the framework's mesh of {root} does not know it: make "
                "that mesh first, flatten it, and make this library's of it"
            )
        native = None if root._native is None else root._native()
        if native is None:
            native = platform.native_mesh(root.ranks, root.mesh_dim_names, root._groups)
            root._native = weakref.ref(native)
        if root is self:
            return native
        return platform.native_mesh(self.ranks, self.mesh_dim_names, self._groups, native)


def made_of(native: Any, world: Any) -> Any:
    """The mesh that was made of the framework's own in this ``world``; None where there is none."""
    try:
        entry = _MADE.get(native)
    except TypeError:  # what is no mesh may have no hash, and no weak references
        return None
    return None if entry is None or entry[0]() is not world else entry[1]


def remember_made(native: Any, world: Any, mesh: Any) -> None:
    """Let `made_of` find ``mesh``."""
    _MADE[native] = (weakref.ref(world), mesh)


def slice_like(root: Any, known: NativeMesh) -> Any:
    """The slice of the mesh ``root`` with the ranks of a slice of the framework's own.

    Raises:
        ValueError: where it is none of whole dimensions, or this rank is not part of it.
    """
    coordinate, names = root.get_coordinate(), known.names or ()
    if coordinate is None:
        raise ValueError(f"a slice of a mesh without this rank: {root} is without rank {root.get_rank()}")
    place = next(zip(*(known.ranks == root.get_rank()).nonzero(), strict=True))
    for dim, name in enumerate(names):
        if name in root.mesh_dim_names or name in root._flat_names:
            continue
        row = known.ranks[tuple(slice(None) if d == dim else i for d, i in enumerate(place))].tolist()
        dims = _dims_of_row(root, row, coordinate)
        if dims is None:
            raise ValueError(
                f"dimension {name!r}, with the ranks {row} here, is not one of {root}, nor several as one: make a mesh "
                "that has it"
            )
        root._flat_groups.setdefault(dims, known.groups[dim])
        root._flat_names[name] = dims
    return root[names]


def _dims_of_row(root: Any, row: list[int], coordinate: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions of ``root`` that, as one, have the ranks ``row`` at ``coordinate``."""
    for count in range(2, root.ndim + 1):
        for dims in itertools.combinations(range(root.ndim), count):
            if sub_array(root.ranks, (dims,), coordinate).tolist() == row:
                return dims
    return None
