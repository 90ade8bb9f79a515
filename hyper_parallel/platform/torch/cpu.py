"""torch on the CPU, with gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.base import TorchPlatform
from hyper_parallel.platform.torch.dtypes import COMPLEX, FLOATS, INTEGERS, REDUCED

__all__ = ["TorchCpuPlatform"]


class TorchCpuPlatform(TorchPlatform):
    """`torch-cpu`. What gloo supports was measured with torch 2.13: every collective fails for int16, uint16, uint32,
    fp8 and gathering also for complex numbers, averages of integers too."""

    name = "torch-cpu"
    device_type = "cpu"
    comm_backend = "gloo"

    moved_dtypes = INTEGERS | FLOATS
    all_reduce_dtypes = reduce_scatter_dtypes = REDUCED | {"avg": FLOATS | COMPLEX}

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `Platform.unavailable_reason`."""
        if not dist.is_available() or not dist.is_gloo_available():
            return "this torch was built without torch.distributed or without gloo"
        return None

    def get_rng_state(self) -> Any:
        """See `Platform.get_rng_state`."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        """See `Platform.set_rng_state`."""
        torch.set_rng_state(state)
