"""Conversions between torch's DTensors and DTensors of this library, over the same memory.

Both libraries use the same cotangents: full for `Replicate` and `Partial`, and sharded for `Shard`. So conversions do
not change gradients, except for partial averages. For these, the value of a rank gets a share of the cotangent here,
and the full cotangent in torch.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.torch.basics.private import strided_shard
from hyper_parallel.platform.torch.basics.tensor import State, is_dtensor

__all__ = ["as_native", "describe_placement", "from_native", "is_native", "native_placements", "to_native"]


_API = "torch.distributed.tensor"


def _api() -> Any:
    """Return torch's module, imported on demand because the import takes long."""
    return importlib.import_module(_API)


def is_native(x: Any) -> bool:
    """Return whether ``x`` is one of torch's own DTensors."""
    api = sys.modules.get(_API)
    return api is not None and isinstance(x, api.DTensor)


def are_native_apart(tensors: Sequence[Any], tensor_class: Any) -> bool:
    """Return whether torch cannot process ``tensors`` together, because of torch's own DTensors among them. Torch
    cannot if its DTensors are on several meshes, or mixed with plain tensors or ``tensor_class``."""
    api = sys.modules.get(_API)
    if api is None:
        return False
    natives = [x for x in tensors if type(x) is not tensor_class and isinstance(x, api.DTensor)]
    if not natives:
        return False
    meshes = [x.device_mesh for x in natives]
    return len(natives) < len(tensors) or any(mesh is not meshes[0] and mesh != meshes[0] for mesh in meshes)


def native_placements(layout: Any) -> tuple[Any, ...]:
    """Convert the placements of a layout to torch's.

    Raises:
        ValueError: for a packed shard, which torch lacks.
    """
    return tuple(_native_placement(p, layout) for p in layout.placements)


def _native_placement(p: Any, layout: Any) -> Any:
    api = _api()
    if p.is_partial():
        return api.Partial(p.reduce_op)
    if p.is_replicate():
        return api.Replicate()
    if hasattr(p, "sizes"):
        raise ValueError(
            f"torch has no counterpart of {p!r}: redistribute the tensor to Shard({p.dim}) or Replicate() first. To "
            "keep a packed parameter, use DistributedDataParallel, or fully_shard of hyper_parallel"
        )
    if hasattr(p, "split_factor"):
        return strided_shard()(p.dim, split_factor=p.split_factor)
    return api.Shard(p.dim)


def as_native(local: Any, layout: Any, strides: Sequence[int]) -> Any:
    """Return torch's DTensor of this layout with the plain tensor ``local``; differentiable. ``strides`` are the
    strides of the full tensor."""
    return _api().DTensor.from_local(
        local,
        layout.mesh.to_torch(),
        native_placements(layout),
        run_check=False,
        shape=torch.Size(layout.shape),
        stride=tuple(strides),
    )


def to_native(x: Any) -> Any:
    """Convert a DTensor of this library to torch's: see `hyper_parallel.torch.to_torch_dtensor`."""
    if not is_dtensor(x):
        hint = ", which needs no conversion" if is_native(x) else ""
        raise TypeError(f"to_torch_dtensor takes a DTensor of hyper_parallel, got {type(x).__name__}{hint}")
    layout = x._layout
    layout.mesh.require_member("to_torch_dtensor")
    native_placements(layout)
    local = x.to_local()
    factor = _of_averages([(p.reduce_op if p.is_partial() else "") for p in layout.placements], layout.mesh, x)
    if factor != 1:
        local.register_hook(lambda g: g / factor)
    return as_native(local, layout, State.core.strides_of_whole(x))


def from_native(x: Any) -> Any:
    """Convert torch's DTensor to one of this library: see `hyper_parallel.torch.from_torch_dtensor`."""
    if not is_native(x):
        hint = ", which needs no conversion" if is_dtensor(x) else ""
        raise TypeError(f"from_torch_dtensor takes torch's own DTensor, got {type(x).__name__}{hint}")
    mesh, placements = x.device_mesh, [_described(p) for p in x.placements]
    layout = State.core.layout_of_native(mesh, mesh.device_type, placements, tuple(x.shape))
    replicate = _api().Replicate()
    whole = [replicate if p.is_partial() else p for p in x.placements]
    local = x.to_local(grad_placements=whole)
    if type(local) is not Tensor:
        local = local.wait()  # the pending result of a collective of torch
    factor = _of_averages([(p.reduce_op if p.is_partial() else "") for p in x.placements], mesh, x)
    if factor != 1:
        local.register_hook(lambda g: g * factor)
    return State.core.from_local(local, layout)


def _of_averages(reduce_ops: Sequence[str], mesh: Any, x: Any) -> int:
    """Return the number of ranks that ``x`` averages over; 1 for a tensor without gradients or averages.

    In torch, the cotangent is with respect to the average. In this library it is with respect to each rank's value, and
    is smaller by this factor.

    Raises:
        ValueError: for gradients of a maximum, minimum or product. Torch passes these to all ranks.
    """
    if not x.requires_grad:
        return 1
    for op in reduce_ops:
        if op not in ("", "sum", "avg"):
            raise ValueError(
                f"a DTensor of shape {tuple(x.shape)} placed {list(x.placements)} needs gradients, but torch would "
                f"give all ranks the same gradient for {op!r}: redistribute the DTensor to Replicate() before the "
                "conversion"
            )
    return math.prod(mesh.shape[dim] for dim, op in enumerate(reduce_ops) if op == "avg")


def _described(p: Any) -> tuple[Any, ...]:
    """Describe torch's placement ``p`` as `describe_placement` does, and raise if that returns None.

    Raises:
        ValueError: for a placement without counterpart in this library.
    """
    found = describe_placement(p)
    if found is None:
        raise ValueError(
            f"hyper_parallel has no counterpart of torch's {p!r}: redistribute the tensor to Replicate() first"
        )
    return found


def describe_placement(p: Any) -> tuple[Any, ...] | None:
    """Describe a placement of the framework by core's class and its arguments."""
    api: Any = sys.modules.get(_API)
    kind = type(p)
    if api is None:
        return None
    if kind is api.Replicate:
        return ("Replicate",)
    if kind is api.Partial:
        return ("Partial", p.reduce_op)
    if kind is api.Shard:
        return ("Shard", p.dim)
    return ("StridedShard", p.dim, p.split_factor) if kind is strided_shard() else None
