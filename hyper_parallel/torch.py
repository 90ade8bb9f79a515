"""DTensors as torch's own, and back: `to_torch_dtensor` and `from_torch_dtensor`.

For code that takes torch's DTensors: its own operations, `torch.distributed.checkpoint`, other libraries. Nothing is
copied and nothing communicated, and gradients pass. Meshes have methods for the same, `DeviceMesh.from_torch` and
`DeviceMesh.to_torch`. docs/torch_interop.md shows the pairs of placements. Torch is imported when one of them is
called.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform import PlatformError, get_platform

__all__ = ["from_torch_dtensor", "to_torch_dtensor"]


def to_torch_dtensor(x: Any) -> Any:
    """A DTensor as one of torch's own, over the same memory. It is differentiable.

    Args:
        x: `hyper_parallel.DTensor` of any shape and dtype.

    Returns:
        ``torch.distributed.tensor.DTensor`` of the same global shape and dtype, on ``x.device_mesh.to_torch()``, with
        torch's placements of the same names; `StridedShard` becomes ``_StridedShard``. Of a parameter it is no
        parameter, but gradients arrive there, placed as the parameter.

    Raises:
        PlatformError: when the platform of this process is not one of torch.
        TypeError: for anything else.
        ValueError: on all ranks, for a `PackedShard`, which torch has no counterpart of, and where
            `DeviceMesh.to_torch` raises.

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
    """One of torch's own DTensors as this library's, over the same memory. It is differentiable.

    Args:
        x: ``torch.distributed.tensor.DTensor`` of any shape and dtype.

    Returns:
        `hyper_parallel.DTensor` of the same global shape and dtype, on ``DeviceMesh.from_torch(x.device_mesh)``.

    Raises:
        PlatformError: when the platform of this process is not one of torch.
        TypeError: for anything else.
        ValueError: on all ranks, for a placement that this library has no counterpart of, and where
            `DeviceMesh.from_torch` raises.

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
    """The module that converts, which imports torch."""
    platform = get_platform()
    if not platform.name.startswith("torch-"):
        raise PlatformError(
            f"hyper_parallel.torch.{asked} is about torch's own DTensors, and the platform of this process is "
            f"{platform.name!r}. Set HYPER_PARALLEL_PLATFORM=torch-cpu (or torch-cuda, torch-npu) before the program "
            "starts"
        )
    from hyper_parallel.platform.torch.native import native_dtensors

    return native_dtensors
