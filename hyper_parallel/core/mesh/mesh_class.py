"""DeviceMesh: ranks arranged in a named n-dimensional array. Mirrors ``torch.distributed.device_mesh``.

Meshes are interned: building the same mesh again (same platform, ranks, shape and names) gives the same object. It
makes no new process groups, and equality is identity. A mesh that was sliced from another one knows it, its root.
Meshes of the same ranks and other roots are different meshes. They name the same dimension where all their rows are
equal.
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

    All ranks of the world must construct it, in the same order as other meshes. This includes ranks outside of it.
    Constructing an equal mesh again gives the same object. Inside ``with mesh:``, functions that take a mesh use this
    one when they are given none.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``; None is the platform's own.
        mesh: (nested) sequence or array of global ranks, each at most once.
        mesh_dim_names: one name per dimension, needed for ``mesh["name"]``.
        backend_override: another backend of the framework for the groups of some dimensions, or options: as in
            `init_device_mesh`, or a pair (backend, options) for each dimension, None for the platform's own.
        preserve_rank_order: taken because torch has it, and not read: groups always have the order of the mesh, without
            which shards would be gathered in another one.

    Attributes:
        device_type: device type of the platform.
        platform: the `Platform` whose collectives the mesh uses.
        ranks: int array of global ranks, of NumPy.
        mesh_dim_names: tuple of names, or None.
        shape: sizes of the dimensions.
        ndim: number of dimensions.
        groups: the process groups of this rank.
        slices: where the mesh lies in the one that it was sliced from, and the slices of it.

    Raises:
        ValueError: for a device type that the platform does not serve, ranks that repeat or lie outside the world,
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
    groups: MeshGroups
    slices: MeshSlices[DeviceMesh]
    _coordinate: tuple[int, ...] | None
    #: Whether a layer has given plain shards of unequal sizes: see `core.tensor_parallel.program.uneven_shards`.
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
        """The mesh of process groups that there are. Makes none.

        All ranks of the groups call it. Where there is a mesh of these ranks, names and groups already, it is that.

        Args:
            group: one process group of the framework, for a 1-D mesh; or this rank's along each dimension.
            device_type: as in `DeviceMesh`.
            mesh: array of the global ranks; needed for several groups.
            mesh_dim_names: one name per dimension; needed for several groups.

        Raises:
            TypeError: for an object that is no process group of the framework.
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
        """The global ranks as an int32 tensor of the framework, in the memory of the host: a new one each time. `ranks`
        is the same for NumPy."""
        return self.platform.host_tensor(self.ranks.astype(np.int32))

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's index in each dimension; None on a rank that is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's index in a dimension, which may be left out on a 1-D mesh.

        Raises:
            ValueError: outside the mesh, for an unknown dimension, or when it is left out on an n-D mesh.
        """
        dim = self._dim(mesh_dim, "get_local_rank")
        self.require_member("get_local_rank()")
        assert self._coordinate is not None
        return self._coordinate[dim]

    def require_member(self, what: str) -> None:
        """Raise ValueError on a rank outside the mesh, which has no part of its tensors. ``what`` names the operation
        in the message."""
        if self._coordinate is None:
            raise ValueError(
                f"{what}: rank {self.get_rank()} is not part of {self} and has no part of the tensors there: let only "
                "the ranks of the mesh do this, as in `if mesh.get_coordinate() is not None:`"
            )

    def get_rank(self) -> int:
        """Global rank of this process."""
        return self.platform.rank()

    def get_group(self, mesh_dim: int | str | None = None) -> Any:
        """The framework's process group of this rank along a dimension, which may be left out on a 1-D mesh. By name,
        dimensions that were flattened too."""
        if isinstance(mesh_dim, str) and mesh_dim in self.slices.root.slices.flat_names:
            return self[mesh_dim].get_group()
        return self.groups.native(self._dim(mesh_dim, "get_group"))

    def get_all_groups(self) -> list[Any]:
        """`get_group` of every dimension."""
        return [self.groups.native(dim) for dim in range(self.ndim)]

    def platform_group(self, mesh_dim: int) -> Any:
        """The group of this rank along a dimension, as the platform's verbs take it."""
        return self.groups.own[mesh_dim]

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of ranks in a dimension, or in the whole mesh."""
        return int(self.ranks.size) if mesh_dim is None else self.shape[self._dim(mesh_dim, "size")]

    def ranks_along(self, mesh_dim: int) -> tuple[int, ...]:
        """Global ranks of this rank's row along a dimension."""
        if self._coordinate is None:
            return ()
        index: list[Any] = list(self._coordinate)
        index[mesh_dim] = slice(None)
        return tuple(int(r) for r in self.ranks[tuple(index)])

    def get_root_mesh(self) -> DeviceMesh:
        """The mesh that this one was sliced from; itself where it was not."""
        return self.slices.root

    def dim_label(self, mesh_dim: int) -> str:
        """Index and name of a dimension, for messages."""
        name = f" ({self.mesh_dim_names[mesh_dim]!r})" if self.mesh_dim_names else ""
        return f"{mesh_dim}{name}"

    def _dim(self, mesh_dim: int | str | None, caller: str) -> int:
        return index_of_dim(self, mesh_dim, caller)

    def rows(self) -> list[list[int]]:
        """Return the ranks of all slices of the root along these dimensions, a list for each. This mesh is one of them,
        on its own ranks."""
        return self.slices.rows()

    def along_in(self, root: DeviceMesh) -> tuple[tuple[int, ...], ...] | None:
        """For each dimension those of ``root`` that it runs along; None where there are none.

        A dimension of another root is the same where all ranks have the same ranks in the same order. So are dimensions
        of two meshes that ``_unflatten`` made from one.
        """
        return self.slices.along_in(root)

    def index_of(self, other: DeviceMesh, mesh_dim: int) -> int:
        """The dimension of this mesh that is dimension ``mesh_dim`` of another one of the same root."""
        return self.slices.index_of(other, mesh_dim)

    def shares_root(self, other: DeviceMesh) -> bool:
        """Return whether both are slices of one mesh."""
        return common_root([self, other]) is not None

    def is_beside(self, other: DeviceMesh) -> bool:
        """Return whether both are slices of one mesh, along different dimensions."""
        return self.slices.is_beside(other)

    def spans(self, other: DeviceMesh) -> bool:
        """Return whether both are slices of one mesh, and this one has all ranks of the other: flattened or not."""
        return self.slices.spans(other)

    def contains(self, other: DeviceMesh) -> bool:
        """Return whether both are slices of one mesh, and this one has all dimensions of the other."""
        return self.slices.contains(other)

    def __getitem__(self, mesh_dim_names: str | int | Sequence[str | int]) -> DeviceMesh:
        """The mesh of this rank along some dimensions, by name or index: ``mesh["tp"]``, ``mesh["dp", "tp"]``,
        ``mesh[0]``.

        Raises:
            KeyError: when the mesh has no names or not these.
            IndexError: for an index that it does not have.
        """
        asked = (mesh_dim_names,) if isinstance(mesh_dim_names, (str, int)) else tuple(mesh_dim_names)
        return self.slices.along_dims(asked)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: Any = None) -> DeviceMesh:
        """The mesh of one dimension with the ranks of this one. All ranks of the world must call it. Slices of the root
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
        return self.slices.flattened(mesh_dim_name, backend_override)

    @staticmethod
    def _concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
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
        return concatenate(meshes)

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[int | str, Any] | None = None,
    ) -> DeviceMesh:
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
    """The meshes entered with ``with mesh:`` in this thread, the innermost last."""
    if not hasattr(_ACTIVE, "stack"):
        _ACTIVE.stack = []
    return _ACTIVE.stack


def rebuild(device_type: str, *saved: Any) -> DeviceMesh:
    """Unpickle a mesh, see `rebuilt`."""
    return rebuilt(DeviceMesh, platform_for(device_type), *saved)
