"""Wrappers that communicate by themselves around parallelised models: as on a single device, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hyper_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device

on_2_by_2 = on_mesh(2, 2, names=("dp", "tp"))


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 6)).to(
        device()
    )


def parallel(mesh: Any) -> torch.nn.Module:
    return parallelize_module(make_model(), mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})


def batch() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(device())


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def same_parameters(model: torch.nn.Module, wanted: torch.nn.Module, what: Callable[[Any], Any]) -> None:
    for name, p in wanted.named_parameters():
        close(what(model.get_parameter(name)), what(p), name)


# ------------------------------------------------------------------------------------------------ right
@on_2_by_2
def averaged(mesh: Any) -> None:
    wanted, model = make_model(), parallel(mesh)
    loss_of(wanted, batch()).backward()
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    loss_of(wrapped, batch().chunk(2)[mesh.get_local_rank("dp")]).backward()
    same_parameters(model, wanted, lambda p: p.grad)


def test_data_parallel_dimension(pool: Any) -> None:
    pool.run(4, averaged)


@on_2_by_2
def optimizer_states_shared(mesh: Any) -> None:
    wanted, model, group = make_model(), parallel(mesh), mesh["dp"].get_group()
    theirs = torch.optim.AdamW(wanted.parameters(), lr=0.1)
    ours = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.1)
    for _ in range(3):
        loss_of(wanted, batch()).backward()
        loss_of(model, batch().chunk(2)[mesh.get_local_rank("dp")]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= 2
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(model, wanted, lambda p: p)
    assert 0 < len(ours.optim.state) < len(list(model.parameters()))


def test_zero_redundancy_over_data_parallel_ranks(pool: Any) -> None:
    """Each data-parallel rank keeps the optimizer's state of some parameters; the numbers are the single device's."""
    pool.run(4, optimizer_states_shared)


# ------------------------------------------------------------------------------------------------ refused
def as_accelerate_does(mesh: Any) -> None:
    """``Accelerator.prepare`` and ``Trainer``: over the default group, whatever the model."""
    DistributedDataParallel(parallel(mesh), device_ids=None, output_device=None)


def inside_a_model(mesh: Any) -> None:
    outer = torch.nn.Sequential(parallel(mesh), torch.nn.Linear(6, 2).to(device()))
    DistributedDataParallel(outer, process_group=mesh["tp"].get_group())


def copied(mesh: Any) -> None:
    DataParallel(parallel(mesh))


def flattened(mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    only_distributed = parallel(mesh)[1]
    FullyShardedDataParallel(only_distributed, process_group=mesh["dp"].get_group(), device_id=device())


def flattened_with_plain_ones(mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    FullyShardedDataParallel(parallel(mesh), device_id=device(), use_orig_params=True)


def states_over_all_ranks(mesh: Any) -> None:
    model = parallel(mesh)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    loss_of(model, batch()).backward()
    optimizer.step()


REFUSED: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (as_accelerate_does, ValueError, r"average '1.weight' .*mesh\['dp'\].get_group\(\).*Accelerator.prepare"),
    (inside_a_model, ValueError, r"average '0.1.weight' over ranks .*process_group=mesh\['dp'\]"),
    (copied, ValueError, "DataParallel cannot copy the distributed '1.weight'.*DistributedDataParallel"),
    (flattened, TypeError, "FullyShardedDataParallel would .*DistributedDataParallel"),
    (flattened_with_plain_ones, TypeError, "FullyShardedDataParallel would .*DistributedDataParallel"),
    (states_over_all_ranks, ValueError, r"different shards.*mesh\['dp'\].get_group\(\)"),
]


@on_2_by_2
def refuse(mesh: Any, name: str) -> None:
    call, error, message = next(case for case in REFUSED if case[0].__name__ == name)
    with pytest.raises(error, match=f"(?s){message}"):
        call(mesh)


@pytest.mark.parametrize("name", [case[0].__name__ for case in REFUSED])
def test_refusals(pool: Any, name: str) -> None:
    """Refused on all ranks, before anything is communicated: the pool would hang otherwise."""
    pool.run(4, refuse, name)
