"""`replicate` over one dimension of a mesh and tensor parallelism over the other, in double precision."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    coalesce_gradients,
    parallelize_module,
    replicate,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device

F64, ROWS = torch.float64, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: Any, reentrant: bool | None = None) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return self.head(x) * self.scale


#: Features are whole between blocks, and the sequence is sharded in them; the last norm is not.
PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "blocks.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True),
    "blocks.0.norm": SequenceParallel(use_local_output=True),
    "blocks.0.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.0.down": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    "blocks.1.up": ColwiseParallel(),
    "blocks.1.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def models(mesh: Any, **options: Any) -> tuple[Any, Any, list[Any]]:
    torch.manual_seed(0)
    plain = Model().to(device(), F64)
    copied = parallelize_module(copy.deepcopy(plain), mesh["tp"], PLAN)
    parts = [torch.randint(9, (ROWS, 4), generator=torch.Generator().manual_seed(i)) for i in range(mesh.shape[0])]
    return plain, replicate(copied, mesh["dp"], **options), [x.to(device()) for x in parts]


def loss_of(y: Any) -> Any:
    return (y**2).mean() + torch.sin(y).mean()


def check(plain: Any, copied: Any, what: str) -> None:
    for (name, p), q in zip(plain.named_parameters(), copied.parameters(), strict=True):
        close(q, p, f"{what}: {name}", 1e-9)
        assert q.grad.placements == q.placements and q.grad.device_mesh is q.device_mesh
        close(q.grad, p.grad, f"{what}: gradient of {name}", 1e-9)


@on_mesh(2, 2, names=("dp", "tp"))
def steps(mesh: Any) -> None:
    for optimizer in (
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
        lambda ps: torch.optim.AdamW(ps, 0.05),
        lambda ps: torch.optim.AdamW(ps, 0.05, fused=True),
    ):
        plain, copied, parts = models(mesh, bucket_cap_mb=3e-4)
        mine = parts[mesh.get_local_rank("dp")]
        ours, theirs = optimizer(list(copied.parameters())), optimizer(list(plain.parameters()))
        for step in range(5):
            for o in (ours, theirs):
                o.zero_grad()
            loss_of(plain(torch.cat(parts))).backward()
            with CommDebugMode() as comm, coalesce_gradients():
                loss_of(copied(mine, [None, False, True, None, None][step])).backward()
            # Buckets of 40 doubles or more of each rank's elements, if all had equal parts.
            assert sum(e.mesh.mesh_dim_names == ("dp",) for e in comm.events) == 4
            if step % 2:
                with CommDebugMode() as comm:
                    norm = nn.utils.clip_grad_norm_(copied.parameters(), 0.1)
                close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), "norm", 1e-9)
                assert len(comm.events) == 1
            check(plain, copied, f"step {step}")
            ours.step()
            theirs.step()


@on_mesh(2, 2, names=("dp", "tp"))
def copies(mesh: Any) -> None:
    plain, copied, parts = models(mesh)
    mine = parts[mesh.get_local_rank("dp")]
    assert copied.scale.device_mesh is mesh["dp"] and copied.embedding.weight.device_mesh is mesh
    loss_of(plain(torch.cat(parts))).backward()
    again = copy.deepcopy(copied)
    with again.no_sync():
        loss_of(again(mine)).backward()
    assert again.scale.grad is None
    again.load_state_dict(copied.state_dict())
    with CommDebugMode() as comm:
        loss_of(copied(mine)).backward()
    dp = [e for e in comm.events if e.mesh.mesh_dim_names == ("dp",)]
    assert [e.kind for e in dp] == ["all_reduce"]
    assert dp[0].bytes == 8 * sum(1 + p.to_local().numel() for p in copied.parameters())
    check(plain, copied, "one step")
    plain.zero_grad()
    file = io.BytesIO()
    torch.save(again.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file))
    fresh = copy.deepcopy(again)
    loss_of(fresh(mine)).backward()
    loss_of(plain(torch.cat(parts))).backward()
    check(plain, fresh, "a copy")


@pytest.mark.parametrize("job", [steps, copies], ids=lambda job: job.__name__)
def test_replicate(pool: Any, job: Any) -> None:
    pool.run(4, job)
