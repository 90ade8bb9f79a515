"""`coalesce_gradients`: the gradients of norms on sequence shards, in one all-reduce."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    coalesce_gradients,
    parallelize_module,
)
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, full, randn, shard

BATCH, SEQUENCE, FEATURES = 2, 6, 4


class OwnNorm(nn.Module):
    """A norm that the library does not know, so that its operations are dispatched."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(FEATURES, dtype=dtype))

    def forward(self, x: Any) -> Any:
        return (self.weight * x * x.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)


class Model(nn.Module):
    """Three norms, one of which is used twice and one of which has parameters of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(FEATURES)
        self.own = OwnNorm(torch.float64)
        self.up = nn.Linear(FEATURES, 8)
        self.down = nn.Linear(8, FEATURES)
        self.last = nn.RMSNorm(FEATURES, 1e-5)

    def forward(self, x: Any) -> Any:
        x = self.last(x)
        x = x + self.down(torch.relu(self.up(self.first(x))))
        return self.last(self.own(x))


def models(mesh: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Model().to(device())
    for p in plain.parameters():
        nn.init.normal_(p, 1.0, 0.2)
    sharded = copy.deepcopy(plain)
    norm = SequenceParallel(use_local_output=False)
    plan = {
        "first": norm,
        "own": norm,
        "last": norm,
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return plain, parallelize_module(sharded, mesh, plan)


def loss_of(model: nn.Module, mesh: Any = None, seed: int = 1, leaf: bool = False) -> Any:
    x = randn(BATCH, SEQUENCE, FEATURES, seed=seed).requires_grad_(leaf)
    return (model(x if mesh is None else shard(x, mesh, Shard(1))) * randn(1, SEQUENCE, FEATURES, seed=9).sum()).sum()


def compare(plain: nn.Module, sharded: nn.Module) -> None:
    for (name, p), q in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        close(q[1].grad, p.grad, name, tolerance=1e-4)


def all_reduces(comm: CommDebugMode) -> int:
    return comm.get_comm_counts().get("all_reduce", 0)


def expect_each_once(comm: CommDebugMode, mesh: Any) -> None:
    """One all-reduce for each dtype, with each parameter once; without the block it is one for each parameter."""
    assert all_reduces(comm) == (2 if mesh.size() > 1 else 0)
    elements = comm.get_elements().get("all_reduce", 0)
    assert elements == (FEATURES * 4 if mesh.size() > 1 else 0), comm.events


@on_mesh()
def one_collective(mesh: Any) -> None:
    plain, sharded = models(mesh)
    # The first use of `last` keeps its weight for backward if the input requires a gradient. The kernel of a GPU always
    # does. The second use then shares the view of the first, and one cotangent comes for both.
    for leaf in (False, True):
        loss_of(plain).backward()
        loss = loss_of(sharded, mesh, leaf=leaf)
        with CommDebugMode() as comm, coalesce_gradients():
            loss.backward()
        compare(plain, sharded)
        expect_each_once(comm, mesh)
        assert {event.direction for event in comm.events} <= {"backward"}

    # Gradients that are there already stay as they are, and several backward passes fit in one block.
    for seed in (2, 3):
        loss_of(plain, seed=seed).backward()
    with CommDebugMode() as comm, coalesce_gradients():
        for seed in (2, 3):
            loss_of(sharded, mesh, seed).backward()
    compare(plain, sharded)
    expect_each_once(comm, mesh)


@on_mesh()
def at_once(mesh: Any) -> None:
    """Reductions that cannot wait do not wait."""
    plain, sharded = models(mesh)
    wanted = torch.autograd.grad(loss_of(plain), list(plain.parameters()))
    with coalesce_gradients():
        got = torch.autograd.grad(loss_of(sharded, mesh), list(sharded.parameters()))
    for a, b in zip(got, wanted, strict=True):
        close(a, b, tolerance=1e-4)

    seen: list[torch.Tensor] = []
    sharded.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad).clone()))
    loss_of(plain).backward()
    with coalesce_gradients():
        loss_of(sharded, mesh).backward()
    compare(plain, sharded)
    close(seen[0], plain.first.weight.grad, "in the hook", tolerance=1e-4)


@on_mesh()
def blocks(mesh: Any) -> None:
    """Blocks in blocks, and blocks that fail."""
    plain, sharded = models(mesh)
    loss_of(plain).backward()
    with CommDebugMode() as comm:
        with coalesce_gradients(), coalesce_gradients():
            loss_of(sharded, mesh).backward()
        compare(plain, sharded)
        count = all_reduces(comm)
        with pytest.raises(ZeroDivisionError), coalesce_gradients():
            1 / 0  # noqa: B018
        assert all_reduces(comm) == count
    sharded.zero_grad()
    loss_of(sharded, mesh).backward()
    compare(plain, sharded)


@on_mesh()
def recomputed(mesh: Any) -> None:
    plain, sharded = models(mesh)
    loss_of(plain).backward()
    for reentrant in (True, False):
        sharded.zero_grad()
        loss = loss_of(lambda x, r=reentrant: checkpoint(sharded, x.requires_grad_(), use_reentrant=r), mesh)
        with coalesce_gradients():
            loss.backward()
        compare(plain, sharded)


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("job", [one_collective, at_once, blocks, recomputed], ids=lambda job: job.__name__)
def test_coalesce(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)
