"""torch on the CPU, with gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.base import TorchPlatform
from hyper_parallel.platform.torch.basics.dtypes import COMPLEX, FLOATS, INTEGERS, REDUCED

__all__ = ["TorchCpuPlatform"]


class TorchCpuPlatform(TorchPlatform):
    """`torch-cpu`. The dtypes that gloo supports were measured with torch 2.13. Every collective fails for int16,
    uint16, uint32 and fp8. All-gather also fails for complex numbers, and averages fail for integers."""

    name = "torch-cpu"
    device_type = "cpu"
    comm_backend = "gloo"

    moved_dtypes = INTEGERS | FLOATS
    all_reduce_dtypes = reduce_scatter_dtypes = REDUCED | {"avg": FLOATS | COMPLEX}

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why this backend cannot run here, or None."""
        if not dist.is_available() or not dist.is_gloo_available():
            return "this torch was built without torch.distributed or without gloo"
        return None

    def device_module(self) -> Any:
        """Return the module ``torch``, which has the CPU's generator."""
        return torch

    def device(self) -> torch.device:
        """Return the CPU device."""
        return torch.device("cpu")

    def _select_device(self, local_rank: int) -> None:
        """Do nothing: all ranks use the same device."""
