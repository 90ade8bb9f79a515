"""`replicate` against the single device and torch's own DistributedDataParallel: models, optimizers, accumulation, and
parameters that a rank does not use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hyper_parallel import CommDebugMode, DTensor, Replicate, Shard, distribute_tensor, replicate
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device

F64 = torch.float64
ROWS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Parameters of all kinds: tied, frozen, without dimensions, without elements, unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, ids: Any, skip: int | None = None, run: Callable[..., Any] | None = None) -> Any:
        h = self.embedding(ids) * self.frozen
        for i, block in enumerate(self.blocks):
            if i != skip:
                h = block(h) if run is None else run(block, h)
        return self.head(h) * self.scale + self.nothing.sum()


def models(mesh: Any, dtype: torch.dtype = F64, **options: Any) -> tuple[Any, Any, list[Any]]:
    """A model, its replicated copy, and the batches of all ranks."""
    torch.manual_seed(0)
    plain = Model().to(device(), dtype)
    ids = [torch.randint(11, (ROWS, 4), generator=torch.Generator().manual_seed(i)) for i in range(mesh.size())]
    copied = copy.deepcopy(plain)
    if mesh.get_local_rank(0):
        with torch.no_grad():
            for p in copied.parameters():
                p.mul_(3)  # the first rank's values count
            copied.steps += 7
    return plain, replicate(copied, mesh, **options), [x.to(device()) for x in ids]


def loss_of(y: Any) -> Any:
    return (y**2).mean() + torch.sin(y).mean()


def check(plain: Any, copied: Any, what: str, tolerance: float = 1e-9) -> None:
    """Parameters and gradients, None where there is none."""
    for (name, p), q in zip(plain.named_parameters(), copied.parameters(), strict=True):
        assert isinstance(q, nn.Parameter) and isinstance(q, DTensor) and q.placements == (Replicate(),)
        close(q, p, f"{what}: {name}", tolerance)
        assert (p.grad is None) is (q.grad is None), f"{what}: gradient of {name}"
        if p.grad is not None:
            assert q.grad.placements == (Replicate(),)
            close(q.grad, p.grad, f"{what}: gradient of {name}", tolerance)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
    "for each": lambda ps: torch.optim.AdamW(ps, 0.05, foreach=False),
    "foreach": lambda ps: torch.optim.AdamW(ps, 0.05, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.05, fused=True),
}


@on_mesh()
def steps(mesh: Any, optimizer: str, cap: float) -> None:
    plain, copied, ids = models(mesh, bucket_cap_mb=cap)
    ours, theirs = (OPTIMIZERS[optimizer](list(m.parameters())) for m in (copied, plain))
    mine = ids[mesh.get_local_rank(0)]
    for step in range(5):
        for o in (ours, theirs):
            o.zero_grad()
        loss_of(plain(torch.cat(ids))).backward()
        loss_of(copied(mine)).backward()
        if step % 2:
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (plain, copied)]
            close(norms[1], norms[0], "norm", 1e-9)
        check(plain, copied, f"step {step}")
        ours.step()
        theirs.step()
    assert plain.unused.grad is None and copied.steps.item() == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2, 3)
def test_steps(pool: Any, world_size: int, optimizer: str) -> None:
    pool.run(world_size, steps, optimizer, 1e-3)


def _reduced(state: Any, bucket: Any) -> Any:
    sent, group, size = state
    sent.append(bucket.buffer().numel())
    work: Any = dist.all_reduce(bucket.buffer().div_(size), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


# DistributedDataParallel looks at annotations, which a lambda has none of.
_averaged: Any = lambda state, bucket: _reduced(state, bucket)  # noqa: E731


@on_mesh()
def counted(mesh: Any) -> None:
    """Compare with DistributedDataParallel: no more all-reduces, and as many bytes, but for a number for each
    parameter."""
    group, size = mesh.get_group(0), mesh.size()
    for cap in (1e-6, 3e-4, 25):
        plain, copied, ids = models(mesh, bucket_cap_mb=cap)
        theirs = DistributedDataParallel(
            copy.deepcopy(plain), process_group=group, bucket_cap_mb=cap, find_unused_parameters=True
        )
        mine, sent = ids[mesh.get_local_rank(0)], []
        theirs.register_comm_hook((sent, group, size), _averaged)
        for _ in range(3):  # torch makes its buckets again after the first backward
            sent.clear()
            for m in (plain, copied, theirs):
                m.zero_grad()
            loss_of(plain(torch.cat(ids))).backward()
            loss_of(theirs(mine)).backward()
            with CommDebugMode() as comm:
                y = copied(mine)
                assert comm.get_total_counts() == 0
                loss_of(y).backward()
        check(plain, copied, "gradients")
        trained = [p for p in plain.parameters() if p.requires_grad]
        assert comm.get_comm_counts() == {"all_reduce": len(comm.events)} and len(comm.events) <= len(sent)
        assert sum(sent) == sum(p.numel() for p in trained)
        assert sum(e.bytes for e in comm.events) == (sum(sent) + len(trained)) * 8


@on_mesh()
def unused(mesh: Any) -> None:
    """Ranks use different parameters: as many all-reduces on each, in the same order, and None where no rank has."""
    rank, size = mesh.get_local_rank(0), mesh.size()
    for cap in (1e-6, 3e-4, 25):
        for skips in ([0, 1, 2, None], [2, 2, 2, 2], [None, 0, 0, 1], [1, 1, None, 1]):
            plain, copied, ids = models(mesh, bucket_cap_mb=cap)
            for _ in range(2):
                (sum(loss_of(plain(x, skip)) for x, skip in zip(ids, skips, strict=False)) / size).backward()
                loss_of(copied(ids[rank], skips[rank])).backward()
                check(plain, copied, f"skips {skips}")
        # Nothing of the model on one rank but the way through.
        plain, copied = nn.Linear(4, 4).to(device()), nn.Linear(4, 4).to(device())
        copied.load_state_dict(plain.state_dict())
        plain, copied = Around(plain), replicate(Around(copied), mesh, bucket_cap_mb=cap)
        x = torch.ones(2, 4, device=device(), requires_grad=True)
        (sum(plain(x, i != 0)["y"].sum() for i in range(size)) / size).backward()
        copied(x.detach().requires_grad_(), rank != 0)["y"].sum().backward()
        check(plain, copied, "one rank uses nothing", 1e-5)


class Around(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, use: bool) -> Any:
        return {"y": self.inner(x) * x if use else x * 1, "n": 3}


@on_mesh()
def accumulated(mesh: Any) -> None:
    plain, copied, ids = models(mesh)
    rank, parts = mesh.get_local_rank(0), 3
    batches = [[torch.roll(x, i, 0) for x in ids] for i in range(parts)]
    for i, batch in enumerate(batches):
        skip = i if i < 2 else None  # parameters that only the earlier batches use count too
        loss_of(plain(torch.cat(batch), skip)).backward()
        copied.set_requires_gradient_sync(i == parts - 1)
        with CommDebugMode() as comm:
            loss_of(copied(batch[rank], skip)).backward()
        assert comm.get_total_counts() == (i == parts - 1)
        assert i == parts - 1 or all(p.grad is None for p in copied.parameters())
    check(plain, copied, "three batches, one all-reduce")
    # With synchronisation, and `.grad` that is there already; then without again.
    loss_of(plain(torch.cat(ids))).backward()
    loss_of(copied(ids[rank])).backward()
    check(plain, copied, "and one more")
    with copied.no_sync():
        loss_of(copied(ids[rank])).backward()
        check(plain, copied, "not seen yet")
    with pytest.raises(
        ValueError, match="is called with distributed inputs, but has accumulated gradients of plain inputs"
    ):
        copied(distribute_tensor(torch.cat(ids), mesh, [Shard(0)]))
    with pytest.raises(TypeError, match="True or False"):
        copied.set_requires_gradient_sync(1)
    for _ in range(2):
        loss_of(plain(torch.cat(ids))).backward()
    loss_of(copied(ids[rank])).backward()
    check(plain, copied, "and two more")


class Late(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last, self.run = nn.Linear(4, 4), nn.Linear(4, 4), run

    def forward(self, x: Any) -> Any:
        return self.last(self.run(self.first, x))


def non_reentrant(module: Any, x: Any) -> Any:
    return checkpoint(module, x, use_reentrant=False)


def reentrant(module: Any, x: Any) -> Any:
    return checkpoint(module, x, use_reentrant=True)


@on_mesh()
def checkpointed(mesh: Any) -> None:
    rank, size = mesh.get_local_rank(0), mesh.size()
    for run in (non_reentrant, reentrant):
        for cap, count in ((1e-6, 21), (3e-4, 8), (25, 1)):
            for skips in ([None] * 4, [0, 1, 2, None]):
                plain, copied, ids = models(mesh, bucket_cap_mb=cap)
                for _ in range(2):
                    (sum(loss_of(plain(x, skip)) for x, skip in zip(ids, skips, strict=False)) / size).backward()
                    with CommDebugMode() as comm:
                        loss_of(copied(ids[rank], skips[rank], run)).backward()
                    check(plain, copied, f"{run.__name__}, skips {skips}")
                    assert len(comm.events) == count
        # In one bucket are the parameters used after a checkpointed layer, and none used before.
        single = Late(run).to(device(), F64)
        copied = replicate(copy.deepcopy(single), mesh)
        x = torch.ones(2, 4, dtype=F64, device=device(), requires_grad=True)
        for module in (single, copied):
            loss_of(module(x)).backward()
        check(single, copied, f"{run.__name__}, late")
        # Around the whole model.
        plain, copied, ids = models(mesh)
        x = torch.ones((), dtype=F64, device=device(), requires_grad=True)
        loss_of(plain(torch.cat(ids))).backward()
        y = checkpoint(lambda x: copied(ids[rank]) * x, x, use_reentrant=run is reentrant)  # noqa: B023
        loss_of(y).backward()
        check(plain, copied, f"{run.__name__} around all")


@on_ranks(2, 4)
@pytest.mark.parametrize("job", [counted, unused, accumulated, checkpointed], ids=lambda job: job.__name__)
def test_replicate(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)
