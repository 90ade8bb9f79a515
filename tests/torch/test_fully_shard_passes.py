"""Backward passes of `fully_shard`: of one forward among several, of passes that fail, and of units called alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import Replicate, Shard, distribute_tensor, fully_shard
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device

SIZE = 6


class Failing(torch.autograd.Function):
    """Identity whose backward fails while `fails` is set."""

    fails = False

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        if Failing.fails:
            raise ArithmeticError("on all ranks")
        return cotangent


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.between, self.checkpointed = nn.Identity(), checkpointed

    def forward(self, x: Any, uses_a: bool = True) -> Any:
        if self.checkpointed:
            x = checkpoint(self.between, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)
        elif uses_a:
            x = Failing.apply(self.a(x))
        return torch.tanh(self.b(x))


def pair(mesh: Any, **options: Any) -> tuple[Any, Any]:
    """A model, and its copy in which all modules with parameters are units."""
    torch.manual_seed(0)
    single = Model(**options).to(device(), torch.float64)
    sharded = copy.deepcopy(single)
    for module in (sharded.a, sharded.b, sharded.between, sharded):
        fully_shard(module, mesh=mesh)
    return single, sharded


def batch(rows: int = 4) -> Any:
    return torch.randn(rows, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device())


def same_gradients(single: Any, sharded: Any, what: str) -> None:
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        close(q.grad, p.grad, f"{name}, {what}", 1e-9)


def fail(run: Callable[[], Any]) -> None:
    """Run a backward that fails."""
    Failing.fails = True
    with pytest.raises(ArithmeticError):
        run()
    Failing.fails = False


@on_mesh(2, names=("dp",))
def kinds_of_batches(mesh: Any) -> None:
    """A backward has the kind of batch of its own forward, also where parts are recomputed."""
    single, sharded = pair(mesh, checkpointed=True)
    x, rows = batch(), slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    single(x).sum().backward()
    loss = sharded(distribute_tensor(x, mesh, [Shard(0)])).sum()
    with torch.no_grad():
        sharded(x[rows])
    loss.backward()
    same_gradients(single, sharded, "distributed")
    sharded.zero_grad()
    loss = sharded(x[rows]).sum() * 2  # gradients are averages over two ranks
    with torch.no_grad():
        sharded(distribute_tensor(x, mesh, [Replicate()]))
    loss.backward()
    same_gradients(single, sharded, "plain")
    # Accumulated gradients of both kinds, of two forwards before both backwards.
    losses = sharded(x[rows]).sum(), sharded(distribute_tensor(x, mesh, [Shard(0)])).sum()
    sharded.set_requires_gradient_sync(False)
    losses[0].backward()
    with pytest.raises(ValueError, match="distributed inputs, but has accumulated gradients of plain inputs"):
        losses[1].backward()


@on_mesh(2, names=("dp",))
def failures(mesh: Any) -> None:
    """A failed backward leaves nothing behind."""
    single, sharded = pair(mesh)
    x = batch()
    for m in (single, sharded):
        m(x).sum().backward()
        fail(m(2 * x).sum().backward)
        m.zero_grad()
        m(x).sum().backward()
    same_gradients(single, sharded, "the repeated step")
    for m in (single, sharded):
        losses = m(x).sum(), m(2 * x).square().sum()
        fail(losses[0].backward)
        m.zero_grad()
        losses[1].backward()
    same_gradients(single, sharded, "the second of two forwards")
    # Gradients of an earlier backward are kept, and those of the failed one are discarded.
    wanted = [p.grad.clone() for p in single.parameters()]
    sharded.zero_grad()
    sharded.set_is_last_backward(False)
    sharded(2 * x).square().sum().backward()
    sharded.set_is_last_backward(True)
    fail(sharded(x).sum().backward)
    sharded(0 * x).mul(0).sum().backward()
    for p, g in zip(sharded.parameters(), wanted, strict=True):
        close(p.grad, g, "an earlier backward", 1e-9)
    # A write between the failure and `unshard`: the prefetched values of the failed backward are stale.
    fail(sharded(x).sum().backward)
    shards = list(sharded.parameters())
    with torch.no_grad():
        for p in (*single.parameters(), *shards):
            p.mul_(3.0)
    sharded.a.unshard()
    close(sharded.a.weight, single.a.weight, "unsharded after a failure", 1e-9)
    sharded.a.reshard()


@on_mesh(2, names=("dp",))
def failure_inside(mesh: Any) -> None:
    """A nested backward fails, is caught, and the outer one goes on."""

    class Caught(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, module: Any) -> Any:
            ctx.module, ctx.x = module, x.detach()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, cotangent: Any) -> Any:
            with torch.enable_grad():
                x = ctx.x.requires_grad_()
                fail(lambda: ctx.module(Failing.apply(x)).sum().backward())
            return cotangent, None

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(SIZE, SIZE)
            self.b = nn.Linear(SIZE, SIZE)

        def forward(self, x: Any) -> Any:
            return self.b(Caught.apply(torch.tanh(self.b(self.a(x))), self.b))  # `b` stays open between its two calls

    torch.manual_seed(0)
    single = Outer().to(device(), torch.float64)
    sharded = copy.deepcopy(single)
    for module in (sharded.a, sharded.b, sharded):
        fully_shard(module, mesh=mesh)
    for m in (single, sharded):
        m(batch()).sum().backward()
        m(batch()).sum().backward()
    same_gradients(single, sharded, "around a failed backward")


@on_mesh(2, names=("dp",))
def called_alone_first(mesh: Any) -> None:
    """A unit that is called alone, before the first forward of the model around it, keeps its gradients."""
    single, sharded = pair(mesh)
    sharded.set_requires_gradient_sync(False)
    for m in (single, sharded):
        m.a(batch()).sum().backward()
    sharded.set_requires_gradient_sync(True)
    for m in (single, sharded):
        m(batch(), uses_a=False).sum().backward()
    same_gradients(single, sharded, "called alone first")


@on_mesh(2, names=("dp",))
def frozen_in_between(mesh: Any) -> None:
    """The input of a frozen unit needs a gradient on one rank alone. The documented remedy is right."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(SIZE, SIZE).requires_grad_(False)
            self.adapter, self.head = nn.Parameter(torch.ones(SIZE)), nn.Linear(SIZE, SIZE)

        def forward(self, x: Any, uses_adapter: bool) -> Any:
            return self.head(torch.tanh(self.block(x + self.adapter if uses_adapter else x)))

    torch.manual_seed(0)
    single = Frozen().to(device(), torch.float64)
    sharded = copy.deepcopy(single)
    fully_shard(sharded.block, mesh=mesh, reshard_after_forward=False)
    fully_shard(sharded, mesh=mesh)
    for step in range(3):
        for m in (single, sharded):
            m.zero_grad()
        (sum(single(batch(), rank == step % 2).square().sum() for rank in range(2)) / 2).backward()
        sharded(batch(), mesh.get_local_rank() == step % 2).square().sum().backward()
        for name in ("adapter", "head.weight"):
            close(sharded.get_parameter(name).grad, single.get_parameter(name).grad, f"{name}, step {step}", 1e-9)


JOBS = (kinds_of_batches, failures, failure_inside, called_alone_first, frozen_in_between)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_passes(pool: Any, job: Any) -> None:
    pool.run(2, job)
