"""Reference kernels of torch_npu's products with a collective, by torch's product and ProcessGroupHCCL's collective.

Arguments that the operators refuse by their description are refused here too: other dtypes, transposed operands, sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["KERNELS"]


def group_of(name: str) -> Any:
    """The process group whose communicator HCCL calls ``name``."""
    for group in dist.distributed_c10d._world.pg_map:
        backend = group._get_backend(torch.device("npu"))
        # Without making one where there is none yet, for which all its ranks would have to come.
        device = torch.npu.current_device()  # type: ignore[attr-defined]
        if backend.get_hccl_comm_name(device, init_comm=False) == name:
            return group
    raise ValueError(f"HCCL has no communicator {name!r}")


def check(operator: str, x: torch.Tensor, other: torch.Tensor, options: dict[str, Any], world_size: int) -> None:
    """Raise for arguments that the operator does not take, in its form without quantisation."""
    given = {name: value for name, value in options.items() if value is not None}
    if given.pop("reduce_op", "sum") != "sum" or given.keys() - {"bias", "gather_output"}:
        raise ValueError(f"{operator} is simulated with reduce_op='sum' and a bias, without quantisation: got {given}")
    if x.dtype not in (torch.float16, torch.bfloat16) or other.dtype != x.dtype:
        raise ValueError(f"{operator} takes float16 and bfloat16, both of one dtype: got {x.dtype} and {other.dtype}")
    if world_size not in (2, 4, 8):
        raise ValueError(f"{operator} is for 2, 4 or 8 ranks, not {world_size}")
    if not x.is_contiguous() or x.dim() not in ((2, 3) if "all_reduce" in operator else (2,)) or other.dim() != 2:
        raise ValueError(
            f"{operator} takes a contiguous matrix and another: got {tuple(x.shape)}, {tuple(other.shape)}"
        )
    if x.shape[-1] != other.shape[0] or ("all_reduce" not in operator and not 256 <= x.shape[-1] < 65535):
        raise ValueError(f"{operator} cannot multiply {tuple(x.shape)} by {tuple(other.shape)}")


def mm_all_reduce(x: torch.Tensor, other: torch.Tensor, hcom: str, **options: Any) -> torch.Tensor:
    """The sum over the ranks of x @ other, and the bias."""
    group = group_of(hcom)
    check("npu_mm_all_reduce_base", x, other, options, group.size())
    y = x @ other
    group.allreduce([y]).wait()
    return y if options.get("bias") is None else y + options["bias"]


def all_gather_mm(
    x: torch.Tensor, other: torch.Tensor, hcom: str, world_size: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gathered x @ other, gathered x)."""
    group = group_of(hcom)
    check("npu_all_gather_base_mm", x, other, options, world_size)
    gathered = x.new_empty(x.shape[0] * world_size, x.shape[1])
    group._allgather_base(gathered, x).wait()
    y = gathered @ other
    y = y if options.get("bias") is None else y + options["bias"]
    return y, gathered if options.get("gather_output", True) else x.new_empty(0)


def mm_reduce_scatter(x: torch.Tensor, other: torch.Tensor, hcom: str, world_size: int, **options: Any) -> torch.Tensor:
    """The sum of x @ other, and of it the rows that belong to this rank."""
    group = group_of(hcom)
    check("npu_mm_reduce_scatter_base", x, other, options, world_size)
    if x.shape[0] % world_size:
        raise ValueError(f"npu_mm_reduce_scatter_base cannot share {x.shape[0]} rows among {world_size} ranks")
    y = x @ other
    y = y if options.get("bias") is None else y + options["bias"]
    out = x.new_empty(x.shape[0] // world_size, other.shape[1])
    group._reduce_scatter_base(out, y).wait()
    return out


#: operator of torch_npu -> its kernel on tensors of the device
KERNELS: dict[str, Callable[..., Any]] = {
    "npu_mm_all_reduce_base": mm_all_reduce,
    "npu_all_gather_base_mm": all_gather_mm,
    "npu_mm_reduce_scatter_base": mm_reduce_scatter,
}
