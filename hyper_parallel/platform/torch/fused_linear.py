"""Linear layers and the collective before or after them in one operator of torch_npu, which overlaps the two.

Each is differentiable, by the other one: the backward of what sums and scatters gathers, and the other way round. The
limits in `applies` are those that torch_npu 2.13 documents for npu_mm_all_reduce_base, npu_all_gather_base_mm and
npu_mm_reduce_scatter_base, in their plain form without quantisation.

Source: ``torch_npu/_op_plugin_docs.py``; Megatron-LM's sequence parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as no_dispatch

__all__ = ["applies", "run"]

Record = Callable[[str, torch.Tensor], None]

_OPERATORS = {
    "all_reduce": "npu_mm_all_reduce_base",
    "all_gather": "npu_all_gather_base_mm",
    "reduce_scatter": "npu_mm_reduce_scatter_base",
}
_DTYPES = (torch.float16, torch.bfloat16)
#: Sizes of the dimension that is summed over in a product which gathers or scatters.
_SUMMED = range(256, 65535)
#: First numbers of Ascend 910B and 910C in torch_npu's SocVersion, and how many NPUs may take part there.
_ASCEND_910B, _ASCEND_310B, _ASCEND_910C = 220, 240, 250
_COUNTS = (2, 4, 8)

_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def applies(collective: str, x: torch.Tensor, weight: torch.Tensor, size: int, dim: int, chip: int) -> bool:
    """Whether an operator does it. What this looks at is the same on every rank, if shards are equal.

    Args:
        collective, x, weight, size, dim: as for `Platform.linear_with_collective`.
        chip: torch_npu's number of the chip.
    """
    if chip < _ASCEND_910B or _ASCEND_310B <= chip < _ASCEND_910C or not all(map(_exists, _needed(collective))):
        return False
    if size not in (_COUNTS if chip < _ASCEND_910C else (*_COUNTS, 16)):
        return False
    if x.dtype not in _DTYPES or weight.dtype is not x.dtype or torch.is_autocast_enabled("npu"):
        return False
    if x.dim() < 2 or weight.dim() != 2 or 0 in x.shape or 0 in weight.shape:
        return False
    if collective == "all_reduce":
        return True
    # What is gathered and scattered are rows of a matrix, so the dimension must be the outermost.
    outermost = math.prod(x.shape[:dim]) == 1 and dim < x.dim() - 1
    divided = collective == "all_gather" or x.shape[dim] % size == 0
    return outermost and divided and all(n in _SUMMED for n in weight.shape)


def _needed(collective: str) -> tuple[str, ...]:
    return ("all_reduce",) if collective == "all_reduce" else ("all_gather", "reduce_scatter")


def _exists(collective: str) -> bool:
    return hasattr(torch.ops.npu, _OPERATORS[collective])


def run(
    collective: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    group: Any,
    size: int,
    dim: int,
    record: Record,
) -> torch.Tensor:
    """See `Platform.linear_with_collective`."""
    function: Any = {"all_reduce": _AllReduce, "all_gather": _AllGather, "reduce_scatter": _ReduceScatter}[collective]
    rows = x.reshape(-1, x.shape[-1])
    y = function.apply(rows, weight, group, size, record)
    return y.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 : -1], y.shape[-1])


def communicator(group: Any) -> str:
    """HCCL's name of a process group."""
    name = _names.get(group)
    if name is None:
        # The rank is only used for its device.
        backend, npu = group._get_backend(torch.device("npu")), getattr(torch, "npu")  # noqa: B009 - torch_npu adds it
        name = _names[group] = backend.get_hccl_comm_name(npu.current_device())
    return name


def _all_gather_product(
    rows: torch.Tensor, other: torch.Tensor, group: Any, size: int, record: Record
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gathered rows @ other, gathered rows)."""
    rows = rows.contiguous()
    record("all_gather", rows)
    return torch.ops.npu.npu_all_gather_base_mm(rows, other, communicator(group), size)


def _reduce_scatter_product(
    rows: torch.Tensor, other: torch.Tensor, group: Any, size: int, record: Record
) -> torch.Tensor:
    """This rank's rows of the sum of rows @ other."""
    rows = rows.contiguous()
    record("reduce_scatter", rows)
    return torch.ops.npu.npu_mm_reduce_scatter_base(rows, other, communicator(group), size)


class _AllReduce(torch.autograd.Function):
    """(rows, in / ranks) -> (rows, out), summed over the ranks. The gradient of the sum is that of each summand."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, group: Any, size: int, record: Record) -> Any:
        with no_dispatch():
            ctx.save_for_backward(rows, weight)
            rows = rows.contiguous()
            record("all_reduce", rows)
            return torch.ops.npu.npu_mm_all_reduce_base(rows, weight.t(), communicator(group))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        with no_dispatch():
            rows, weight = ctx.saved_tensors
            needs_rows, needs_weight = ctx.needs_input_grad[:2]
            by_rows = cotangent @ weight if needs_rows else None
            return by_rows, cotangent.t() @ rows if needs_weight else None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    """(rows, in / ranks) -> (rows / ranks, out); in backward the gradient's rows are gathered, once for both."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, group: Any, size: int, record: Record) -> Any:
        with no_dispatch():
            ctx.save_for_backward(rows, weight)
            ctx.how = (group, size, record)
            return _reduce_scatter_product(rows, weight.t(), *ctx.how)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        with no_dispatch():
            rows, weight = ctx.saved_tensors
            by_rows, gathered = _all_gather_product(cotangent, weight, *ctx.how)
            by_weight = gathered.t() @ rows if ctx.needs_input_grad[1] else None
            return by_rows, by_weight, None, None, None


class _AllGather(torch.autograd.Function):
    """(rows / ranks, in) -> (rows, out / ranks); the gathered rows are kept for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, group: Any, size: int, record: Record) -> Any:
        with no_dispatch():
            ctx.how = (group, size, record)
            y, gathered = _all_gather_product(rows, weight.t(), *ctx.how)
            ctx.save_for_backward(gathered, weight)
            return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        with no_dispatch():
            gathered, weight = ctx.saved_tensors
            by_rows = _reduce_scatter_product(cotangent, weight, *ctx.how) if ctx.needs_input_grad[0] else None
            by_weight = cotangent.t() @ gathered if ctx.needs_input_grad[1] else None
            return by_rows, by_weight, None, None, None
