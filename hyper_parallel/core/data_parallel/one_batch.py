"""Whether the ranks have one batch, or each its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.trees import tensors_in
from hyper_parallel.core.dtensor.tensor import DTensor

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.device_mesh import DeviceMesh

__all__ = ["is_one_batch"]


def is_one_batch(inputs: Any, mesh: DeviceMesh, what: str, is_tensor_parallel: bool = False) -> bool:
    """Whether the tensors among ``inputs`` are DTensors on ``mesh``, one batch for all ranks, and not plain ones, a
    batch of each rank's own. Those on meshes without the dimension of ``mesh``, and tensors without dimensions, are
    neither.

    Raises:
        ValueError: when there are both, and for one batch where parameters are tensor parallel.
    """
    kinds: dict[bool, Any] = {}
    for x in tensors_in(inputs, mesh.platform):
        if isinstance(x, DTensor):
            if x.device_mesh is mesh or _has(x.device_mesh, mesh):
                kinds[True] = x
        elif x.ndim:
            kinds[False] = x
    if len(kinds) > 1:
        raise ValueError(
            f"{what} was called with a DTensor of shape {tuple(kinds[True].shape)} on {mesh} and with a plain tensor "
            f"of shape {tuple(kinds[False].shape)}: one says that the ranks have one batch, the other that each has "
            "its own. Give DTensors (distribute_tensor(x, mesh, [Shard(0)]), or [Replicate()] for what all ranks "
            "share), or plain tensors alone"
        )
    if True in kinds and (is_tensor_parallel or kinds[True].device_mesh is not mesh):
        raise ValueError(
            f"{what} was called with a DTensor of shape {tuple(kinds[True].shape)} on {kinds[True].device_mesh}, "
            f"{'and its parameters are tensor parallel' if is_tensor_parallel else f'and was replicated over {mesh}'}: "
            f"give it the plain tensor of this rank's part of the batch, as in x.to_local()"
        )
    return True in kinds


def _has(mesh: DeviceMesh, dimension: DeviceMesh) -> bool:
    """Whether the 1-D mesh ``dimension`` is one of the dimensions of ``mesh``."""
    names, (name,) = mesh.mesh_dim_names or (), dimension.mesh_dim_names or (None,)
    return mesh.get_root_mesh() is dimension.get_root_mesh() and name in names
