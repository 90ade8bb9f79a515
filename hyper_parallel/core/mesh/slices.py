"""Slices of a mesh: along some of its dimensions, several as one, or joined again; all know the mesh they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hyper_parallel.core.caches import Table
from hyper_parallel.core.mesh.arrays import rows_along, sub_array
from hyper_parallel.core.observers import CHECKS

if TYPE_CHECKING:
    from hyper_parallel.platform import Platform

#: All meshes, by platform and what else makes them equal.
MESHES: dict[tuple, Any] = {}

_Mesh = TypeVar("_Mesh", bound="Slices")


class Slices:
    """What `DeviceMesh` knows of its root, and its slices."""

    device_type: str
    platform: Platform
    ranks: np.ndarray
    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    ndim: int
    _coordinate: tuple[int, ...] | None
    _groups: tuple[Any, ...]
    #: The mesh that this one was sliced from, None where it was not.
    _root: Any
    #: For each dimension those of the root that it runs along: several where they were flattened.
    _along: tuple[tuple[int, ...], ...]
    #: Of a root: dimensions that were flattened -> their group; and by what name.
    _flat_groups: dict[tuple[int, ...], Any]
    _flat_names: dict[str, tuple[int, ...]]

    def get_root_mesh(self: _Mesh) -> _Mesh:
        """The mesh that this one was sliced from; itself where it was not."""
        root: _Mesh | None = self._root
        return self if root is None else root

    def dim_label(self, mesh_dim: int) -> str:
        """Index and name of a dimension, for messages."""
        name = f" ({self.mesh_dim_names[mesh_dim]!r})" if self.mesh_dim_names else ""
        return f"{mesh_dim}{name}"

    def _dim(self, mesh_dim: int | str | None, caller: str) -> int:
        if mesh_dim is None:
            if self.ndim != 1:
                raise ValueError(f"{self} has {self.ndim} dimensions: say which, {caller}(mesh_dim)")
            return 0
        if isinstance(mesh_dim, str):
            if self.mesh_dim_names is None or mesh_dim not in self.mesh_dim_names:
                raise ValueError(f"{self} has no dimension named {mesh_dim!r}")
            return self.mesh_dim_names.index(mesh_dim)
        if not -self.ndim <= mesh_dim < self.ndim:
            raise ValueError(f"{self} has {self.ndim} dimension(s), there is no dimension {mesh_dim}")
        return mesh_dim % self.ndim

    def rows(self) -> list[list[int]]:
        """The ranks of this mesh, and of each that all ranks of the root have in its place."""
        return rows_along(self.get_root_mesh().ranks, [dim for entry in self._along for dim in entry])

    def along_in(self, root: Slices) -> tuple[tuple[int, ...], ...] | None:
        """For each dimension those of ``root`` that it runs along; None where there are none.

        A dimension of another root is the same where it has the same ranks in the same order, on all ranks: those of
        two meshes that one was cut into by ``_unflatten``.
        """
        return self._along if self.get_root_mesh() is root else _ALONG[self, root]

    def index_of(self, other: Slices, mesh_dim: int) -> int:
        """Which dimension of this mesh is dimension ``mesh_dim`` of another one of the same root."""
        along = other.along_in(self.get_root_mesh())
        if along is None:
            raise ValueError(f"{other} is no slice of {self.get_root_mesh()}")
        return self._along.index(along[mesh_dim])

    def shares_root(self, other: Slices) -> bool:
        """Whether both are slices of one mesh."""
        return common_root([self, other]) is not None

    def is_beside(self, other: Slices) -> bool:
        """Whether both are slices of one mesh, along different dimensions."""
        common = common_root([self, other])
        if common is None:
            return False
        mine, others = ({dim for entry in along for dim in entry} for along in common[1])
        return mine.isdisjoint(others)

    def spans(self, other: Slices) -> bool:
        """Whether both are slices of one mesh, and this one has all ranks of the other: flattened or not."""
        common = common_root([self, other])
        if common is None:
            return False
        mine, others = ({dim for entry in along for dim in entry} for along in common[1])
        return mine >= others

    def contains(self, other: Slices) -> bool:
        """Whether both are slices of one mesh, and this one has all dimensions of the other."""
        along = other.along_in(self.get_root_mesh())
        return along is not None and set(along) <= set(self._along)

    def __getitem__(self: _Mesh, mesh_dim_names: str | int | Sequence[str | int]) -> _Mesh:
        """The mesh of this rank along some dimensions, by name or index: ``mesh["tp"]``, ``mesh["dp", "tp"]``,
        ``mesh[0]``.

        Raises:
            KeyError: when the mesh has no names or not these.
            IndexError: for an index that it does not have.
        """
        asked = (mesh_dim_names,) if isinstance(mesh_dim_names, (str, int)) else tuple(mesh_dim_names)
        own, root = self.mesh_dim_names, self.get_root_mesh()
        if asked and all(isinstance(dim, int) for dim in asked):
            return self._at(asked)
        wanted = tuple(own[dim] if isinstance(dim, int) and own is not None else str(dim) for dim in asked)
        if own is None:
            raise KeyError(f"{self} has no mesh_dim_names: give them to init_device_mesh to slice by name")
        mine = dict(zip(own, self._along, strict=True))
        parts = {dim for entry in self._along for dim in entry}
        mine.update({name: dims for name, dims in root._flat_names.items() if parts.issuperset(dims)})
        for name in wanted:
            if name not in mine:
                raise KeyError(f"{self} has no dimension {name!r}; it has {', '.join(map(repr, mine))}")
        along = tuple(mine[name] for name in wanted)
        if len({dim for entry in along for dim in entry}) != sum(map(len, along)):
            raise KeyError(f"a dimension is named twice in {wanted}")
        return _sliced(root, along, wanted)

    def _at(self: _Mesh, dims: tuple[Any, ...]) -> _Mesh:
        """The slice along dimensions by their index."""
        if any(not -self.ndim <= dim < self.ndim for dim in dims):
            raise IndexError(f"{self} has {self.ndim} dimension(s), there is no dimension {dims}")
        dims = tuple(dim % self.ndim for dim in dims)
        if len(set(dims)) != len(dims):
            raise KeyError(f"a dimension is named twice in {dims}")
        own = self.mesh_dim_names
        names = None if own is None else tuple(own[dim] for dim in dims)
        return _sliced(self.get_root_mesh(), tuple(self._along[dim] for dim in dims), names)

    def _flatten(self: _Mesh, mesh_dim_name: str | None = None, backend_override: Any = None) -> _Mesh:
        """The mesh of one dimension with the ranks of this one. All ranks of the world must call it; slices of the root
        mesh know the dimension by its name from then on.

        Args:
            mesh_dim_name: the name; None joins those of the dimensions with ``_``.
            backend_override: another backend for its group, options, or both as a pair, where it has none yet.

        Raises:
            ValueError: when the mesh has no names, or the name is that of other dimensions of the root.

        Example:
            >>> from hyper_parallel import init_device_mesh
            >>> mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicate", "shard", "tp"))
            >>> mesh["replicate", "shard"]._flatten("dp").mesh_dim_names, mesh["dp"].size()
            (('dp',), 1)

        Source: ``torch.distributed.device_mesh.DeviceMesh._flatten``.
        """
        root = self.get_root_mesh()
        if self.mesh_dim_names is None or root.mesh_dim_names is None:
            raise ValueError(f"{self} has no mesh_dim_names: give them to init_device_mesh to flatten dimensions")
        name = "_".join(self.mesh_dim_names) if mesh_dim_name is None else mesh_dim_name
        if self.mesh_dim_names == (name,):
            return self
        dims = tuple(dim for entry in self._along for dim in entry)
        if name in root.mesh_dim_names or root._flat_names.get(name, dims) != dims:
            raise ValueError(f"{root} has another dimension named {name!r}: give the flattened one another name")
        if CHECKS:
            CHECKS[-1].agree("DeviceMesh._flatten", {"the mesh": str(self.ranks.shape), "mesh_dim_name": name})
        if dims not in root._flat_groups:
            root._flat_groups[dims] = self.platform.new_group(
                rows_along(root.ranks, dims), *override_of(backend_override)
            )
        root._flat_names[name] = dims
        return _sliced(root, (dims,), (name,))

    @staticmethod
    def _concatenate(meshes: Sequence[_Mesh]) -> _Mesh:
        """The mesh along all dimensions of ``meshes``, in the order in which their root has them; no communication.

        Raises:
            ValueError: when the meshes are not slices of one root, or two have a dimension in common.

        Example:
            >>> from hyper_parallel import DeviceMesh, init_device_mesh
            >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
            >>> DeviceMesh._concatenate([mesh["tp"], mesh["dp"]]) is mesh
            True

        Source: ``torch.distributed.device_mesh.DeviceMesh._concatenate``.
        """
        common = common_root(meshes)
        if common is None:
            raise ValueError(
                f"{' and '.join(map(str, meshes))} are not slices of one mesh: make one, such as mesh = "
                'init_device_mesh(mesh_shape=(2, 4), mesh_dim_names=("dp", "tp")), and use mesh["dp"] and mesh["tp"] '
                "of it"
            )
        dims = [dim for along in common[1] for entry in along for dim in entry]
        if len(set(dims)) != len(dims):
            raise ValueError(f"{' and '.join(map(str, meshes))} have a dimension of their root in common")
        return _along_all(meshes, *common)

    def _union(self: _Mesh, others: Sequence[_Mesh]) -> _Mesh | None:
        """The mesh along all dimensions of this one and of others of the same root; None where one of them is a part of
        another one, as of those that were flattened."""
        common = common_root([self, *others])
        if common is None:
            return None
        dims = [dim for entry in {entry for along in common[1] for entry in along} for dim in entry]
        return _along_all([self, *others], *common) if len(set(dims)) == len(dims) else None


def override_of(value: Any) -> tuple[Any, Any]:
    """The backend and the options that an entry of ``backend_override`` says: one of the two, or both."""
    if isinstance(value, tuple):
        backend, options = value
        return backend, options
    return (value, None) if isinstance(value, str) or value is None else (None, value)


def common_root(meshes: Sequence[Slices]) -> tuple[Any, list[tuple[tuple[int, ...], ...]]] | None:
    """The first of the roots of ``meshes`` that all of them are slices of, and along which of its dimensions."""
    for root in dict.fromkeys(mesh.get_root_mesh() for mesh in meshes):
        found = [along for mesh in meshes if (along := mesh.along_in(root)) is not None]
        if len(found) == len(meshes):
            return root, found
    return None


def _along_other(key: tuple[Any, Any]) -> tuple[tuple[int, ...], ...] | None:
    """`Slices.along_in` for another root."""
    mesh, root = key
    own = mesh.get_root_mesh().ranks
    found: list[tuple[int, ...]] = []
    if mesh.mesh_dim_names is None or root.mesh_dim_names is None:
        return None
    runs = [tuple(range(i, j + 1)) for i in range(root.ndim) for j in range(i, root.ndim)]
    for entry, name, group in zip(mesh._along, mesh.mesh_dim_names, mesh._groups, strict=True):
        rows = set(map(tuple, rows_along(own, entry)))
        alike = [
            (len(dims), root.mesh_dim_names[dims[0]] != name, dims)  # the name tells dimensions of one rank apart
            for dims in runs
            if dims not in found and set(map(tuple, rows_along(root.ranks, dims))) == rows
        ]
        if not alike:
            return None
        *_, dims = min(alike)
        found.append(dims)
        if len(dims) > 1:
            root._flat_groups.setdefault(dims, group)
    return tuple(found)


#: (mesh, root of another one) -> the dimensions of that root that it runs along, or None.
_ALONG: Table = Table(_along_other, 1 << 10, "dimensions of other roots")


def _along_all(meshes: Sequence[_Mesh], root: Any, found: Sequence[tuple[tuple[int, ...], ...]]) -> _Mesh:
    """The mesh along all dimensions of some meshes, slices of ``root`` along those ``found``, in the root's order."""
    if len(set(meshes)) == 1:
        return meshes[0]
    entries: dict[tuple[int, ...], str] = {}
    for mesh, along in zip(meshes, found, strict=True):
        for entry, name in zip(along, mesh.mesh_dim_names or (), strict=True):
            is_other = mesh.get_root_mesh() is not root and len(entry) == 1
            entries[entry] = root.mesh_dim_names[entry[0]] if is_other else name
    sliced, names = zip(*sorted(entries.items()), strict=True)
    made: _Mesh = _sliced(root, sliced, names)
    return made


def _sliced(root: _Mesh, along: tuple[tuple[int, ...], ...], names: tuple[str, ...] | None) -> _Mesh:
    """The slice of ``root`` that this rank is in, with a dimension for each entry of ``along``."""
    if along == root._along and names == root.mesh_dim_names:
        return root
    key = (root.platform, root, along, names)
    found = MESHES.get(key)
    if found is None:
        ranks = sub_array(root.ranks, along, root._coordinate or (0,) * root.ndim)
        groups = tuple(root._groups[dims[0]] if len(dims) == 1 else root._flat_groups[dims] for dims in along)
        found = MESHES[key] = new_mesh(type(root), root.platform, ranks, names, groups)
        found._root, found._along = root, along
    sliced: _Mesh = found
    return sliced


def new_mesh(
    cls: type, platform: Platform, ranks: np.ndarray, names: tuple[str, ...] | None, groups: tuple[Any, ...]
) -> Any:
    """A mesh without a root; its group along each dimension is given."""
    mesh: Any = object.__new__(cls)
    mesh.platform = platform
    mesh.device_type = platform.device_type
    mesh.ranks = ranks
    mesh.mesh_dim_names = names
    mesh.shape = tuple(int(n) for n in ranks.shape)
    mesh.ndim = ranks.ndim
    where = np.argwhere(ranks == platform.rank())
    mesh._coordinate = tuple(int(i) for i in where[0]) if len(where) else None
    mesh._groups = groups
    mesh._has_uneven_shards = False
    return mesh
