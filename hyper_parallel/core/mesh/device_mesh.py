"""DeviceMesh: ranks arranged in a named n-dimensional array. Mirrors ``torch.distributed.device_mesh``.

Meshes are interned: building the same mesh again (same platform, ranks, shape and names) gives the same object and no
new process groups, and equality is identity. A mesh that was sliced from another one knows it, its root: meshes of the
same ranks and other roots are different meshes, which name the same dimension where all their rows are equal.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from hyper_parallel.core.lookalikes import import_hint
from hyper_parallel.core.mesh.arrays import check_ranks_of_mesh, ranks_of
from hyper_parallel.core.mesh.first_use import join_world
from hyper_parallel.core.mesh.groups import MeshGroups
from hyper_parallel.core.mesh.native import made_of, remember_made, slice_like
from hyper_parallel.core.mesh.roots import is_current, overrides_of, root_mesh
from hyper_parallel.core.mesh.slices import MESHES
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.platform.registry import get_platform_for_device

_ACTIVE = threading.local()


class DeviceMesh(MeshGroups):
    """Ranks arranged in an n-dimensional array, with a process group for each row along each dimension.

    All ranks of the world must construct it, in the same order as other meshes, also those that are not in it.
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

    Raises:
        ValueError: for a device type that the platform does not serve, ranks that repeat or lie outside the world,
            names that repeat or do not fit the number of dimensions.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> mesh["tp"].size()  # doctest: +SKIP
        2

    Source: ``torch.distributed.device_mesh.DeviceMesh``.
    """

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
        platform = _platform_for(device_type)
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
        made = made_of(native, platform.world())
        if made is not None:
            return cast("DeviceMesh", made)
        known = platform.describe_native_mesh(native)
        if known.root is not None:
            mesh: DeviceMesh = slice_like(cls._of_native(platform, known.root), known)
        else:
            mesh = root_mesh(cls, platform, known.ranks, known.names, known.groups)
            if mesh._groups is known.groups:
                mesh._native = weakref.ref(native)
        remember_made(native, platform.world(), mesh)
        return mesh

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
        """Raise ValueError on a rank outside the mesh, which has no part of its tensors; ``what`` is not to be done
        there."""
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
        if isinstance(mesh_dim, str) and mesh_dim in self.get_root_mesh()._flat_names:
            return self[mesh_dim].get_group()
        return self.platform.native_group(self._groups[self._dim(mesh_dim, "get_group")])

    def get_all_groups(self) -> list[Any]:
        """`get_group` of every dimension."""
        return [self.platform.native_group(group) for group in self._groups]

    def platform_group(self, mesh_dim: int) -> Any:
        """The group of this rank along a dimension, as the platform's verbs take it."""
        return self._groups[mesh_dim]

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

    def __enter__(self) -> DeviceMesh:
        _active_stack().append(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        _active_stack().pop()

    def __reduce__(self) -> tuple:
        arguments = (self.device_type, self.ranks.tolist(), self.mesh_dim_names)
        root = self._root
        return (_rebuild, arguments if root is None else (*arguments, root.ranks.tolist(), root.mesh_dim_names))

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict) -> DeviceMesh:
        return self

    def __repr__(self) -> str:
        names = "" if self.mesh_dim_names is None else f", mesh_dim_names={self.mesh_dim_names}"
        return f"DeviceMesh({self.device_type!r}, {self.ranks.tolist()}{names})"


def init_device_mesh(
    device_type: str | None = None,
    mesh_shape: Sequence[int] | None = None,
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """A `DeviceMesh` of ranks 0, 1, ... in row-major order. All ranks of the world must call it.

    It initialises the framework's default process group if the program has not done so. Without a launcher, the world
    has one rank.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``; None is the selected platform's own.
        mesh_shape: number of ranks in each dimension; None is one dimension over the whole world.
        mesh_dim_names: one name per dimension.
        backend_override: by index or name of a dimension, for its groups: the name of another backend of the
            framework, options of its ``new_group``, or both as a pair.

    Raises:
        ValueError: for a device type that the platform does not serve, a mesh larger than the world, or a dimension in
            ``backend_override`` that there is not.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)).shape
        (1,)

    Source: ``torch.distributed.device_mesh.init_device_mesh``.
    """
    platform = _platform_for(device_type)
    join_world(platform)
    shape = (platform.world_size(),) if mesh_shape is None else tuple(mesh_shape)
    if any(not isinstance(n, (int, np.integer)) or n < 1 for n in shape):
        raise ValueError(f"mesh_shape must hold positive ints, got {shape}")
    if math.prod(shape) > platform.world_size():
        raise ValueError(
            f"a mesh of shape {shape} needs {math.prod(shape)} ranks, the world has {platform.world_size()}: start "
            "more processes or choose a smaller mesh"
        )
    ranks = np.arange(math.prod(shape)).reshape(shape)
    overrides = overrides_of(backend_override, len(shape), mesh_dim_names) or None
    return DeviceMesh(
        device_type or platform.device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=overrides
    )


def current_mesh() -> DeviceMesh | None:
    """The innermost mesh entered with ``with mesh:``, or None."""
    stack = _active_stack()
    return stack[-1] if stack else None


def resolve_mesh(device_mesh: DeviceMesh | None, caller: str) -> DeviceMesh:
    """The mesh given, or the one entered.

    Raises:
        ValueError: when there is neither.
        TypeError: when it is no `DeviceMesh`.
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    if mesh is None:
        raise ValueError(f"{caller} needs a device_mesh: pass one, or call it inside `with mesh:`")
    if not isinstance(mesh, DeviceMesh):
        kind = type(mesh)
        framework, hint = kind.__module__.partition(".")[0], import_hint(mesh)
        if hint and hasattr(DeviceMesh, f"from_{framework}"):
            hint += f", or give DeviceMesh.from_{framework}(mesh)"
        raise TypeError(f"{caller} needs a hyper_parallel DeviceMesh, got {kind.__module__}.{kind.__name__}{hint}")
    return mesh


def _active_stack() -> list[DeviceMesh]:
    if not hasattr(_ACTIVE, "stack"):
        _ACTIVE.stack = []
    return _ACTIVE.stack


def _platform_for(device_type: str | None) -> Platform:
    if device_type is not None and not isinstance(device_type, str):
        raise TypeError(
            f"device_type must be a string such as 'cpu', got {device_type!r}; with the platform's own device write "
            "init_device_mesh(mesh_shape=...)"
        )
    return get_platform() if device_type is None else get_platform_for_device(device_type)


def _rebuild(
    device_type: str,
    ranks: list,
    names: tuple[str, ...] | None,
    root_ranks: list | None = None,
    root_names: tuple[str, ...] | None = None,
) -> DeviceMesh:
    """The mesh that was pickled, in this process. Making process groups takes all ranks of the world, and nobody knows
    whether all are loading: so it must be there already, or be a dimension of one (of the one that it was sliced from,
    if that is there), or need no group.

    Raises:
        RuntimeError: when it does not.
    """
    platform, wanted = _platform_for(device_type), np.asarray(ranks, dtype=np.int64)
    world = platform.world()
    for exactly in (True, False):
        if not exactly and (world is None or platform.world_size() == 1):
            if wanted.size == 1 and not wanted.any():
                return DeviceMesh(device_type, wanted, mesh_dim_names=names)
        elif not exactly and wanted.ndim == 1 and ranks == list(range(platform.world_size())):
            return DeviceMesh(device_type, wanted, mesh_dim_names=names)
        for mesh in [m for m in list(MESHES.values()) if m.platform is platform and is_current(platform)]:
            root = mesh.get_root_mesh()
            if exactly and (root.ranks.tolist(), root.mesh_dim_names) != (root_ranks or ranks, root_names or names):
                continue
            with contextlib.suppress(KeyError):  # it has other names
                mesh = mesh if names is None else mesh[names]
            if mesh.mesh_dim_names == names and mesh.ranks.tolist() == ranks:
                return mesh
    size = 1 if world is None else platform.world_size()
    raise RuntimeError(
        f"what is loaded was saved on the mesh {ranks} with mesh_dim_names={names}, which rank "
        f"{0 if world is None else platform.rank()} of a world of {size} rank(s) does not have: make the mesh first "
        "(init_device_mesh on all ranks, and the dimension of it that was given to parallelize_module), and let each "
        "rank load its own file. For another number of ranks save whole tensors: full_tensor() of each entry, which "
        "all ranks must call"
    )
