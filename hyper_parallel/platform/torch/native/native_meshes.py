"""Conversions between meshes of torch.distributed and meshes of this library. The result has the same process
groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from hyper_parallel.platform.contract import NativeMesh
from hyper_parallel.platform.mesh_methods import MeshMethods
from hyper_parallel.platform.torch.basics.private import root_of_mesh

__all__ = ["describe_mesh", "make_mesh"]


def describe_mesh(native: Any, device_type: str, group_of: Callable[[Any, str], Any]) -> NativeMesh:
    """Describe a mesh of the framework; see `Platform.describe_native_mesh`.

    Args:
        native: a mesh of torch.
        device_type: device type of the platform.
        group_of: ``group_of(process_group, device_type)`` returns the group in core's form.
    """
    cls = _mesh_class()
    if not isinstance(native, cls):
        kind = type(native)
        raise TypeError(f"from_torch takes a {cls.__module__}.{cls.__name__}, got {kind.__module__}.{kind.__name__}")
    if native.device_type != device_type:
        raise ValueError(
            f"{native} has the device type {native.device_type!r}, but the platform has {device_type!r}: make a mesh "
            "of the platform's device type"
        )
    names = None if native.mesh_dim_names is None else tuple(native.mesh_dim_names)
    root = root_of_mesh(native)
    if native.get_coordinate() is None:
        groups: tuple[Any, ...] = (None,) * native.ndim
    else:
        groups = tuple(group_of(group, device_type) for group in native.get_all_groups())
    return NativeMesh(np.asarray(native.mesh.tolist(), dtype=np.int64), names, groups, None if root is native else root)


def make_mesh(
    ranks: np.ndarray, names: tuple[str, ...] | None, groups: Sequence[Any], root: Any, device_type: str
) -> Any:
    """Return the framework's mesh with these ranks and groups; see `Platform.native_mesh`."""
    if root is not None:
        try:
            return root[names]
        except KeyError:
            raise ValueError(
                f"torch slices a mesh in the order of its dimensions, {root.mesh_dim_names}, but this slice has the "
                f"order {names}: slice in the order of the mesh"
            ) from None
    if names is None and ranks.ndim > 1:
        raise ValueError(
            f"torch's mesh of the ranks {ranks.tolist()} needs names of dimensions: make this mesh with "
            "init_device_mesh(..., mesh_dim_names=(...))"
        )
    natives = [group() for group in groups]
    for dim, group in enumerate(natives):
        if group is None:
            raise RuntimeError("this mesh belongs to a process group that was destroyed: make a new mesh")
        members = dist.get_process_group_ranks(group)
        if members != sorted(members) or np.any(np.diff(ranks, axis=dim) <= 0):
            raise ValueError(
                f"the ranks {ranks.tolist()} must ascend along each dimension, as in torch's process groups: make a "
                "mesh with ascending ranks"
            )
    made = natives[0] if ranks.ndim == 1 else natives
    mesh = None if ranks.ndim == 1 else ranks.tolist()
    return _mesh_class().from_group(made, device_type, mesh, mesh_dim_names=names)


def group_of_mesh(original: Callable[..., Any], group: Any, tag: str = "") -> Any:
    """Replace the function that finds the group of a functional collective, to support meshes of this library.

    Raises:
        ValueError: for a mesh of several dimensions without a given dimension, and on a rank outside the mesh.
    """
    mesh, dim = group if isinstance(group, tuple) and len(group) == 2 else (group, None)
    if not isinstance(mesh, MeshMethods):
        return original(group, tag)
    found = mesh.get_group(dim)
    if found is None:
        raise ValueError(f"this rank is not part of {mesh}: call the collective on the ranks of the mesh alone")
    return original(found, tag)


def _mesh_class() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh
