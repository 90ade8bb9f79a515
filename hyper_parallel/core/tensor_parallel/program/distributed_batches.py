"""Tensor-parallel modules in a batch that is distributed over other dimensions of the mesh: data parallelism.

On the mesh ("dp", "tp"), a DTensor on ``mesh["dp"]`` arrives at a module whose style works on ``mesh["tp"]``: to the
style, each rank's part of it is a plain tensor. To the style, a DTensor on both dimensions is one on ``mesh["tp"]``,
and each row of ranks has its own. Results are put together the same way. A plain tensor is this rank's part of a
DTensor on ``mesh["dp"]``. A DTensor on ``mesh["tp"]`` becomes one on both dimensions. So between styled modules, and in
the loss, operations see the batch of all ranks.

The cotangent of a value placed `Shard` is the shard of it, on both sides; parameters get this rank's summand. So
modules with parameters take such batches under data parallelism alone, which adds these up, and says so in
`SUMMED_OVER`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from hyper_parallel.core.caches import Table
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.nesting import nest
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.rules.batch_parts import BATCH_PART, BatchPart
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label

__all__ = ["SUMMED_OVER", "OtherMeshError", "convert_part", "run_on_parts"]

#: The mesh over which gradients of the parameters of the modules that run are summed; None where they are not summed.
SUMMED_OVER: ContextVar[DeviceMesh | None] = ContextVar("hyper_parallel_summed_over", default=None)

_PART = "part of a batch"


class OtherMeshError(ValueError):
    """An input is distributed over another mesh than the one that the style works on."""


def run_on_parts(
    run: Callable[..., Any], module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh, error: OtherMeshError
) -> Any:
    """``run(module, ...)`` on this rank's part of inputs that are also distributed outside of ``mesh``.

    Args:
        run: a call of the module with plain inputs.
        module: the module.
        args, kwargs: its inputs. DTensors are on another slice of the mesh that ``mesh`` is a slice of, the same for
            all, or on that and ``mesh``. The first that is `Shard` along all dimensions of that slice is the batch, of
            which the results have the dimension too; others may be `Replicate`. Where the first input is replicated, it
            is cut along its first dimension.
        mesh: of the style.
        error: the error that was raised because of an input that is not on it.

    Returns:
        The module's result, with a DTensor that is placed as that input in place of each plain tensor, and on both
        meshes in place of each DTensor on ``mesh``.

    Raises:
        OtherMeshError: ``error``, where no input is placed so, or gradients are not summed.
        ValueError: where another input or a result does not.
    """
    # A recomputation in backward was checked in forward.
    if SUMMED_OVER.get() is None and not mesh.platform.in_backward():
        raise error
    args = _cut(args, mesh)
    batch, name = _batch_of((*args, *kwargs.values()), mesh), module_label(module)
    if batch is None:
        raise error

    def part(x: Any) -> Any:
        return _part_with(batch, x, mesh, name) if isinstance(x, DTensor) else x

    args, kwargs = tuple(map(part, args)), {key: part(x) for key, x in kwargs.items()}
    token = BATCH_PART.set(_samples(batch, mesh))
    try:
        output = run(module, *args, **kwargs)
    finally:
        BATCH_PART.reset(token)
    if isinstance(output, (tuple, list)):
        whole = [_result(y, batch, mesh, name) for y in output]
        return type(output)(*whole) if hasattr(output, "_fields") else type(output)(whole)
    return _result(output, batch, mesh, name)


def convert_part(
    x: Any,
    mesh: DeviceMesh,
    convert: Callable[[Any], Any],
    localize: Callable[[Any], Any] | None,
    what: str,
    error: OtherMeshError,
) -> Any:
    """``convert`` of this rank's part of a DTensor that is distributed outside of ``mesh`` too, put together again. Its
    placements there stay as they are.

    Args:
        x: the DTensor.
        mesh: of the style.
        convert: gives a DTensor on ``mesh`` for a plain tensor, or a DTensor there.
        localize: makes a plain tensor of that; None leaves it.
        what: names the tensor in messages.
        error: the error to raise where it is not distributed so.

    Raises:
        OtherMeshError: ``error``.
        ValueError: where the plain tensor would have a part of a dimension that is distributed outside of ``mesh``.
    """
    split = _SPLITS[x._layout, mesh]
    if split is None or any(p.is_partial() for p in split.outside.placements):
        raise error
    part = _kept_part(x, split, mesh)
    y = convert(_on(mesh, x.to_local(), split.own, split.outside.local_shape) if part is None else part)
    if localize is not None:
        (placed,) = y.placements
        if mesh.size() > 1 and any(p.is_shard() and placed.is_shard(p.dim) for p in split.outside.placements):
            raise ValueError(
                f"{what} is placed {list(split.outside.placements)} on {split.outside.mesh}, and the style would give "
                f"a plain part of it, placed {[placed]} on {mesh}: use_local_output=False (use_local_input for the "
                "inputs that PrepareModuleInputOutput gives the module) gives DTensors that are cut twice, or cut "
                "another dimension"
            )
        y = localize(y)
    return _whole(y, split.outside, mesh, what)


class _Split(NamedTuple):
    """The layout of a DTensor outside of a style's mesh, and its placement on that mesh."""

    #: On the other dimensions. The ranks of the style's mesh share its local part.
    outside: Layout
    #: How they share it; None where it is a plain tensor to them.
    own: Placement | None


def _split(key: tuple[Layout, DeviceMesh]) -> _Split | None:
    layout, mesh = key
    both = layout.mesh
    if both.is_beside(mesh):
        return _Split(layout, None)
    if both.ndim == 1 or not both.contains(mesh):
        return None
    at = both.index_of(mesh, 0)
    others = [mesh_dim for mesh_dim in range(both.ndim) if mesh_dim != at]
    # The layout of each alone: the order of the cuts, which strides say, is compared below.
    alone = [Shard(p.dim) if isinstance(p, StridedShard) else p for p in layout.placements]
    outside = get_layout(both.slices.at(tuple(others)), tuple(alone[mesh_dim] for mesh_dim in others), layout.shape)
    try:
        same = nest(outside, mesh, [alone[at]], layout.shape) is layout
    except ValueError:  # a `PackedShard` that another dimension cuts before
        same = False
    return _Split(outside, alone[at]) if same else None


#: (layout of a DTensor, 1-D mesh of a style) -> its layout outside of that mesh, or None where it has none.
_SPLITS: Table = Table(_split, 1 << 12, "layouts outside of the meshes of styles")


def _batch_of(inputs: tuple, mesh: DeviceMesh) -> Layout | None:
    """The layout of the first input that is sharded along all dimensions outside of ``mesh``; None without."""
    for x in inputs:
        split = _SPLITS[x._layout, mesh] if isinstance(x, DTensor) else None
        if split is not None:
            placements = split.outside.placements
            if all(type(p) is Shard and p is placements[0] for p in placements):
                return split.outside
    return None


def _cut(args: tuple, mesh: DeviceMesh) -> tuple:
    """``args``, the first of them sharded where it is replicated: operations leave a batch of one sample so."""
    x: Any = args[0] if args else None
    split = _SPLITS[x._layout, mesh] if isinstance(x, DTensor) and x._layout.ndim > 1 else None
    if split is None or any(p is not Replicate() for p in split.outside.placements):
        return args
    if split.own is None:
        return (x.redistribute(placements=[Shard(0)] * x.device_mesh.ndim), *args[1:])
    if split.own.is_shard(0):
        return args  # which this rank's part of the batch would be a part of
    at = x.device_mesh.index_of(mesh, 0)
    return (x.redistribute(placements=[p if i == at else Shard(0) for i, p in enumerate(x.placements)]), *args[1:])


def _part_with(batch: Layout, x: DTensor, mesh: DeviceMesh, name: str) -> Any:
    """This rank's part of an input, as a style on ``mesh`` takes it. A replicated input is used with each rank's part
    of the batch."""
    split = _SPLITS[x._layout, mesh]
    if split is None or split.outside.mesh is not batch.mesh or any(p.is_partial() for p in split.outside.placements):
        raise ValueError(
            f"an input of {name} is placed {list(x.placements)} on {x.device_mesh}, and another "
            f"{list(batch.placements)} on {batch.mesh}: redistribute it, x.redistribute(mesh, [Shard(0)]) or "
            "[Replicate()]"
        )
    outside, own = split
    of_batch = outside.placements == batch.placements
    if of_batch and not _is_empty(batch):
        part = _kept_part(x, split, mesh)
        if part is None:
            part = _on(mesh, x.to_local(), own, outside.local_shape)
            _keep_part(x, part, mesh)
        return part
    summands = [Partial() if p is Replicate() else p for p in x.placements]
    if own is not None:
        at = x.device_mesh.index_of(mesh, 0)
        summands[at] = x._layout.cotangent.placements[at]
    local, shape = x.to_local(grad_placements=summands), list(outside.local_shape)
    if of_batch:
        # A sample of zeros instead: not every framework's layers are right without samples, in backward above all. Its
        # output is dropped, so its cotangents are zeros.
        platform, dim = mesh.platform, _batch_dim(batch)
        shape[dim] = 1
        added = shape if own is None else get_layout(mesh, (own,), tuple(shape)).local_shape
        with platform.no_dispatch():
            local = platform.cat([local, platform.zeros(added, local)], dim)
    return _on(mesh, local, own, shape)


def _keep_part(x: DTensor, part: Any, mesh: DeviceMesh) -> None:
    """Cache the ``part`` of ``x`` on ``mesh``. Modules that read the same ``x`` then share one sum of its gradient."""
    with mesh.platform.no_dispatch():
        mesh.platform.write_cache(x, (_PART, mesh), part)


def _kept_part(x: DTensor, split: _Split, mesh: DeviceMesh) -> Any:
    """Return the argument of `_keep_part` where both have the same kind of cotangent, or None."""
    platform = mesh.platform
    if not all(isinstance(p, Shard) for p in split.outside.placements):
        return None
    with platform.no_dispatch():
        part = platform.read_cache(x, (_PART, mesh))
        return part if part is not None and platform.requires_grad(part) is platform.requires_grad(x) else None


def _on(mesh: DeviceMesh, local: Any, own: Placement | None, shape: Sequence[int]) -> Any:
    """A plain tensor as it is, or as a DTensor on ``mesh`` where it is a part of one."""
    return local if own is None else DTensor._of_part(local, get_layout(mesh, (own,), shape))


def _is_empty(batch: Layout) -> bool:
    """Return whether this rank, and with it all that are tensor parallel with it, has no sample."""
    return not batch.local_shape[_batch_dim(batch)]


def _samples(batch: Layout, mesh: DeviceMesh) -> BatchPart:
    """Return the samples that the module of a style on ``mesh`` gets."""
    dim = _batch_dim(batch)
    samples = batch.local_shape[dim]
    return BatchPart(mesh, dim, samples or 1, batch.local_offset[dim] if samples else 0, batch.shape[dim])


def _batch_dim(batch: Layout) -> int:
    """The dimension of the samples."""
    shard: Any = batch.placements[0]
    dim: int = shard.dim
    return dim


def _result(y: Any, batch: Layout, mesh: DeviceMesh, name: str) -> Any:
    platform, dim = mesh.platform, _batch_dim(batch)
    if not platform.is_tensor(y):
        return y
    if _is_empty(batch) and len(y.shape) > dim and (not isinstance(y, DTensor) or y.device_mesh is mesh):
        own, shape = None, list(y.shape)
        shape[dim] = 0
        if isinstance(y, DTensor):
            own, y = y.placements[0], y.to_local()
        with platform.no_dispatch():
            y = platform.narrow(y, dim, 0, 0)
        y = _on(mesh, y, own, shape)
    return _whole(y, batch, mesh, f"the output of {name}")


def _whole(y: Any, outside: Layout, mesh: DeviceMesh, what: str) -> Any:
    """The DTensor whose part on a row of ranks is ``y``, a plain tensor or a DTensor on ``mesh``.

    Args:
        y: the part.
        outside: the layout of another tensor outside of ``mesh``, of which the result has the sharded dimensions.
        mesh: of the style.
        what: names it in messages.

    Raises:
        ValueError: where ``y`` does not have these.
    """
    distributed, shape = isinstance(y, DTensor), list(y.shape)
    dims = {p.dim for p in outside.placements if isinstance(p, Shard)}
    if (distributed and y.device_mesh is not mesh) or any(
        len(shape) <= dim or shape[dim] != outside.local_shape[dim] for dim in dims
    ):
        where = f"is on {y.device_mesh}" if distributed else "is a plain tensor"
        raise ValueError(
            f"{what}, of shape {tuple(shape)}, {where}, and is no part of a batch of shape {tuple(outside.shape)} "
            f"placed {list(outside.placements)} on {outside.mesh}, of which this rank's has the shape "
            f"{tuple(outside.local_shape)}: give a plain tensor, or a DTensor on {mesh}, with the same dimension, or "
            "call the module with plain tensors"
        )
    for dim in dims:
        shape[dim] = outside.shape[dim]
    layout = get_layout(outside.mesh, outside.placements, tuple(shape))
    if distributed:
        layout = nest(layout, mesh, y.placements, shape)
    local = y.to_local() if distributed else y
    x = DTensor._of_part(local, layout)
    _keep_part(x, y, mesh)
    return x
