"""Inputs of styled modules that are distributed over other mesh dimensions, as batches are with data parallelism.

Take the mesh ("dp", "tp") and a style on ``mesh["tp"]``. If an input is a DTensor on ``mesh["dp"]``, the style gets its
local tensor as a plain tensor. If it is a DTensor on both dimensions, the style gets a DTensor on ``mesh["tp"]``.
Outputs are converted back. A plain output becomes the local tensor of a DTensor on ``mesh["dp"]``. An output DTensor on
``mesh["tp"]`` becomes a DTensor on both dimensions. So operations between styled modules, and the loss, have the global
batch.

The cotangent of a sharded tensor is sharded in the same way. The gradients of parameters are partial over the other
dimension. So modules with parameters take distributed batches only under data parallelism, which sums their gradients.
Data parallelism reports this in `SUMMED_OVER`.

The library itself makes and takes the plain tensors here, so the check of plain code does not judge them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.caches import Table
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.nesting import nest
from hyper_parallel.core.layouts.placement_types import Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import SUMMED_OVER
from hyper_parallel.core.plain_code.contexts import unmarked
from hyper_parallel.core.rules.batch_parts import BATCH_PART, BatchPart
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label

__all__ = ["OtherMeshError", "convert_part", "run_on_parts"]

_PART = "part of a batch"


class OtherMeshError(ValueError):
    """Error for an input that is distributed over another mesh than that of the style."""


@unmarked()
def run_on_parts(
    run: Callable[..., Any], module: Any, args: tuple, kwargs: dict, mesh: DeviceMesh, error: OtherMeshError
) -> Any:
    """Run a module on this rank's shard of inputs that are distributed over mesh dimensions outside of ``mesh``.

    Args:
        run: function that calls the module with inputs as the style takes them.
        module: the module.
        args, kwargs: inputs of the module. DTensors are on other dimensions of the root mesh, which are the same for
            all inputs, and possibly on ``mesh`` too. The first input that is `Shard` along all other dimensions is the
            batch. Further inputs may be `Replicate`. A replicated first input is sharded along its first dimension.
        mesh: mesh of the style.
        error: the error that was raised for an input on another mesh.

    Returns:
        The module's output. A plain tensor becomes a DTensor with the batch's placements. A DTensor on ``mesh`` becomes
        a DTensor on the other dimensions and ``mesh``.

    Raises:
        OtherMeshError: ``error``, if no input is such a batch, or gradients are not summed over the other dimensions.
        ValueError: if another input or an output does not belong to the batch.
    """
    # A recomputation in backward needs no check: its forward was checked.
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


@unmarked()
def convert_part(
    x: Any,
    mesh: DeviceMesh,
    convert: Callable[[Any], Any],
    localize: Callable[[Any], Any] | None,
    what: str,
    error: OtherMeshError,
) -> Any:
    """Convert a DTensor along ``mesh``, and keep its placements on the mesh dimensions outside of ``mesh``.

    Args:
        x: DTensor on other mesh dimensions, and possibly on ``mesh`` too.
        mesh: mesh of the style.
        convert: function from this rank's shard, a plain tensor or a DTensor on ``mesh``, to a DTensor on ``mesh``.
        localize: function from the result of ``convert`` to a plain tensor; None keeps the DTensor.
        what: name of the tensor in messages.
        error: the error to raise if ``x`` is not distributed outside of ``mesh``, or is partial there.

    Raises:
        OtherMeshError: ``error``.
        ValueError: if ``localize`` would make a plain tensor of a dimension that both meshes shard.
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
                f"{what} is placed {list(split.outside.placements)} on {split.outside.mesh}, and the style also places "
                f"it {[placed]} on {mesh}: both shard one dimension, which a plain tensor cannot express. "
                "Set use_local_output=False (use_local_input for inputs of PrepareModuleInputOutput) to get DTensors, "
                "or shard another dimension"
            )
        y = localize(y)
    return _whole(y, split.outside, mesh, what)


class _Split(NamedTuple):
    """A DTensor's layout on the mesh dimensions outside of a style's mesh, and its placement on the style's mesh."""

    #: Layout on the other mesh dimensions.
    outside: Layout
    #: Placement of its local tensor on the style's mesh; None for a DTensor that is not on the style's mesh.
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
    # Layouts without the order of sharding, which `StridedShard` expresses; the order is compared below.
    alone = [Shard(p.dim) if isinstance(p, StridedShard) else p for p in layout.placements]
    outside = get_layout(both.slices.at(tuple(others)), tuple(alone[mesh_dim] for mesh_dim in others), layout.shape)
    try:
        same = nest(outside, mesh, [alone[at]], layout.shape) is layout
    except ValueError:  # for a `PackedShard` of a dimension that another mesh dimension shards first
        same = False
    return _Split(outside, alone[at]) if same else None


#: (layout of a DTensor, 1-D mesh of a style) -> `_Split`, or None for a DTensor that cannot be split.
_SPLITS: Table = Table(_split, 1 << 12, "layouts outside of the meshes of styles")


def _batch_of(inputs: tuple, mesh: DeviceMesh) -> Layout | None:
    """Return the layout of the batch on the mesh dimensions outside of ``mesh``; None if no input is a batch.

    The batch is the first input that all these mesh dimensions shard, along one tensor dimension.
    """
    for x in inputs:
        split = _SPLITS[x._layout, mesh] if isinstance(x, DTensor) else None
        if split is not None:
            placements = split.outside.placements
            if all(type(p) is Shard and p is placements[0] for p in placements):
                return split.outside
    return None


def _cut(args: tuple, mesh: DeviceMesh) -> tuple:
    """Return ``args``, where a replicated first input is sharded along its first dimension.

    Operations may leave a batch of one sample replicated.
    """
    x: Any = args[0] if args else None
    split = _SPLITS[x._layout, mesh] if isinstance(x, DTensor) and x._layout.ndim > 1 else None
    if split is None or any(p is not Replicate() for p in split.outside.placements):
        return args
    if split.own is None:
        return (x.redistribute(placements=[Shard(0)] * x.device_mesh.ndim), *args[1:])
    if split.own.is_shard(0):
        return args  # the style's mesh shards the first dimension already
    at = x.device_mesh.index_of(mesh, 0)
    return (x.redistribute(placements=[p if i == at else Shard(0) for i, p in enumerate(x.placements)]), *args[1:])


def _part_with(batch: Layout, x: DTensor, mesh: DeviceMesh, name: str) -> Any:
    """Return this rank's shard of an input, in the form in which a style on ``mesh`` takes it.

    Every rank uses all of a replicated input with its shard of the batch.
    """
    split = _SPLITS[x._layout, mesh]
    if split is None or split.outside.mesh is not batch.mesh or any(p.is_partial() for p in split.outside.placements):
        raise ValueError(
            f"{name} got inputs on different meshes: one is placed {list(batch.placements)} on {batch.mesh}, another "
            f"{list(x.placements)} on {x.device_mesh}. Redistribute the latter to the mesh of the former, "
            "x.redistribute(mesh, [Shard(0)]) or [Replicate()]"
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
        # A sample of zeros: some layers of frameworks fail without samples, above all in backward. The output of this
        # sample is dropped, so its cotangents are zeros.
        platform, dim = mesh.platform, _batch_dim(batch)
        shape[dim] = 1
        added = shape if own is None else get_layout(mesh, (own,), tuple(shape)).local_shape
        with platform.no_dispatch():
            local = platform.cat([local, platform.zeros(added, local)], dim)
    return _on(mesh, local, own, shape)


def _keep_part(x: DTensor, part: Any, mesh: DeviceMesh) -> None:
    """Cache ``part``, the shard of ``x`` that a style on ``mesh`` takes.

    Modules that read ``x`` then share one reduction of its gradient.
    """
    with mesh.platform.no_dispatch():
        mesh.platform.write_cache(x, (_PART, mesh), part)


def _kept_part(x: DTensor, split: _Split, mesh: DeviceMesh) -> Any:
    """Return the shard that `_keep_part` cached for ``x``, or None.

    It is used only if ``x`` is sharded outside of the style's mesh, and both or neither need a gradient.
    """
    platform = mesh.platform
    if not all(isinstance(p, Shard) for p in split.outside.placements):
        return None
    with platform.no_dispatch():
        part = platform.read_cache(x, (_PART, mesh))
        return part if part is not None and platform.requires_grad(part) is platform.requires_grad(x) else None


def _on(mesh: DeviceMesh, local: Any, own: Placement | None, shape: Sequence[int]) -> Any:
    """Return ``local`` as the local tensor of a DTensor on ``mesh`` with the placement ``own``.

    Return ``local`` itself if ``own`` is None.
    """
    return local if own is None else DTensor._of_part(local, get_layout(mesh, (own,), shape))


def _is_empty(batch: Layout) -> bool:
    """Return whether this rank has no sample. Then all ranks of its tensor-parallel group have none."""
    return not batch.local_shape[_batch_dim(batch)]


def _samples(batch: Layout, mesh: DeviceMesh) -> BatchPart:
    """Return the samples of the batch that a module with a style on ``mesh`` gets on this rank."""
    dim = _batch_dim(batch)
    samples = batch.local_shape[dim]
    return BatchPart(mesh, dim, samples or 1, batch.local_offset[dim] if samples else 0, batch.shape[dim])


def _batch_dim(batch: Layout) -> int:
    """Return the tensor dimension of the samples."""
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
    """Return the DTensor on the mesh of ``outside`` whose local tensor is ``y``.

    Args:
        y: plain tensor, or a DTensor on ``mesh``.
        outside: layout of another tensor outside of ``mesh``. The result has its placements and sharded sizes.
        mesh: mesh of the style.
        what: name of the tensor in messages.

    Raises:
        ValueError: if a sharded dimension of ``y`` does not have the local size of ``outside``.
    """
    distributed, shape = isinstance(y, DTensor), list(y.shape)
    dims = {p.dim for p in outside.placements if isinstance(p, Shard)}
    if (distributed and y.device_mesh is not mesh) or any(
        len(shape) <= dim or shape[dim] != outside.local_shape[dim] for dim in dims
    ):
        where = f"is on {y.device_mesh}" if distributed else "is a plain tensor"
        raise ValueError(
            f"{what}, of shape {tuple(shape)}, {where}, and does not have this rank's samples: its shard of the batch "
            f"has shape {tuple(outside.local_shape)} (the batch of shape {tuple(outside.shape)} is placed "
            f"{list(outside.placements)} on {outside.mesh}). Return a plain tensor or a DTensor on {mesh} with the "
            "same batch dimension, or call the module with plain tensors"
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
