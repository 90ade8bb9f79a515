"""Linear layers fused with the collective before or after them in one operator of torch_npu, which overlaps the two.

The backward of a fused operator is another fused operator. Matmul with reduce-scatter has all-gather with matmul as its
backward, and vice versa. `applies` has the limits that torch_npu 2.13 documents for operators without quantisation. The
operators are npu_mm_all_reduce_base, npu_all_gather_base_mm and npu_mm_reduce_scatter_base.

Source: ``torch_npu/_op_plugin_docs.py``; Megatron-LM's sequence parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.contract import LinearCollective
from hyper_parallel.platform.torch.processes.overlap import FUNCTIONS

__all__ = ["applies", "run"]

_OPERATORS = {
    "all_reduce": "npu_mm_all_reduce_base",
    "all_gather": "npu_all_gather_base_mm",
    "reduce_scatter": "npu_mm_reduce_scatter_base",
}
_DTYPES = (torch.float16, torch.bfloat16)
#: Supported sizes of weight dimensions in a product that gathers or scatters.
_SUMMED = range(256, 65535)
#: First numbers of Ascend 910B, 310B and 910C in torch_npu's SocVersion. Below: supported numbers of NPUs.
_ASCEND_910B, _ASCEND_310B, _ASCEND_910C = 220, 240, 250
_COUNTS = (2, 4, 8)

_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def applies(x: Tensor, weight: Tensor, how: LinearCollective, chip: int) -> bool:
    """Return whether a fused operator supports the product. All ranks with equal shards get the same answer.

    Args:
        x, weight, how: as for `Fast.linear_with_collective`.
        chip: torch_npu's number of the chip.
    """
    if chip < _ASCEND_910B or _ASCEND_310B <= chip < _ASCEND_910C or not all(map(_exists, _needed(how.collective))):
        return False
    if how.size not in (_COUNTS if chip < _ASCEND_910C else (*_COUNTS, 16)):
        return False
    if x.dtype not in _DTYPES or weight.dtype is not x.dtype or torch.is_autocast_enabled("npu"):
        return False
    if x.dim() < 2 or weight.dim() != 2 or 0 in x.shape or 0 in weight.shape:
        return False
    if how.collective == "all_reduce":
        return True
    # Rows of a matrix are gathered and scattered, so the dimension must be the outermost.
    outermost = math.prod(x.shape[: how.dim]) == 1 and how.dim < x.dim() - 1
    divided = how.collective == "all_gather" or x.shape[how.dim] % how.size == 0
    return outermost and divided and all(n in _SUMMED for n in weight.shape)


def _needed(collective: str) -> tuple[str, ...]:
    return ("all_reduce",) if collective == "all_reduce" else ("all_gather", "reduce_scatter")


def _exists(collective: str) -> bool:
    return hasattr(torch.ops.npu, _OPERATORS[collective])


def run(x: Tensor, weight: Tensor, how: LinearCollective) -> Tensor:
    """Compute a linear layer fused with a collective, see `Fast.linear_with_collective`. ``how.group`` is a
    ``ProcessGroup``."""
    y = FUNCTIONS[how.collective].apply(x.reshape(-1, x.shape[-1]), weight, _Fused(how))
    return y.reshape(*x.shape[: how.dim], -1, *x.shape[how.dim + 1 : -1], y.shape[-1])


def communicator(group: Any) -> str:
    """Return HCCL's name of a process group."""
    name = _names.get(group)
    if name is None:
        # The rank is only used for its device.
        backend, npu = group._get_backend(torch.device("npu")), getattr(torch, "npu")  # noqa: B009 - torch_npu adds it
        name = _names[group] = backend.get_hccl_comm_name(npu.current_device())
    return name


class _Fused:
    """Products and their collective in one operator. The class has the methods of `overlap._Chunked`, with all rows in
    one chunk."""

    def __init__(self, how: LinearCollective) -> None:
        self.how = how

    def pieces(self, x: Tensor) -> list[Tensor]:
        return [x]

    def whole(self, chunks: list[Tensor]) -> Tensor:
        return chunks[0]

    def reduce(self, x: Tensor, other: Tensor) -> Tensor:
        return self._run("all_reduce", x, other)

    def gather(self, x: Tensor, other: Tensor, multiplies: bool = True) -> list[Any]:
        return [self._run("all_gather", x, other, self.how.size)]

    def scatter(self, pieces: list[Tensor], other: Tensor) -> Tensor:
        return self._run("reduce_scatter", pieces[0], other, self.how.size)

    def finish(self, started: Tensor) -> Tensor:
        return started

    def _run(self, collective: str, rows: Tensor, other: Tensor, *size: int) -> Any:
        rows = rows.contiguous()
        self.how.record(collective, rows)
        return getattr(torch.ops.npu, _OPERATORS[collective])(rows, other, communicator(self.how.group), *size)
