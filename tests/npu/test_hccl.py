"""Arguments that HCCL takes and refuses, and how DTensors handle refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, get_platform
from hyper_parallel.testing import spmd
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import device

#: Dtypes for which torch_npu has data types of HCCL, float64 included.
DTYPES = [
    getattr(torch, name)
    for name in "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64".split()  # noqa: SIM905
]
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def made(*numbers: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers).to(dtype).to(device())


@on_mesh(2)
def what_torch_npu_refuses(mesh: Any) -> dict[str, list[str]]:
    """The combinations that torch_npu's own functions refuse, with the words of the first refusal."""
    group = mesh.get_group(0)
    refused: dict[str, list[str]] = {"all_reduce": [], "reduce_scatter": []}
    for dtype in DTYPES:
        for name, op in OPS.items():
            x = made(1, 2, dtype=dtype)
            assert x.dtype is dtype
            calls = {
                "all_reduce": lambda x=x, op=op: dist.all_reduce(x, op, group=group),
                "reduce_scatter": lambda x=x, op=op: dist.reduce_scatter_tensor(x[:1].clone(), x, op, group=group),
            }
            for collective, call in calls.items():
                supported = get_platform().supports(collective, name, x)
                try:
                    call()
                except (RuntimeError, TypeError, ValueError):
                    assert not supported, f"{collective} {name} {dtype} is said to be supported"
                    refused[collective].append(f"{name} {dtype}")
    return refused


def test_supported_is_what_hccl_takes(pool: Any) -> None:
    """HCCL takes each collective and dtype that `supports` promises. The others are refused or, as averages are,
    emulated."""
    refused = pool.run(2, what_torch_npu_refuses)[0]
    for collective in ("all_reduce", "reduce_scatter"):
        assert "sum torch.float64" in refused[collective]
        assert "avg torch.int64" in refused[collective]
        assert "sum torch.float32" not in refused[collective]
    assert "sum torch.bool" in refused["reduce_scatter"]
    assert "max torch.bool" not in refused["all_reduce"]


@on_mesh(4)
def partial_sums(mesh: Any, dtype_name: str, op: str, placement: str) -> tuple[list, str]:
    dtype = getattr(torch, dtype_name)
    local = (torch.arange(24).reshape(4, 6) * (spmd.rank + 1) % 7).to(dtype).to(device())
    assert local.dtype is dtype
    x = DTensor.from_local(local, mesh, [Partial(op)])
    y = x.redistribute(placements=[Replicate() if placement == "replicate" else Shard(1)]).full_tensor()
    return y.cpu().tolist(), str(y.dtype)


def test_dtypes_that_hccl_does_not_reduce(pool: Any) -> None:
    """float64 and bool are reduced by gathering; the values and the data type are those of one device."""
    parts = np.stack([np.arange(24).reshape(4, 6) * (rank + 1) % 7 for rank in range(4)])
    for placement in ("replicate", "shard"):
        for dtype in ("float64", "int32", "int64", "uint8"):
            for op, wanted in (("sum", parts.sum(0)), ("max", parts.max(0))):
                for values, found in pool.run(4, partial_sums, dtype, op, placement):
                    assert (values, found) == (wanted.tolist(), f"torch.{dtype}"), (placement, dtype, op)
        for values, found in pool.run(4, partial_sums, "bool", "max", placement):
            assert (values, found) == ((parts > 0).any(0).tolist(), "torch.bool")


@on_mesh(2)
def average_of_integers(mesh: Any) -> list:
    x = DTensor.from_local(torch.tensor([1, 2, 5], device=device()) * (spmd.rank + 1), mesh, [Partial("avg")])
    y = x.redistribute(placements=[Replicate()]).to_local()
    return [str(y.dtype), y.cpu().tolist()]


def test_average_of_integers(pool: Any) -> None:
    """torch_npu fails in dividing; here the average is a float, as torch's true division has it."""
    assert pool.run(2, average_of_integers) == [["torch.float32", [1.5, 3.0, 7.5]]] * 2


@on_mesh(2)
def strided_operands(mesh: Any) -> None:
    """HCCL takes contiguous tensors only: shards and partial sums that are views must not reach it as they are."""
    whole = torch.arange(48.0).reshape(2, 4, 6)
    x = distribute_tensor(whole.to(device()), mesh, [Shard(1)])
    views = {
        "transposed": (x.transpose(1, 2), whole.transpose(1, 2)),
        "sliced": (x[..., ::2], whole[..., ::2]),
        "permuted": (x.permute(2, 0, 1), whole.permute(2, 0, 1)),
        "expanded": (x.unsqueeze(0).expand(3, -1, -1, -1), whole.unsqueeze(0).expand(3, -1, -1, -1)),
    }
    for name, (view, wanted) in views.items():
        assert torch.equal(view.full_tensor().cpu(), wanted), name
        for dim in range(view.dim()):
            moved = view.redistribute(placements=[Shard(dim)])
            assert torch.equal(moved.full_tensor().cpu(), wanted), (name, dim)
    local = torch.arange(12.0, device=device()).reshape(3, 4).t() * (spmd.rank + 1)
    for placement in (Replicate(), Shard(0), Shard(1)):
        y = DTensor.from_local(local, mesh, [Partial()], run_check=False).redistribute(placements=[placement])
        assert torch.equal(y.full_tensor().cpu(), torch.arange(12.0).reshape(3, 4).t() * 3), placement


def test_strided_operands(pool: Any) -> None:
    pool.run(2, strided_operands)


@on_mesh(2)
def random_numbers(mesh: Any) -> list[list[float]]:
    platform = get_platform()
    platform.manual_seed(3)
    state = platform.get_rng_state()
    first = torch.rand(4, device=device())
    second = torch.rand(4, device=device())
    platform.set_rng_state(state)
    again = torch.rand(4, device=device())
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    return first.cpu().tolist()


def test_random_state_is_the_device_s(pool: Any) -> None:
    first, second = pool.run(2, random_numbers)
    assert first == second


@on_mesh(4)
def own_device(mesh: Any) -> tuple[str, str]:
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    return str(x.to_local().device), mesh.device_type


def test_each_rank_has_its_own_device(pool: Any) -> None:
    """A CPU tensor that is distributed goes to the NPU of the rank."""
    assert pool.run(4, own_device) == [(f"npu:{rank}", "npu") for rank in range(4)]
