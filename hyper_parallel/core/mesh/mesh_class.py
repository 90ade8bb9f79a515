"""DeviceMesh: ranks arranged in a named n-dimensional array. Mirrors ``torch.distributed.device_mesh``.

Meshes are interned: equal platform, ranks, shape and names give the same object, without new process groups. So
equality is identity.

A slice of a mesh refers to the mesh that it was sliced from, its root. Meshes of the same ranks with different roots
are different meshes. Two of their dimensions are the same if all rows of ranks along them are equal.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.mesh.arrays import check_ranks_of_mesh, index_of_dim, ranks_of
from hyper_parallel.core.mesh.first_use import join_world
from hyper_parallel.core.mesh.groups import MeshGroups
from hyper_parallel.core.mesh.native import mesh_of, native_of
from hyper_parallel.core.mesh.pickling import rebuilt
from hyper_parallel.core.mesh.roots import mesh_of_groups, overrides_of, platform_for, root_mesh, unflattened
from hyper_parallel.core.mesh.slices import MeshSlices, common_root, concatenate
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.platform import Platform
from hyper_parallel.platform.mesh_methods import MeshMethods

_ACTIVE = threading.local()


class DeviceMesh(MeshMethods):
    """Ranks arranged in an n-dimensional array, with a process group for each row along each dimension.

    All ranks of the world must construct the mesh, in the same order as other meshes. This includes ranks outside of
    the mesh. Constructing an equal mesh again gives the same object. Inside ``with mesh:``, functions use this mesh
    when they are called without one.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``; None for that of the selected platform.
        mesh: (nested) sequence or array of global ranks, each at most once.
        mesh_dim_names: one name per dimension, needed for ``mesh["name"]``.
        backend_override: another backend or options for the process groups, as in `init_device_mesh`. Or a pair
            (backend, options) for each dimension, with None for the platform's defaults.
        preserve_rank_order: accepted because torch has it, and ignored. Groups always have the order of the mesh, so
            that shards are gathered in that order.

    Attributes:
        device_type: device type of the platform.
        platform: the `Platform` whose collectives the mesh uses.
        ranks: NumPy int array of global ranks.
        mesh_dim_names: tuple of names, or None.
        shape: sizes of the dimensions.
        ndim: number of dimensions.

    Raises:
        ValueError: for a device type that the platform does not serve, ranks that repeat or are outside the world,
            names that repeat or do not fit the number of dimensions.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> mesh["tp"].size()  # doctest: +SKIP
        2

    Source: ``torch.distributed.device_mesh.DeviceMesh``.
    """

    device_type: str
    platform: Platform
    ranks: np.ndarray
    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    ndim: int
    #: The process groups of this rank.
    groups: MeshGroups
    #: The position of the mesh in its root, and the slices of the mesh.
    slices: MeshSlices[DeviceMesh]
    _coordinate: tuple[int, ...] | None
    #: Whether a layer has returned plain shards of unequal sizes (see `core.tensor_parallel.program.uneven_shards`).
    _has_uneven_shards: bool

    def __new__(
        cls,
        device_type: str | None,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Any = None,
        preserve_rank_order: bool = False,
    ) -> DeviceMesh:
        if mesh is None:
            raise TypeError("DeviceMesh needs the ranks, mesh=[0, 1, ...]; init_device_mesh takes a shape instead")
        platform = platform_for(device_type)
        ranks = ranks_of(mesh)
        names = None if mesh_dim_names is None else tuple(mesh_dim_names)
        join_world(platform)
        check_ranks_of_mesh(ranks, names, platform.world_size())
        overrides = overrides_of(backend_override, ranks.ndim, names, "DeviceMesh")
        if CHECKS:
            facts = {"the ranks of the mesh": str(ranks.tolist()), "mesh_dim_names": str(names)}
            CHECKS[-1].agree("a DeviceMesh", facts)
        return root_mesh(cls, platform, ranks, names, overrides=overrides)

    @classmethod
    def _of_native(cls, platform: Platform, native: Any) -> DeviceMesh:
        return mesh_of(cls, platform, native)

    def _to_native(self) -> Any:
        return native_of(self)

    @classmethod
    def from_group(
        cls,
        group: Any,
        device_type: str | None = None,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return the mesh of existing process groups, without creating any.

        All ranks of the groups must call it. If a mesh of these ranks, names and groups exists, that mesh is returned.

        Args:
            group: one process group of the framework for a 1-D mesh, or this rank's group along each dimension.
            device_type: as in `DeviceMesh`.
            mesh: array of the global ranks; needed for several groups.
            mesh_dim_names: one name per dimension; needed for several groups.

        Raises:
            TypeError: for an object that is not a process group of the framework.
            ValueError: when ranks or names are missing, or do not fit the groups.

        Example:
            >>> from hyper_parallel import DeviceMesh, init_device_mesh
            >>> world = init_device_mesh("cpu", (1,)).get_group()
            >>> DeviceMesh.from_group(world, "cpu", mesh_dim_names=("tp",)).get_group() is world
            True

        Source: ``torch.distributed.device_mesh.DeviceMesh.from_group``.
        """
        return mesh_of_groups(cls, platform_for(device_type), group, mesh, mesh_dim_names)

    @property
    def mesh(self) -> Any:
        """The global ranks as a new int32 tensor of the framework in host memory. `ranks` is the same as a NumPy
        array."""
        return self.platform.host_tensor(self.ranks.astype(np.int32))

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's index in each dimension, or None on a rank outside the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's index in a dimension, which may be omitted on a 1-D mesh.

        Raises:
            ValueError: outside the mesh, for an unknown dimension, or when the dimension is omitted on an n-D mesh.
        """
        dim = self._dim(mesh_dim, "get_local_rank")
        self.require_member("get_local_rank()")
        assert self._coordinate is not None
        return self._coordinate[dim]

    def require_member(self, what: str) -> None:
        """Raise ValueError on a rank outside the mesh, which has no shard of the mesh's tensors. ``what`` is the
        operation that the message names."""
        if self._coordinate is None:
            raise ValueError(
                f"{what}: rank {self.get_rank()} is not part of {self} and holds no shards on this mesh: run this "
                "code on the ranks of the mesh alone, under `if mesh.get_coordinate() is not None:`"
            )

    def get_rank(self) -> int:
        """Return the global rank of this process."""
        return self.platform.rank()

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """Return the framework's process group of this rank along a dimension, which may be omitted on a 1-D mesh. The
        name of a flattened dimension is also accepted."""
        if isinstance(mesh_dim, str) and mesh_dim in self.slices.root.slices.flat_names:
            return self[mesh_dim].get_group()
        return self.groups.native(self._dim(mesh_dim, "get_group"))

    def get_all_groups(self) -> list[Any]:
        """Return the framework's process group of this rank along every dimension."""
        return [self.groups.native(dim) for dim in range(self.ndim)]

    def platform_group(self, mesh_dim: int) -> Any:
        """Return the group of this rank along a dimension, as the platform's collectives take it."""
        return self.groups.own[mesh_dim]

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Return the number of ranks in a dimension, or in the whole mesh."""
        return int(self.ranks.size) if mesh_dim is None else self.shape[self._dim(mesh_dim, "size")]

    def ranks_along(self, mesh_dim: int) -> tuple[int, ...]:
        """Return the global ranks of this rank's row along a dimension."""
        if self._coordinate is None:
            return ()
        index: list[Any] = list(self._coordinate)
        index[mesh_dim] = slice(None)
        return tuple(int(r) for r in self.ranks[tuple(index)])

    def get_root_mesh(self) -> DeviceMesh:
        """Return the mesh that this mesh was sliced from, or the mesh itself if it is not a slice."""
        return self.slices.root

    def dim_label(self, mesh_dim: int) -> str:
        """Return the index and the name of a dimension, for messages."""
        name = f" ({self.mesh_dim_names[mesh_dim]!r})" if self.mesh_dim_names else ""
        return f"{mesh_dim}{name}"

    def _dim(self, mesh_dim: int | str | None, caller: str) -> int:
        return index_of_dim(self, mesh_dim, caller)

    def rows(self) -> list[list[int]]:
        """Return the ranks of this mesh, and of all other slices of the root along the same dimensions. Each slice has
        one list."""
        return self.slices.rows()

    def along_in(self, root: DeviceMesh) -> tuple[tuple[int, ...], ...] | None:
        """Return, for each dimension of this mesh, the dimensions of ``root`` that it covers. Return None if ``root``
        lacks such a dimension.

        Dimensions of different roots are the same if they have the same rows of ranks, in the same order. This is the
        case for two meshes that ``_unflatten`` made from one.
        """
        return self.slices.along_in(root)

    def index_of(self, other: DeviceMesh, mesh_dim: int) -> int:
        """Return the dimension of this mesh that equals dimension ``mesh_dim`` of ``other``, a mesh with the same
        root."""
        return self.slices.index_of(other, mesh_dim)

    def shares_root(self, other: DeviceMesh) -> bool:
        """Return whether this mesh and ``other`` are slices of one mesh."""
        return common_root([self, other]) is not None

    def is_beside(self, other: DeviceMesh) -> bool:
        """Return whether this mesh and ``other`` are slices of one mesh, along different dimensions."""
        return self.slices.is_beside(other)

    def spans(self, other: DeviceMesh) -> bool:
        """Return whether this mesh and ``other`` are slices of one mesh, and this mesh contains all ranks of
        ``other``."""
        return self.slices.spans(other)

    def contains(self, other: DeviceMesh) -> bool:
        """Return whether this mesh and ``other`` are slices of one mesh, and this mesh has all dimensions of
        ``other``."""
        return self.slices.contains(other)

    def __getitem__(self, mesh_dim_names: str | int | Sequence[str | int]) -> DeviceMesh:
        """Return the slice with this rank along some dimensions, by name or index.

        For example ``mesh["tp"]``, ``mesh["dp", "tp"]`` or ``mesh[0]``.

        Raises:
            KeyError: when the mesh has no names, or lacks one of the requested names.
            IndexError: for an index that the mesh does not have.
        """
        asked = (mesh_dim_names,) if isinstance(mesh_dim_names, (str, int)) else tuple(mesh_dim_names)
        return self.slices.along_dims(asked)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """Return the 1-D mesh with the ranks of this mesh. All ranks of the world must call it.

        From then on, slices of the root mesh can be indexed with the new name.

        Args:
            mesh_dim_name: the new name; None joins the names of the dimensions with ``_``.
            backend_override: another backend, options or a pair of both for the group, if it does not exist yet.

        Raises:
            ValueError: when the mesh has no names, or the root already uses the name for other dimensions.

        Example:
            >>> from hyper_parallel import init_device_mesh
            >>> mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("replicate", "shard", "tp"))
            >>> mesh["replicate", "shard"]._flatten("dp").mesh_dim_names, mesh["dp"].size()
            (('dp',), 1)

        Source: ``torch.distributed.device_mesh.DeviceMesh._flatten``.
        """
        return self.slices.flattened(mesh_dim_name, backend_override)

    @staticmethod
    def _concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return the mesh along all dimensions of ``meshes``, in the order of their root. It does not communicate.

        Raises:
            ValueError: when the meshes are not slices of one root, or two have a dimension in common.

        Example:
            >>> from hyper_parallel import DeviceMesh, init_device_mesh
            >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
            >>> DeviceMesh._concatenate([mesh["tp"], mesh["dp"]]) is mesh
            True

        Source: ``torch.distributed.device_mesh.DeviceMesh._concatenate``.
        """
        return concatenate(meshes)

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[int | str, Any] | None = None,
    ) -> DeviceMesh:
        """Return a mesh in which one dimension is split into several. All ranks of the world must call it.

        The result is a root mesh. Two meshes that were split from one mesh share dimensions with equal rows of ranks.
        So a tensor-parallel plan may use one of them, and `fully_shard` the other.

        Args:
            dim: the dimension to split, by index or name.
            mesh_sizes: sizes of the new dimensions, in row-major order.
            mesh_dim_names: names of the new dimensions.
            backend_override: options for the groups of the new dimensions, as in `init_device_mesh`.

        Raises:
            ValueError: for an unknown or flattened dimension, sizes whose product is not the size of the dimension, or
                names that the mesh already has.

        Example:
            >>> from hyper_parallel import init_device_mesh
            >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("world",))
            >>> mesh._unflatten("world", (1, 1), ("dp", "tp")).mesh_dim_names
            ('dp', 'tp')

        Source: ``torch.distributed.device_mesh.DeviceMesh._unflatten``.
        """
        return unflattened(self, dim, mesh_sizes, mesh_dim_names, backend_override)

    def _get_all_submeshes(self, mesh_dim_name: str) -> list[DeviceMesh]:
        """Return all slices of this mesh along one dimension. Slices without this rank have no process group here.

        Args:
            mesh_dim_name: name of the dimension.

        Raises:
            ValueError: when the mesh has no such dimension.

        Source: ``torch.distributed.device_mesh.DeviceMesh._get_all_submeshes``.
        """
        return self.slices.of_all_ranks(self._dim(mesh_dim_name, "_get_all_submeshes"), mesh_dim_name)

    def __enter__(self) -> DeviceMesh:
        active_stack().append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        active_stack().pop()

    def __reduce__(self) -> tuple:
        arguments = (self.device_type, self.ranks.tolist(), self.mesh_dim_names)
        root = self.slices.root
        return (rebuild, arguments if root is self else (*arguments, root.ranks.tolist(), root.mesh_dim_names))

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict) -> DeviceMesh:
        return self

    def __repr__(self) -> str:
        names = "" if self.mesh_dim_names is None else f", mesh_dim_names={self.mesh_dim_names}"
        return f"DeviceMesh({self.device_type!r}, {self.ranks.tolist()}{names})"


def active_stack() -> list[DeviceMesh]:
    """Return the meshes entered with ``with mesh:`` in this thread, the innermost last."""
    if not hasattr(_ACTIVE, "stack"):
        _ACTIVE.stack = []
    return _ACTIVE.stack


def rebuild(device_type: str, *saved: Any) -> DeviceMesh:
    """Return an unpickled mesh (see `rebuilt`)."""
    return rebuilt(DeviceMesh, platform_for(device_type), *saved)
