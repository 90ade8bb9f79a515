"""Slices of a mesh: along some of its dimensions, with dimensions flattened into one, or concatenated.

All slices refer to the mesh that they were sliced from, their root.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from hyper_parallel.core.caches import Table
from hyper_parallel.core.mesh.arrays import rows_along, rows_by_dims, sub_array
from hyper_parallel.core.mesh.groups import NO_OVERRIDES, MeshGroups, Overrides, override_of
from hyper_parallel.core.observers import CHECKS

if TYPE_CHECKING:
    from hyper_parallel.platform import Platform

__all__ = ["MESHES", "MeshSlices", "common_root", "concatenate", "new_mesh"]

_Mesh = TypeVar("_Mesh", bound=Any)

#: All meshes, by the key that identifies each: platform, ranks, names, groups or root.
MESHES: dict[tuple, Any] = {}


class MeshSlices(Generic[_Mesh]):
    """The dimensions of the root that a mesh covers, and the slices of the mesh.

    Args:
        mesh: the mesh that owns this object. The reference is weak, so that the mesh is freed with its last other
            reference.
        root: the mesh that ``mesh`` was sliced from, None if ``mesh`` is a root.
        along: for each dimension of ``mesh``, the dimensions of the root that it covers. A flattened dimension covers
            several.

    Attributes:
        along: the argument.
        flat_groups: on a root, flattened dimensions -> this rank's group of them.
        flat_names: on a root, name of a flattened dimension -> the dimensions that it covers.
    """

    def __init__(self, mesh: _Mesh, root: _Mesh | None, along: tuple[tuple[int, ...], ...]) -> None:
        self.along = along
        self.flat_groups: dict[tuple[int, ...], Any] = {}
        self.flat_names: dict[str, tuple[int, ...]] = {}
        self._root, self._of = root, weakref.ref(mesh)

    @property
    def _mesh(self) -> _Mesh:
        mesh: Any = self._of()
        return mesh

    @property
    def root(self) -> _Mesh:
        """The mesh that this mesh was sliced from, or the mesh itself if it is not a slice."""
        return self._mesh if self._root is None else self._root

    def rows(self) -> list[list[int]]:
        """Return the ranks of all slices of the root along these dimensions (see `DeviceMesh.rows`)."""
        return rows_along(self.root.ranks, [dim for entry in self.along for dim in entry])

    def along_in(self, root: Any) -> tuple[tuple[int, ...], ...] | None:
        """Return, for each dimension, the dimensions of ``root`` that it covers (see `DeviceMesh.along_in`)."""
        return self.along if self.root is root else _ALONG[self._mesh, root]

    def index_of(self, other: Any, mesh_dim: int) -> int:
        """Return the dimension of this mesh that equals a dimension of ``other`` (see `DeviceMesh.index_of`)."""
        along = other.slices.along_in(self.root)
        if along is None:
            raise ValueError(f"{other} is not a slice of {self.root}")
        return self.along.index(along[mesh_dim])

    def is_beside(self, other: Any) -> bool:
        """Return whether both meshes are slices of one mesh, along different dimensions."""
        common = common_root([self._mesh, other])
        if common is None:
            return False
        mine, others = ({dim for entry in along for dim in entry} for along in common[1])
        return mine.isdisjoint(others)

    def spans(self, other: Any) -> bool:
        """Return whether both meshes are slices of one mesh, and ``self`` contains all ranks of ``other``."""
        common = common_root([self._mesh, other])
        if common is None:
            return False
        mine, others = ({dim for entry in along for dim in entry} for along in common[1])
        return mine >= others

    def contains(self, other: Any) -> bool:
        """Return whether both meshes are slices of one mesh, and ``self`` has all dimensions of ``other``."""
        along = other.slices.along_in(self.root)
        return along is not None and set(along) <= set(self.along)

    def along_dims(self, asked: tuple[str | int, ...]) -> _Mesh:
        """Return the slice along some dimensions, by name or index (see `DeviceMesh.__getitem__`)."""
        mesh, root = self._mesh, self.root
        if asked and all(isinstance(dim, int) for dim in asked):
            return self.at(asked)
        own = mesh.mesh_dim_names
        wanted = tuple(own[dim] if isinstance(dim, int) and own is not None else str(dim) for dim in asked)
        if own is None:
            raise KeyError(f"{mesh} has no mesh_dim_names: pass mesh_dim_names to init_device_mesh to slice by name")
        mine = dict(zip(own, self.along, strict=True))
        parts = {dim for entry in self.along for dim in entry}
        mine.update({name: dims for name, dims in root.slices.flat_names.items() if parts.issuperset(dims)})
        for name in wanted:
            if name not in mine:
                raise KeyError(f"{mesh} has no dimension {name!r}; it has {', '.join(map(repr, mine))}")
        along = tuple(mine[name] for name in wanted)
        if len({dim for entry in along for dim in entry}) != sum(map(len, along)):
            raise KeyError(f"a dimension is named twice in {wanted}")
        return _sliced(root, along, wanted)

    def at(self, dims: tuple[Any, ...]) -> _Mesh:
        """Return the slice along dimensions by their index."""
        mesh = self._mesh
        if any(not -mesh.ndim <= dim < mesh.ndim for dim in dims):
            raise IndexError(f"{mesh} has {mesh.ndim} dimension(s), and no dimension {dims}")
        dims = tuple(dim % mesh.ndim for dim in dims)
        if len(set(dims)) != len(dims):
            raise KeyError(f"a dimension is named twice in {dims}")
        own = mesh.mesh_dim_names
        names = None if own is None else tuple(own[dim] for dim in dims)
        return _sliced(self.root, tuple(self.along[dim] for dim in dims), names)

    def flattened(self, mesh_dim_name: str | None, backend_override: Any) -> _Mesh:
        """Return the 1-D mesh with the ranks of this mesh (see `DeviceMesh._flatten`)."""
        mesh, root = self._mesh, self.root
        if mesh.mesh_dim_names is None or root.mesh_dim_names is None:
            raise ValueError(
                f"{mesh} has no mesh_dim_names: pass mesh_dim_names to init_device_mesh to flatten dimensions"
            )
        name = "_".join(mesh.mesh_dim_names) if mesh_dim_name is None else mesh_dim_name
        if mesh.mesh_dim_names == (name,):
            return mesh
        dims = tuple(dim for entry in self.along for dim in entry)
        known = root.slices
        if name in root.mesh_dim_names or known.flat_names.get(name, dims) != dims:
            raise ValueError(
                f"{root} has another dimension named {name!r}: choose another name for the flattened dimension"
            )
        if CHECKS:
            CHECKS[-1].agree("DeviceMesh._flatten", {"the mesh": str(mesh.ranks.shape), "mesh_dim_name": name})
        if dims not in known.flat_groups:
            known.flat_groups[dims] = mesh.platform.new_group(
                rows_along(root.ranks, dims), *override_of(backend_override)
            )
        known.flat_names[name] = dims
        return _sliced(root, (dims,), (name,))

    def union(self, others: Sequence[_Mesh]) -> _Mesh | None:
        """Return the mesh along all dimensions of this mesh and of ``others``.

        Return None if the meshes have no common root, or if their dimensions overlap, as flattened ones may.
        """
        meshes = [self._mesh, *others]
        common = common_root(meshes)
        if common is None:
            return None
        dims = [dim for entry in {entry for along in common[1] for entry in along} for dim in entry]
        return _along_all(meshes, *common) if len(set(dims)) == len(dims) else None

    def of_all_ranks(self, dim: int, name: str) -> list[_Mesh]:
        """Return the slices along one dimension, of all ranks of this mesh (see `DeviceMesh._get_all_submeshes`)."""
        mesh = self._mesh
        mine, found = mesh[name], []
        for row in rows_along(mesh.ranks, (dim,)):
            if row == mine.ranks.tolist():
                found.append(mine)
                continue
            key = (mesh.platform, self.root, self.along[dim], name, tuple(row))
            if key not in MESHES:
                ranks, at = np.asarray(row, dtype=np.int64), (mine.slices._root, mine.slices.along)
                MESHES[key] = new_mesh(type(mesh), mesh.platform, ranks, (name,), (None,), at=at)
            found.append(MESHES[key])
        return found


def concatenate(meshes: Sequence[_Mesh]) -> _Mesh:
    """Return the mesh along all dimensions of ``meshes`` (see `DeviceMesh._concatenate`)."""
    common = common_root(meshes)
    if common is None:
        raise ValueError(
            f"{' and '.join(map(str, meshes))} are not slices of one mesh. Make one mesh, such as mesh = "
            'init_device_mesh(mesh_shape=(2, 4), mesh_dim_names=("dp", "tp")), and use its slices mesh["dp"] and '
            'mesh["tp"]'
        )
    dims = [dim for along in common[1] for entry in along for dim in entry]
    if len(set(dims)) != len(dims):
        raise ValueError(
            f"{' and '.join(map(str, meshes))} share a dimension of their root mesh: use slices of different dimensions"
        )
    return _along_all(meshes, *common)


def common_root(meshes: Sequence[Any]) -> tuple[Any, list[tuple[tuple[int, ...], ...]]] | None:
    """Return a root that all ``meshes`` are slices of, and the dimensions of the root that each mesh covers. The result
    is None if there is no common root."""
    for root in dict.fromkeys(mesh.slices.root for mesh in meshes):
        found = [along for mesh in meshes if (along := mesh.slices.along_in(root)) is not None]
        if len(found) == len(meshes):
            return root, found
    return None


def _along_other(key: tuple[Any, Any]) -> tuple[tuple[int, ...], ...] | None:
    """Return `MeshSlices.along_in` for a root that is not the root of the mesh."""
    mesh, root = key
    own = mesh.slices.root.ranks
    found: list[tuple[int, ...]] = []
    if mesh.mesh_dim_names is None or root.mesh_dim_names is None:
        return None
    all_rows = dict(rows_by_dims(root.ranks))
    for entry, name, group in zip(mesh.slices.along, mesh.mesh_dim_names, mesh.groups.own, strict=True):
        rows = set(map(tuple, rows_along(own, entry)))
        alike = [
            (len(dims), root.mesh_dim_names[dims[0]] != name, dims)  # the name distinguishes dimensions of one rank
            for dims in all_rows
            if dims not in found and all_rows[dims] == rows
        ]
        if not alike:
            return None
        *_, dims = min(alike)
        found.append(dims)
        if len(dims) > 1:
            root.slices.flat_groups.setdefault(dims, group)
    return tuple(found)


#: (mesh, root of another mesh) -> the dimensions of that root that the mesh covers, or None.
_ALONG: Table = Table(_along_other, 1 << 10, "dimensions of other roots")


def _along_all(meshes: Sequence[_Mesh], root: _Mesh, found: Sequence[tuple[tuple[int, ...], ...]]) -> _Mesh:
    """Return the mesh along all dimensions of ``meshes``, in the order of their common ``root``. ``found`` are the
    dimensions of ``root`` that each mesh covers."""
    if len(set(meshes)) == 1:
        return meshes[0]
    entries: dict[tuple[int, ...], str] = {}
    for mesh, along in zip(meshes, found, strict=True):
        for entry, name in zip(along, mesh.mesh_dim_names or (), strict=True):
            is_other = mesh.slices.root is not root and len(entry) == 1
            entries[entry] = root.mesh_dim_names[entry[0]] if is_other else name
    sliced, names = zip(*sorted(entries.items()), strict=True)
    return _sliced(root, sliced, names)


def _sliced(root: _Mesh, along: tuple[tuple[int, ...], ...], names: tuple[str, ...] | None) -> _Mesh:
    """Return the slice of ``root`` that contains this rank, with one dimension for each entry of ``along``."""
    if along == root.slices.along and names == root.mesh_dim_names:
        return root
    key = (root.platform, root, along, names)
    found: _Mesh | None = MESHES.get(key)
    if found is None:
        ranks = sub_array(root.ranks, along, root.get_coordinate() or (0,) * root.ndim)
        own, flat = root.groups.own, root.slices.flat_groups
        groups = tuple(own[dims[0]] if len(dims) == 1 else flat[dims] for dims in along)
        made: _Mesh = new_mesh(type(root), root.platform, ranks, names, groups, at=(root, along))
        found = MESHES[key] = made
    return found


def new_mesh(
    cls: type,
    platform: Platform,
    ranks: np.ndarray,
    names: tuple[str, ...] | None,
    groups: tuple[Any, ...],
    overrides: Overrides = NO_OVERRIDES,
    at: tuple[Any, tuple[tuple[int, ...], ...]] | None = None,
) -> Any:
    """Return a new mesh object with the given ranks, names and groups. No existing mesh is looked up.

    Args:
        cls: the class of meshes.
        platform, ranks, names: platform, ranks and dimension names of the mesh.
        groups, overrides: arguments of `MeshGroups`.
        at: root and dimensions, as `MeshSlices` takes them; None for a root mesh.
    """
    mesh: Any = object.__new__(cls)
    mesh.platform = platform
    mesh.device_type = platform.device_type
    mesh.ranks = ranks
    mesh.mesh_dim_names = names
    mesh.shape = tuple(int(n) for n in ranks.shape)
    mesh.ndim = ranks.ndim
    where = np.argwhere(ranks == platform.rank())
    mesh._coordinate = tuple(int(i) for i in where[0]) if len(where) else None
    mesh._has_uneven_shards = False
    mesh.groups = MeshGroups(platform, groups, overrides)
    mesh.slices = MeshSlices(mesh, *(at or (None, tuple((dim,) for dim in range(ranks.ndim)))))
    return mesh
