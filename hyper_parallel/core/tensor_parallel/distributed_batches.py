"""Tensor-parallel modules in a batch that is distributed over other dimensions of the mesh: data parallelism.

On the mesh ("dp", "tp"), a DTensor on ``mesh["dp"]`` arrives at a module whose style works on ``mesh["tp"]``. Each rank
gives the module its part of the batch as a plain tensor, and what the module returns is this rank's part of a DTensor
that is placed as the input. So between styled modules, and in the loss, operations see the batch of all ranks.

A cotangent of what is placed `Shard` is the shard of it, on both sides; parameters get this rank's summand. So this is
for modules under data parallelism, which adds these up, and says so in `SUMMED_OVER`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.tensor_parallel.planned_parameters import module_label

__all__ = ["SUMMED_OVER", "OtherMeshError", "run_on_parts"]

#: The mesh over which gradients of the parameters of the modules that run are summed; None where nobody does.
SUMMED_OVER: ContextVar[DeviceMesh | None] = ContextVar("hyper_parallel_summed_over", default=None)


class OtherMeshError(ValueError):
    """An input is distributed over another mesh than the one that the style works on."""


def run_on_parts(
    run: Callable[..., Any], module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh, error: OtherMeshError
) -> Any:
    """``run(module, ...)`` on this rank's part of inputs that are distributed beside ``mesh``.

    Args:
        run: a call of the module with plain inputs.
        module: the module.
        args, kwargs: its inputs. DTensors are on one mesh: another slice of the mesh that ``mesh`` is a slice of. The
            first that is `Shard` along all of its dimensions is the batch, of which the results have the dimension too;
            others may be `Replicate`. Where the first input is replicated, it is cut along its first dimension.
        mesh: of the style.
        error: what was raised because of an input that is not on it.

    Returns:
        What the module returns, with a DTensor that is placed as that input in place of each plain tensor.

    Raises:
        OtherMeshError: ``error``, where no input lies so, or nobody adds up gradients.
        ValueError: where another input or a result does not.
    """
    # What is computed again in backward was looked at in forward.
    if SUMMED_OVER.get() is None and not mesh.platform.in_backward():
        raise error
    args = _cut(args, mesh)
    batch, name = _batch_of((*args, *kwargs.values()), mesh), module_label(module)
    if batch is None:
        raise error
    output = run(
        module, *[_part(x, batch, name) for x in args], **{key: _part(x, batch, name) for key, x in kwargs.items()}
    )
    if isinstance(output, (tuple, list)):
        whole = [_whole(y, batch, name) for y in output]
        return type(output)(*whole) if hasattr(output, "_fields") else type(output)(whole)
    return _whole(output, batch, name)


def _batch_of(inputs: tuple, mesh: DeviceMesh) -> Any:
    """The first input that is sharded along all dimensions of its mesh, which lies beside ``mesh``; None without."""
    for x in inputs:
        if isinstance(x, DTensor) and x.device_mesh.is_beside(mesh):
            placements = x.placements
            if all(type(p) is Shard and p is placements[0] for p in placements):
                return x
    return None


def _cut(args: tuple, mesh: DeviceMesh) -> tuple:
    """``args``, the first of them sharded where it is replicated: operations leave a batch of one sample so."""
    x = args[0] if args else None
    if not isinstance(x, DTensor) or not x.device_mesh.is_beside(mesh) or x._layout.ndim < 2:
        return args
    if any(p is not Replicate() for p in x.placements):
        return args
    return (x.redistribute(placements=[Shard(0)] * x.device_mesh.ndim), *args[1:])


def _part(x: Any, batch: Any, name: str) -> Any:
    """This rank's part of an input. What is replicated is used with each rank's part of the batch."""
    if not isinstance(x, DTensor):
        return x
    if x.device_mesh is not batch.device_mesh or any(p.is_partial() for p in x.placements):
        raise ValueError(
            f"an input of {name} is placed {list(x.placements)} on {x.device_mesh}, and another "
            f"{list(batch.placements)} on {batch.device_mesh}: redistribute it, x.redistribute(mesh, [Shard(0)]) or "
            "[Replicate()]"
        )
    local = x.to_local(grad_placements=[Partial() if p is Replicate() else p for p in x.placements])
    if x.placements != batch.placements or not _is_empty(batch):
        return local
    # A sample of zeros instead: not every framework's layers are right without samples, in backward above all. What
    # it gives is dropped, so its cotangents are zeros.
    platform, dim = x.device_mesh.platform, batch.placements[0].dim
    shape = list(x._layout.local_shape)
    shape[dim] = 1
    with platform.no_dispatch():
        return platform.cat([local, platform.zeros(shape, local)], dim)


def _is_empty(batch: Any) -> bool:
    """Whether this rank, and with it all that are tensor parallel with it, has no sample."""
    return not batch._layout.local_shape[batch.placements[0].dim]


def _whole(y: Any, batch: Any, name: str) -> Any:
    platform, layout = batch.device_mesh.platform, batch._layout
    if not platform.is_tensor(y):
        return y
    dim, local = layout.placements[0].dim, layout.local_shape
    if _is_empty(batch) and not isinstance(y, DTensor) and len(y.shape) > dim:
        with platform.no_dispatch():
            y = platform.narrow(y, dim, 0, 0)
    if isinstance(y, DTensor) or len(y.shape) <= dim or y.shape[dim] != local[dim]:
        what = f"a DTensor on {y.device_mesh}" if isinstance(y, DTensor) else "a plain tensor"
        raise ValueError(
            f"{name} was called with a batch of {layout.shape[dim]} in dimension {dim}, of which this rank has "
            f"{local[dim]}, and returned {what} of shape {tuple(y.shape)}: return plain tensors "
            "(use_local_output=True) with the same dimension, or call the module with plain tensors"
        )
    shape = list(y.shape)
    shape[dim] = layout.shape[dim]
    return DTensor.from_local(y, layout.mesh, layout.placements, shape=shape)
