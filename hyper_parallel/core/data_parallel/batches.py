"""Distributed batches: DTensors that data-parallel ranks share, in place of one plain tensor per rank.

All ranks then have one loss, and gradients are summed. Unsharded parameters are replicated DTensors, and are read in
two ways. Operations on a shard of the batch give partial cotangents. The reduce-scatter of the unit reduces them, so
such operations read the gathered parameter itself. Operations that all ranks repeat on the same values give the full
cotangent on each rank. Only one rank's cotangent is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.transitions import one_summand
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import SUMMED_OVER
from hyper_parallel.core.rules.random import BESIDE

__all__ = ["is_distributed", "placed_across", "mixed_batch", "summed_over", "whole_for_all"]


#: (mesh of a DTensor, mesh of data parallelism) -> whether the two meshes share a dimension, or have different roots.
_ACROSS: Table = Table(lambda key: not key[0].is_beside(key[1]), 1 << 10, "meshes beside data parallelism")
#: (mesh of a DTensor, mesh of data parallelism) -> whether the first mesh contains all ranks of the second.
_SPANS: Table = Table(lambda key: key[0].spans(key[1]), 1 << 10, "meshes with data parallelism")


def placed_across(x: Any, mesh: DeviceMesh) -> bool:
    """Return whether the ranks of the data-parallel ``mesh`` share the tensor, instead of holding independent
    tensors."""
    return isinstance(x, DTensor) and bool(_ACROSS[x._layout.mesh, mesh])


def is_distributed(tensors: Iterable[Any], mesh: DeviceMesh, what: str) -> bool | None:
    """Return whether the inputs of a module are a distributed batch; None if no input decides it.

    DTensors on other dimensions of the mesh and 0-D tensors are ignored.

    Args:
        tensors: all tensor arguments of the module.
        mesh: data-parallel mesh.
        what: name of the module, and of the function that was applied to it, for messages.

    Raises:
        ValueError: for a mix of plain tensors and DTensors, and for a DTensor on another mesh.
    """
    shared: Any = None
    own: Any = None
    plain = mesh.platform.Tensor
    for x in tensors:
        if type(x) is plain:
            own = x if x.ndim else own
        elif placed_across(x, mesh):
            shared = x
        elif x.ndim and not isinstance(x, DTensor):
            own = x
    if shared is None:
        return None if own is None else False
    layout = shared._layout
    if own is not None:
        raise ValueError(
            f"{what} was called with a DTensor of shape {tuple(layout.shape)} on {layout.mesh} and with a plain "
            f"tensor of shape {tuple(own.shape)}. A DTensor means one batch for all ranks, a plain tensor means a "
            "batch for each rank. Pass DTensors alone (distribute_tensor(x, mesh, [Shard(0)]), or [Replicate()] for "
            "shared tensors), or plain tensors alone"
        )
    if layout.mesh is not mesh and not _SPANS[layout.mesh, mesh]:
        raise ValueError(
            f"{what} was called with a DTensor of shape {tuple(layout.shape)} placed {list(shared.placements)} on "
            f"{layout.mesh}, but its parameters are on {mesh}: pass a DTensor on the mesh of the parameters"
        )
    return True


@contextmanager
def summed_over(mesh: DeviceMesh | None, inner: Sequence[DeviceMesh]) -> Iterator[None]:
    """Context manager that sets the mesh over which gradients are summed, for modules that run inside.

    Args:
        mesh: data-parallel mesh of a distributed batch; None if gradients are not summed.
        inner: meshes on which tensor-parallel styles have placed parameters.
    """
    summed, drawn = SUMMED_OVER.set(mesh), BESIDE.set(tuple(inner)) if inner else None
    try:
        yield
    finally:
        SUMMED_OVER.reset(summed)
        if drawn is not None:
            BESIDE.reset(drawn)


def mixed_batch(what: str, distributed: bool) -> ValueError:
    """Return the error for a unit that gets DTensors inside one that got plain tensors, or vice versa."""
    given, others = ("DTensors", "plain tensors") if distributed else ("plain tensors", "DTensors")
    return ValueError(
        f"{what} was called with {given}, and the outermost module under fully_shard with {others}. With DTensors all "
        "data-parallel ranks have one loss, with plain tensors each rank has its own loss. Call all units with "
        "tensors of the same kind"
    )


def whole_for_all(x: Any, mesh: DeviceMesh) -> Any:
    """Return an unsharded parameter as a DTensor that is replicated on the data-parallel ``mesh``.

    Args:
        x: plain tensor, whose cotangents are summed over all ranks. Interception is off.
        mesh: 1-D or 2-D mesh.
    """
    platform = mesh.platform
    layout = get_layout(mesh, (Replicate(),) * mesh.ndim, tuple(platform.shape_of(x)))
    if not platform.requires_grad(x):
        return platform.wrap(platform.detach(x), layout)
    dims = range(mesh.ndim)
    whole = platform.wrap(_counted_once(x, mesh, dims), layout)
    for count in range(1, mesh.ndim + 1):
        for partial in combinations(dims, count):
            view = _counted_once(x, mesh, [d for d in dims if d not in partial])
            platform.write_cache(whole, (mesh, partial), view)
    return whole


def _counted_once(x: Any, mesh: DeviceMesh, mesh_dims: Iterable[int]) -> Any:
    """Return a view whose cotangent is equal on all ranks of these mesh dimensions, and is counted on one."""
    for mesh_dim in mesh_dims:
        x = one_summand(mesh, mesh_dim).back(x)
    return x
