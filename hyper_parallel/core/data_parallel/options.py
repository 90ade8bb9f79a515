"""Options of `fully_shard`: dtypes, where shards are stored, and the meshes over which parameters are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.core.mesh.arrays import rows_along
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, current_mesh, init_device_mesh, resolve_mesh

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "data_parallel_mesh",
    "fewer_ranks",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes in which the modules of a unit compute and communicate. Shards, their gradients and the optimizer's state
    keep the dtype of the parameters.

    Attributes:
        param_dtype: framework dtype in which floating point parameters are gathered and read; None keeps each
            parameter's dtype.
        reduce_dtype: dtype in which gradients are accumulated and reduced; None is the dtype of the parameter.
        output_dtype: dtype to which floating point outputs of the module are converted; None converts nothing.
        cast_forward_inputs: convert floating point inputs of the module to ``param_dtype``.
        param_dtype_override_fn: function that `fully_shard` calls with each parameter. If it returns the parameter's
            own dtype, the parameter keeps that dtype. If it returns ``param_dtype`` or None, the parameter gets
            ``param_dtype``. It must return the same on all ranks.

    Example:
        >>> import torch
        >>> from hyper_parallel import MixedPrecisionPolicy
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16).cast_forward_inputs
        True

    Source: ``torch.distributed.fsdp.MixedPrecisionPolicy``, as of torch 2.15.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[Any], Any] | None = field(default=None, kw_only=True)

    def keeps_dtype(self, p: Any, what: str) -> bool:
        """Return whether a parameter is gathered and read in its own dtype.

        Args:
            p: the parameter.
            what: name of the parameter in messages.

        Raises:
            ValueError: if ``param_dtype_override_fn`` returns a dtype that is neither the parameter's own nor
                ``param_dtype``.
        """
        found = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(p)
        if found is not None and found not in (self.param_dtype, p.dtype):
            raise ValueError(
                f"{what}: param_dtype_override_fn returned {found!r}: it must return None, param_dtype "
                f"({self.param_dtype!r}), or the dtype of the parameter ({p.dtype!r})"
            )
        return self.param_dtype is None or (found is not None and found != self.param_dtype)


@dataclass(frozen=True)
class OffloadPolicy:
    """Policy that stores shards on this rank's device: the default, and the base class of other policies.

    Source: ``torch.distributed.fsdp.OffloadPolicy``.
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Policy that stores shards, their gradients and the optimizer's state in the memory of the host. A shard is copied
    to the device before the all-gather. A gradient is copied to the host after its reduction.

    Attributes:
        pin_memory: store shards in page-locked memory, if the platform has it.

    Source: ``torch.distributed.fsdp.CPUOffloadPolicy``.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Dimensions of a job's mesh that data parallelism uses.

    Attributes:
        shard: name of the dimension over which parameters are sharded, or names of several dimensions, which are
            flattened into one.
        replicate: name or names of the dimensions over which parameters are replicated; None if there are none.

    Raises:
        ValueError: without a dimension that shards. Use `replicate` in that case.

    Example:
        >>> from hyper_parallel import DataParallelMeshDims
        >>> DataParallelMeshDims(shard=("dp", "cp"), replicate="node").shard_names
        ('dp', 'cp')

    Source: ``torch.distributed.fsdp.DataParallelMeshDims``, as of torch 2.15.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names:
            raise ValueError(
                "DataParallelMeshDims names no dimension to shard over: pass shard, or apply replicate(module, mesh) "
                "to keep parameters unsharded"
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of the mesh dimensions in `shard`, as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names of the mesh dimensions in `replicate`, as a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def data_parallel_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims | None = None) -> DeviceMesh:
    """Return the 1-D or 2-D mesh of data parallelism: ``mesh``, or its dimensions ``dims``.

    Raises:
        TypeError: for ``dims`` that are no `DataParallelMeshDims`.
        ValueError: for a mesh of more than two dimensions, and for a mesh that lacks a named dimension.
    """
    if mesh is None:
        mesh = current_mesh() or init_device_mesh()
    mesh = resolve_mesh(mesh, "fully_shard")
    if dims is not None:
        return _along(mesh, dims)
    if mesh.ndim > 2:
        raise ValueError(
            "fully_shard takes a 1-D mesh to shard over, or a 2-D mesh whose first dimension replicates. It got a "
            f"mesh of shape {mesh.shape}: pass mesh['dp'] or mesh['dp_replicate', 'dp_shard'], or name the dimensions "
            "with dp_mesh_dims"
        )
    return mesh


def _along(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DeviceMesh:
    if not hasattr(dims, "shard_names") or not hasattr(dims, "replicate_names"):
        raise TypeError(f"fully_shard(dp_mesh_dims=...) takes a DataParallelMeshDims, got {dims!r}")
    missing = [n for n in (*dims.shard_names, *dims.replicate_names) if n not in (mesh.mesh_dim_names or ())]
    if missing:
        raise ValueError(f"fully_shard(dp_mesh_dims={dims!r}): {mesh} has no dimension {missing[0]!r}")
    if not dims.shard_names:
        raise ValueError(
            f"fully_shard(dp_mesh_dims={dims!r}) names no dimension to shard over: apply replicate instead"
        )
    meshes = [_joined(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
    return meshes[0] if len(meshes) == 1 else _in_order(meshes, dims)


def _joined(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    part: DeviceMesh = mesh[tuple(names)]
    return part if part.ndim == 1 else part._flatten("_".join(names))


def _in_order(meshes: Sequence[DeviceMesh], dims: DataParallelMeshDims) -> DeviceMesh:
    joined = DeviceMesh._concatenate(meshes)
    if joined.mesh_dim_names != tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ()):
        raise ValueError(
            f"fully_shard(dp_mesh_dims={dims!r}): the replicate dimension comes after the shard dimension in the "
            "mesh. Make a mesh with the replicate dimension first"
        )
    return joined


def fewer_ranks(mesh: DeviceMesh, reshard_after_forward: Any) -> DeviceMesh | None:
    """Return a mesh whose last dimension shards the parameters after forward, over fewer ranks than ``mesh``. Return
    None if all ranks of ``mesh`` shard the parameters after forward, or if the parameters stay unsharded.

    Args:
        mesh: data-parallel mesh, whose last dimension shards.
        reshard_after_forward: argument of `fully_shard`.

    Raises:
        TypeError: for anything but a bool, a number or None.
        ValueError: for a number that does not divide the number of ranks. Also if the root mesh of ``mesh`` lacks ranks
            of the world, because all ranks must create the new groups.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    if not isinstance(reshard_after_forward, int):
        raise TypeError(
            "fully_shard(reshard_after_forward=...) takes True, False, None, or a number of ranks to shard over after "
            f"forward, got {reshard_after_forward!r}"
        )
    size, count = mesh.shape[-1], reshard_after_forward
    if count < 1 or size % count:
        raise ValueError(
            f"fully_shard(reshard_after_forward={count}): {count} does not divide {size}, the number of ranks in the "
            f"shard dimension of {mesh}. Pass True, False, or a divisor"
        )
    if count in (1, size):
        return None
    root = mesh.get_root_mesh()
    if root.ranks.size != mesh.platform.world_size():
        raise ValueError(
            f"fully_shard(reshard_after_forward={count}) creates process groups, which needs all "
            f"{mesh.platform.world_size()} ranks of the world, and {root} has {root.ranks.size} ranks: pass True or "
            "False"
        )
    rows = np.array(rows_along(root.ranks, mesh.slices.along[-1])).reshape(-1, count)
    return DeviceMesh(mesh.device_type, rows, mesh_dim_names=("after_forward_groups", "after_forward"))
