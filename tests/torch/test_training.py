"""Torch's machinery around a training step: checkpointing, modes, saved-tensor hooks, autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, full, randn, shard


class Block(nn.Module):
    """A feed-forward block whose activations are DTensors between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def blocks(mesh: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block()).to(device())
    sharded = copy.deepcopy(plain)
    plan = {
        "*.norm": SequenceParallel(use_local_output=False),
        "*.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(sharded, mesh, plan)
    return plain, sharded


def loss_of(model: nn.Module, mesh: Any, run: Any = None) -> Any:
    x = randn(2, 5, 6)
    if mesh is not None:
        x = shard(x, mesh, Shard(1))
    return (run or model)(x.requires_grad_()).pow(2).sum()


def compare(plain: nn.Module, sharded: nn.Module, factor: float = 1.0) -> None:
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        close(q.grad, p.grad * factor, name, tolerance=1e-4)


@on_mesh()
def checkpointing(mesh: Any) -> None:
    for reentrant in (True, False):
        plain, sharded = blocks(mesh)
        loss_of(plain, None).backward()

        def run(x: Any, sharded: nn.Module = sharded, reentrant: bool = reentrant) -> Any:
            for block in sharded:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

        loss_of(sharded, mesh, run).backward()
        compare(plain, sharded)


@on_mesh()
def selective_checkpointing(mesh: Any) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    plain, sharded = blocks(mesh)
    loss_of(plain, None).backward()

    def run(x: Any) -> Any:
        for block in sharded:
            contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x

    loss_of(sharded, mesh, run).backward()
    compare(plain, sharded)


@on_mesh()
def saved_tensors_elsewhere(mesh: Any) -> None:
    plain, sharded = blocks(mesh)
    loss_of(plain, None).backward()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(sharded, mesh)
    loss.backward()
    compare(plain, sharded)


@on_mesh()
def counting_flops(mesh: Any) -> None:
    plain, sharded = blocks(mesh)
    loss_of(plain, None).backward()
    with FlopCounterMode(display=False) as counter:
        loss_of(sharded, mesh).backward()
    compare(plain, sharded)
    assert counter.get_total_flops() > 0


@on_mesh()
def gradient_modes(mesh: Any) -> None:
    plain, sharded = blocks(mesh)
    loss_of(plain, None).backward()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x = shard(randn(2, 5, 6), mesh, Shard(1))
            y = sharded(x)
            assert not y.requires_grad
            close(y, plain(randn(2, 5, 6)))
    for _ in range(2):
        loss_of(sharded, mesh).backward()
    compare(plain, sharded, factor=2)
    for p in sharded[0].parameters():
        p.requires_grad_(False)
        p.grad = None
    sharded.zero_grad()
    loss_of(sharded, mesh).backward()
    assert all(p.grad is None for p in sharded[0].parameters())
    compare(plain[1], sharded[1])


@on_mesh()
def autocast(mesh: Any) -> None:
    plain, sharded = blocks(mesh)
    with torch.autocast(device().type, dtype=torch.bfloat16):
        wanted, got = loss_of(plain, None), loss_of(sharded, mesh)
    got.backward()
    wanted.backward()
    assert all(p.grad.dtype is torch.float32 for p in sharded.parameters())
    close(got, wanted, tolerance=3e-2)
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        close(q.grad / full(q.grad).norm(), p.grad / p.grad.norm(), tolerance=3e-2)


@on_mesh()
def overloads_called_directly(mesh: Any) -> None:
    x, y = shard(randn(5, 3), mesh, Shard(0)), shard(randn(5, 3, seed=1), mesh, Shard(1))
    close(torch.ops.aten.sum.default(x), randn(5, 3).sum())
    close(torch.ops.aten.add.Tensor(x, y, alpha=2), randn(5, 3) + 2 * randn(5, 3, seed=1))
    close(torch.ops.aten.mm(x, y.T), randn(5, 3) @ randn(5, 3, seed=1).T)
    with FlopCounterMode(display=False):
        close(torch.ops.aten.sum.default(x), randn(5, 3).sum())
    for call in (
        lambda: torch.ops.aten.add_.Tensor(x, y),
        lambda: torch.ops.aten.add_(x, y),
        lambda: torch.ops.aten.add.out(x, y, out=x),
    ):
        with pytest.raises(TypeError, match="writes into its operands"):
            call()


@on_mesh()
def functions_without_a_row(mesh: Any) -> None:
    x = shard(randn(4, 4), mesh, Shard(0)).requires_grad_()
    y = torch.linalg.inv(x @ x.T + 2 * shard(torch.eye(4).to(device()), mesh, Replicate()))
    y.sum().backward()
    p = randn(4, 4).requires_grad_()
    torch.linalg.inv(p @ p.T + 2 * torch.eye(4).to(device())).sum().backward()
    close(x.grad, p.grad, tolerance=1e-4)
    z = shard(randn(4, 4), mesh, Shard(0))
    result = z.index_fill_(0, shard(torch.tensor([1]).to(device()), mesh, Replicate()), 7.0)
    assert result is z and z.placements == (Shard(0),)
    close(z, randn(4, 4).index_fill_(0, torch.tensor([1]).to(device()), 7.0))
    with pytest.raises(TypeError, match="plain tensor"):
        randn(4, 4).index_fill_(0, shard(torch.tensor([1]).to(device()), mesh, Replicate()), 7.0)
    w = shard(randn(4, 4), mesh, Shard(0))
    w.unsqueeze_(0)
    assert w.shape == (1, 4, 4) and w.placements == (Shard(1),)
    w.transpose_(0, 1)
    assert w.shape == (4, 1, 4) and w.placements == (Shard(0),)
    close(w, randn(4, 4).unsqueeze(1))


@on_mesh()
def losses(mesh: Any) -> None:
    functional = nn.functional
    target = randn(5, 3, seed=1).sigmoid()
    for loss in (
        functional.mse_loss,
        functional.l1_loss,
        functional.smooth_l1_loss,
        functional.huber_loss,
        functional.binary_cross_entropy_with_logits,
        lambda x, y, **k: functional.binary_cross_entropy(x.sigmoid(), y, **k),
        lambda x, y, **k: functional.kl_div(x.log_softmax(1), y, **k),
    ):
        for reduction in ("none", "mean", "sum"):
            x, p = shard(randn(5, 3), mesh, Shard(0)).requires_grad_(), randn(5, 3).requires_grad_()
            got = loss(x, shard(target, mesh, Shard(1)), reduction=reduction)
            wanted = loss(p, target, reduction=reduction)
            close(got, wanted)
            got.sum().backward()
            wanted.sum().backward()
            close(x.grad, p.grad)


JOBS = [
    checkpointing,
    selective_checkpointing,
    saved_tensors_elsewhere,
    counting_flops,
    gradient_modes,
    autocast,
    overloads_called_directly,
    functions_without_a_row,
    losses,
]


@on_ranks(1, 2)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_training(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)
