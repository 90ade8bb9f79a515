"""torch on Huawei Ascend NPUs: torch_npu and HCCL.

Only this module imports torch_npu, and only in functions. The package needs the CANN runtime, and refuses to share a
process with another accelerator.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.contract import LinearCollective
from hyper_parallel.platform.torch import fused_linear
from hyper_parallel.platform.torch.base import TorchPlatform
from hyper_parallel.platform.torch.fast import TorchFast
from hyper_parallel.platform.torch.op_table import OP_TABLE, fused_npu
from hyper_parallel.platform.versions import warn_of_untested

__all__ = ["TorchNpuPlatform"]

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
# HCCL has no average: torch_npu adds and divides, and core does the same.
_ALL_REDUCED = dict.fromkeys(
    ("sum", "max", "min", "product"), _FLOATS | _INTEGERS | frozenset({torch.uint8, torch.bool})
)
#: HCCL's codes for a time-out, a failed connection or a failed peer, which indicate a lost rank.
_LOST = re.compile(r"Hccl\w+, error code is (9|11|12|13|14|19|21)\b")
_REDUCE_SCATTERED = dict.fromkeys(("sum", "max", "min", "product"), _FLOATS | _INTEGERS)


class TorchNpuPlatform(TorchPlatform):
    """`torch-npu`.

    The facts about HCCL come from torch_npu 2.13. HCCL has no reductions of float64, uint16, uint32 and fp8. Its
    reduce_scatter also lacks uint8, bool and complex64. Collectives that only move data take every dtype. Ascend 910A
    and 310P have no bfloat16. On them, distributing, making or communicating a bfloat16 tensor raises.
    """

    name = "torch-npu"
    device_type = "npu"
    comm_backend = "hccl"

    moved_dtypes = _FLOATS | _INTEGERS | frozenset({torch.uint8, torch.bool, torch.float64})
    all_reduce_dtypes = _ALL_REDUCED
    reduce_scatter_dtypes = _REDUCE_SCATTERED

    def __init__(self) -> None:
        super().__init__()
        warn_of_untested("torch_npu", version("torch-npu"))
        self.fast = _NpuFast(self)
        # The fused operators exist now that `unavailable_reason` has loaded torch_npu; the DTensor class is made later.
        OP_TABLE.update(fused_npu.table())

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Return why this backend cannot run here, or None."""
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed"
        if torch.cuda.is_available():
            return "torch_npu is installed, but this process has CUDA GPUs too, which torch_npu refuses"
        try:
            import torch_npu
        except Exception as error:  # A missing library is an ImportError, a missing device or driver a RuntimeError.
            return (
                "torch_npu is installed, but it cannot be loaded, most likely because CANN is not installed or its "
                f"set_env.sh was not sourced: {type(error).__name__}: {error}"
            )
        if not torch_npu.npu.is_available():
            return "torch_npu and CANN are installed, but no NPU was found: check the driver with npu-smi info"
        return None

    def is_communication_failure(self, error: Exception) -> bool:
        """Return whether ``error`` means that a rank did not take part in a collective. Errors that HCCL meets in the
        background reach only its watchdog."""
        return super().is_communication_failure(error) or bool(_LOST.search(str(error)))

    def profiler_range(self, name: str) -> Callable[[], None] | None:
        """Start a range that the profiler and MSTX (msprof) show, and return the function that ends it."""
        end, mstx = super().profiler_range(name), self.device_module().mstx
        handle = mstx.range_start(name)

        def end_both() -> None:
            mstx.range_end(handle)
            if end is not None:
                end()

        return end_both

    # ----------------------------------------------------------------------------------------- devices without bfloat16
    def supports(self, collective: str, op: str, local: Tensor) -> bool:
        """Return whether ``collective`` takes the dtype of ``local`` and the operation ``op``."""
        if local.dtype is torch.bfloat16:
            self._check_bfloat16(f"{collective} of a tensor of shape {tuple(self.shape_of(local))}")
        return super().supports(collective, op, local)

    def to_device(self, x: Tensor) -> Tensor:
        """Return ``x`` on this rank's device. Every tensor that is distributed passes through here, so bfloat16 is
        checked."""
        if x.dtype is torch.bfloat16:
            self._check_bfloat16(f"a tensor of shape {tuple(self.shape_of(x))} is to be distributed")
        return super().to_device(x)

    def factory(self, name: str, shape: Sequence[int], fill_value: Any, dtype: Any) -> Tensor:
        """Return a new plain tensor made by the factory ``name``; see `Platform.factory`."""
        if dtype is torch.bfloat16 or (dtype is None and torch.get_default_dtype() is torch.bfloat16):
            self._check_bfloat16(f"{name} of shape {tuple(shape)}")
        return super().factory(name, shape, fill_value, dtype)

    def _check_bfloat16(self, what: str) -> None:
        """Raise TypeError if the device does not compute in bfloat16. Without this check, kernels and HCCL's reductions
        would fail one by one, and conversions would continue silently. All NPUs of a job are of one kind, so all ranks
        raise."""
        if not self._has_bfloat16:
            name = self.device_module().get_device_name()
            raise TypeError(
                f"{what} with dtype torch.bfloat16, which this NPU ({name}) does not support: use torch.float16, with "
                "loss scaling (torch.amp.GradScaler), or torch.float32"
            )

    @cached_property
    def _has_bfloat16(self) -> bool:
        # torch_npu knows the chip once its device is initialised, which this call does.
        return bool(self.device_module().is_bf16_supported())


class _NpuFast(TorchFast):
    """Fast paths with torch_npu's operators that multiply and communicate, if the user enables them."""

    def __init__(self, platform: TorchNpuPlatform) -> None:
        super().__init__(platform)
        # Off by default: on Ascend 910B, HCCL allows such operators in one group of ranks only, and the time saved
        # depends on the shapes.
        self.fuses_linear = os.environ.get("HYPER_PARALLEL_FUSED_LINEAR", "0") not in ("", "0")

    def linear_with_collective(self, x: Tensor, weight: Tensor, how: LinearCollective) -> Any:
        """Compute a linear layer overlapped with a collective; see `Fast.linear_with_collective`."""
        platform = self.platform
        with platform.no_dispatch():
            if self.fuses_linear and fused_linear.applies(x, weight, how, platform.device_module().get_soc_version()):
                return fused_linear.run(x, weight, replace(how, group=platform.native_group(how.group)))
        return super().linear_with_collective(x, weight, how)
