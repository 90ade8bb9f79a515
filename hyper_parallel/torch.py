"""Conversion to and from torch's DTensors: `to_torch_dtensor` and `from_torch_dtensor`.

Use them for code that takes torch's DTensors, such as `torch.distributed.checkpoint` and other libraries. Nothing is
copied or communicated, and gradients pass through. Meshes have the methods `DeviceMesh.from_torch` and
`DeviceMesh.to_torch`. docs/torch_interop.md lists the pairs of placements. Torch is imported at the first call.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform import PlatformError, get_platform

__all__ = ["from_torch_dtensor", "to_torch_dtensor"]


def to_torch_dtensor(x: Any) -> Any:
    """Return a DTensor as torch's DTensor over the same memory. The conversion is differentiable.

    Args:
        x: `hyper_parallel.DTensor` of any shape and dtype.

    Returns:
        ``torch.distributed.tensor.DTensor`` of the same global shape and dtype, on ``x.device_mesh.to_torch()``, with
        torch's placements of the same names; `StridedShard` becomes ``_StridedShard``. The result for a parameter is
        not a parameter. Its gradients flow to the parameter, with the placements of the parameter.

    Raises:
        PlatformError: when the platform of this process is not one of torch.
        TypeError: for anything else.
        ValueError: on all ranks, for a `PackedShard`, which torch lacks, and when `DeviceMesh.to_torch` raises.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh
        >>> from hyper_parallel.torch import to_torch_dtensor
        >>> x = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        >>> to_torch_dtensor(x).placements
        (Shard(dim=0),)
    """
    return _conversions("to_torch_dtensor").to_native(x)


def from_torch_dtensor(x: Any) -> Any:
    """Return torch's DTensor as this library's DTensor over the same memory. The conversion is differentiable.

    Args:
        x: ``torch.distributed.tensor.DTensor`` of any shape and dtype.

    Returns:
        `hyper_parallel.DTensor` of the same global shape and dtype, on ``DeviceMesh.from_torch(x.device_mesh)``.

    Raises:
        PlatformError: when the platform of this process is not one of torch.
        TypeError: for anything else.
        ValueError: on all ranks, for a placement that this library lacks, and when `DeviceMesh.from_torch` raises.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh
        >>> from hyper_parallel.torch import from_torch_dtensor
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> x = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)).to_torch(), [Shard(0)])
        >>> from_torch_dtensor(x).placements
        (Shard(dim=0),)
    """
    return _conversions("from_torch_dtensor").from_native(x)


def _conversions(asked: str) -> Any:
    """Return the module of the conversions, which imports torch."""
    platform = get_platform()
    if not platform.name.startswith("torch-"):
        raise PlatformError(
            f"hyper_parallel.torch.{asked} works with torch's own DTensors, but the platform of this process is "
            f"{platform.name!r}. Set HYPER_PARALLEL_PLATFORM=torch-cpu (or torch-cuda, torch-npu) before the program "
            "starts"
        )
    from hyper_parallel.platform.torch.native import native_dtensors

    return native_dtensors
