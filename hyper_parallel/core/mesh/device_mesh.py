"""`DeviceMesh` for users, and functions that create or find one. Mirrors ``torch.distributed.device_mesh``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from hyper_parallel.core.lookalikes import import_hint
from hyper_parallel.core.mesh.first_use import join_world
from hyper_parallel.core.mesh.mesh_class import DeviceMesh, active_stack
from hyper_parallel.core.mesh.roots import overrides_of, platform_for

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh", "resolve_mesh"]


def init_device_mesh(
    device_type: str | None = None,
    mesh_shape: Sequence[int] | None = None,
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[int | str, Any] | None = None,
) -> DeviceMesh:
    """Return a `DeviceMesh` of ranks 0, 1, ... in row-major order. All ranks of the world must call it.

    It initialises the framework's default process group if the program has not done so. Without a launcher, the world
    has one rank.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"npu"``; None for that of the selected platform.
        mesh_shape: number of ranks in each dimension; None for one dimension over all ranks of the world.
        mesh_dim_names: one name per dimension.
        backend_override: options for the process groups, by index or name of the dimension. A value is the name of
            another backend of the framework, options for its ``new_group``, or both as a pair.

    Raises:
        ValueError: for a device type that the platform does not serve, a mesh larger than the world, or an unknown
            dimension in ``backend_override``.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)).shape
        (1,)

    Source: ``torch.distributed.device_mesh.init_device_mesh``.
    """
    platform = platform_for(device_type)
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
    """Return the innermost mesh entered with ``with mesh:``, or None."""
    stack = active_stack()
    return stack[-1] if stack else None


def resolve_mesh(device_mesh: DeviceMesh | None, caller: str) -> DeviceMesh:
    """Return ``device_mesh``, or the mesh entered with ``with mesh:`` if that is None.

    A mesh of the framework is converted to the `DeviceMesh` with its ranks, names and groups.

    Raises:
        ValueError: when there is no mesh, and for a mesh of the framework that has no counterpart here.
        TypeError: when ``device_mesh`` is not a mesh.
    """
    mesh = current_mesh() if device_mesh is None else device_mesh
    if mesh is None:
        raise ValueError(f"{caller} needs a device_mesh: pass one, or call it inside `with mesh:`")
    if isinstance(mesh, DeviceMesh):
        return mesh
    hint = import_hint(mesh)
    if hint:
        with suppress(TypeError):  # the mesh is of another framework
            made: DeviceMesh = DeviceMesh._of_native(platform_for(getattr(mesh, "device_type", None)), mesh)
            return made
    kind = type(mesh)
    raise TypeError(f"{caller} needs a hyper_parallel DeviceMesh, got {kind.__module__}.{kind.__name__}{hint}")
