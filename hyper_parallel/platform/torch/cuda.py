"""torch with nccl on NVIDIA GPUs, and on AMD GPUs, which torch calls cuda too."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.base import TorchPlatform
from hyper_parallel.platform.torch.basics.dtypes import FLOATS, INTEGERS, REDUCED

__all__ = ["TorchCudaPlatform"]


class TorchCudaPlatform(TorchPlatform):
    """`torch-cuda`: NVIDIA GPUs with nccl."""

    name = "torch-cuda"
    device_type = "cuda"
    comm_backend = "nccl"

    moved_dtypes = INTEGERS | FLOATS
    all_reduce_dtypes = reduce_scatter_dtypes = REDUCED

    def profiler_range(self, name: str) -> Callable[[], None] | None:
        """Start a range that the profiler and NVTX (Nsight) show, and return the function that ends it."""
        end, handle = super().profiler_range(name), torch.cuda.nvtx.range_start(name)

        def end_both() -> None:
            torch.cuda.nvtx.range_end(handle)
            if end is not None:
                end()

        return end_both

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why this backend cannot run here, or None."""
        if not torch.backends.cuda.is_built():
            return "the installed torch was built without CUDA"
        if not torch.cuda.is_available():
            return "torch was built with CUDA, but no usable GPU was found: check the driver and CUDA_VISIBLE_DEVICES"
        if not dist.is_available() or not dist.is_nccl_available():
            return "this torch was built without nccl"
        return None
