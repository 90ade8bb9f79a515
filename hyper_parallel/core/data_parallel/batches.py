"""Whether a batch is distributed: by DTensors on a mesh that data parallelism is a dimension of, or by plain tensors."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh

__all__ = ["lies_across", "refuse_distributed_batch"]


def _lies_across(key: tuple[DeviceMesh, DeviceMesh]) -> bool:
    mesh, data_parallel = key
    if mesh.get_root_mesh() is not data_parallel.get_root_mesh():
        return True
    mine, theirs = ({dim for entry in m._along for dim in entry} for m in key)
    return not mine.isdisjoint(theirs)


#: (mesh of a DTensor, mesh of data parallelism) -> whether they have a dimension in common, or no root.
_ACROSS: Table = Table(_lies_across, 1 << 10, "meshes beside data parallelism")


def lies_across(x: Any, mesh: DeviceMesh) -> bool:
    """Whether the ranks of the data-parallel ``mesh`` share the DTensor ``x``, instead of having one each."""
    return bool(_ACROSS[x._layout.mesh, mesh])


def refuse_distributed_batch(x: Any, mesh: DeviceMesh, where: str) -> None:
    """Raise ValueError for a DTensor that data-parallel ranks share."""
    if lies_across(x, mesh):
        raise ValueError(
            f"{where} a DTensor of shape {tuple(x._layout.shape)} placed {list(x.placements)} on {x._layout.mesh}: give "
            "and compute plain tensors, this rank's part of the batch, as in x.to_local(), or DTensors on another "
            "dimension of the mesh than data parallelism"
        )
