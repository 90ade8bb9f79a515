"""Training under `fully_shard` in double precision, step by step as on a single device; torch's features around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    DTensor,
    MixedPrecisionPolicy,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    implicit_replication,
    parallelize_module,
)
from hyper_parallel.testing.extent import in_gate, on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device


class Block(nn.Module):
    """Attention-free block with a norm, a gate without dimensions and uneven sizes."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Any) -> Any:
        return x + self.gain * self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, features: int, hidden: int, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.blocks = nn.ModuleList(Block(features, hidden) for _ in range(3))
        self.unused = nn.Linear(features, 2)
        self.head = nn.Linear(features, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "embedding": "colwise_rep",
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def shard(model: Any, mesh: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def model_of(sizes: tuple[int, int], dtype: Any = torch.float64) -> Any:
    torch.manual_seed(1)
    return Model(*sizes).to(device(), dtype)


def batches(size: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 11, (size, 3, 4), generator=generator).to(device())


def loss_of(model: Any, ids: Any) -> Any:
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(
    single: Any, sharded: Any, size: int, rank: int, optimizer: Any, steps: int = 5, tolerance: float = 1e-6
) -> None:
    steppers = [optimizer(module.parameters()) for module in (single, sharded)]
    for step in range(steps):
        ids = batches(size, step)
        (sum(loss_of(single, x) for x in ids) / size).backward()
        loss_of(sharded, ids[rank]).backward()
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            if p.grad is None:
                assert q.grad is None, name
            else:
                assert q.grad.placements == q.placements, name
                close(q.grad, p.grad, f"gradient of {name} at step {step}", tolerance)
        norms = [nn.utils.clip_grad_norm_(module.parameters(), 0.5) for module in (single, sharded)]
        close(norms[1], norms[0], f"norm at step {step}", tolerance)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        close(q, p, f"{name} at the end", tolerance)


@on_mesh()
def steps_of(mesh: Any, sizes: tuple[int, int], optimizer: str, reshard: bool | None) -> None:
    single = model_of(sizes)
    sharded = shard(copy.deepcopy(single), mesh, reshard_after_forward=reshard)
    train(single, sharded, mesh.size(), mesh.get_local_rank(), OPTIMIZERS[optimizer])


@pytest.mark.parametrize("sizes", in_gate([(8, 12), (5, 7)], [(5, 7)]), ids=["even", "uneven"])
@on_ranks(2, 3, 4)
def test_five_steps(pool: Any, world_size: int, sizes: tuple[int, int]) -> None:
    for optimizer in OPTIMIZERS:
        for reshard in (None,) if optimizer != "adamw" else (None, True, False):
            pool.run(world_size, steps_of, sizes, optimizer, reshard)


@on_mesh(2, 2, names=("dp", "tp"))
def two_dimensions(mesh: Any, sizes: tuple[int, int], optimizer: str) -> None:
    single = model_of(sizes)
    sharded = copy.deepcopy(single)
    parallelize_module(sharded, mesh["tp"], {name: style for name, style in PLAN.items() if name != "embedding"})
    shard(sharded, mesh["dp"])
    assert isinstance(sharded.blocks[0].up.weight, DTensor) and sharded.blocks[0].up.weight.device_mesh is mesh
    train(single, sharded, 2, mesh["dp"].get_local_rank(), OPTIMIZERS[optimizer])


@on_mesh(2, 2, names=("dp_replicate", "dp_shard"))
def replicated(mesh: Any, sizes: tuple[int, int], optimizer: str) -> None:
    single = model_of(sizes)
    sharded = shard(copy.deepcopy(single), mesh)
    row, column = mesh.get_coordinate()
    train(single, sharded, 4, 2 * row + column, OPTIMIZERS[optimizer])


@on_mesh(2, 1, 2, names=("dp_replicate", "dp_shard", "tp"))
def three_dimensions(mesh: Any, sizes: tuple[int, int], optimizer: str) -> None:
    single = model_of(sizes)
    sharded = copy.deepcopy(single)
    parallelize_module(sharded, mesh["tp"], {name: style for name, style in PLAN.items() if name != "embedding"})
    shard(sharded, mesh["dp_replicate", "dp_shard"])
    train(single, sharded, 2, mesh["dp_replicate"].get_local_rank(), OPTIMIZERS[optimizer])


@pytest.mark.parametrize("sizes", in_gate([(8, 12), (5, 7)], [(5, 7)]), ids=["even", "uneven"])
@pytest.mark.parametrize("job", [two_dimensions, replicated, three_dimensions], ids=lambda job: job.__name__)
def test_five_steps_on_more_dimensions(pool: Any, job: Any, sizes: tuple[int, int]) -> None:
    for optimizer in ("adamw", "momentum"):
        pool.run(4, job, sizes, optimizer)


@on_mesh()
def single_precision(mesh: Any) -> None:
    single = model_of((5, 7), torch.float32)
    sharded = shard(copy.deepcopy(single), mesh)
    train(single, sharded, mesh.size(), mesh.get_local_rank(), OPTIMIZERS["momentum"], tolerance=1e-5)


@on_mesh()
def mixed_precision(mesh: Any) -> None:
    """Computed and gathered in bfloat16; kept, reduced and stepped in single precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    single = model_of((8, 12), torch.float32)
    sharded = copy.deepcopy(single)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    seen = []
    sharded.blocks[0].up.register_forward_hook(lambda m, args, y: seen.append((args[0].dtype, m.weight.dtype, y.dtype)))
    ids = batches(mesh.size(), 0)
    (sum(loss_of(single, x) for x in ids) / mesh.size()).backward()
    loss = loss_of(sharded, ids[mesh.get_local_rank()])
    assert loss.dtype is torch.float32
    loss.backward()
    assert seen == [(torch.bfloat16,) * 3]
    for (name, p), q in zip(single.named_parameters(), sharded.named_parameters(), strict=True):
        q = q[1]
        assert q.dtype is torch.float32
        if p.grad is not None:
            assert q.grad.dtype is torch.float32
            close(q.grad, p.grad, name, 6e-2)
    floats = fully_shard(
        nn.Linear(4, 4, device=device()), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.float64, torch.float16)
    )
    x = torch.ones(2, 4, device=device())
    y = floats(x)
    assert y.dtype is torch.float64
    y.sum().backward()
    assert floats.weight.grad.dtype is torch.float32


@on_mesh()
def meta(mesh: Any) -> None:
    """Built on meta, then given memory and the numbers that a single device draws."""
    from hyper_parallel import manual_seed

    single = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5)).to(device())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.ones(2, 5, device=device())
    with pytest.raises(ValueError, match="has no values"):
        model(x)
    model.to_empty(device=device())
    for module in (single, model):
        manual_seed(3, mesh)
        for layer in module:
            layer.reset_parameters()
    for (name, p), q in zip(single.named_parameters(), model.parameters(), strict=True):
        close(q, p, name)
    close(model(x), single(x), "output")
    model(x).sum().backward()
    assert model[0].weight.grad.placements == model[0].weight.placements


@on_mesh()
def offload(mesh: Any) -> None:
    single = model_of((5, 7))
    sharded = shard(copy.deepcopy(single), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert all(p.to_local().device.type == "cpu" for p in sharded.parameters())
    train(single, sharded, mesh.size(), mesh.get_local_rank(), OPTIMIZERS["adamw"], steps=2)
    assert all(p.to_local().device.type == "cpu" for p in sharded.parameters())


class Positions(nn.Module):
    """Tokens and positions. ``shift`` is a plain tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(8, 4), nn.Embedding(6, 4)
        self.shift = torch.full((4,), 2.0, dtype=torch.double, device=device(), requires_grad=True)

    def forward(self, ids: Any, places: str) -> Any:
        x = self.tokens(ids) * self.shift
        if places == "of the batch":
            return x + self.positions(torch.ones_like(ids).cumsum(1) - 1)
        y = self.positions(torch.arange(ids.shape[1], device=device()))
        if places == "without a rule":
            return torch.linalg.lstsq(x, y[None].expand(4, -1, -1))
        return x + y


@on_mesh(2, 1, names=("dp", "tp"))
def positions_of_a_styled_table(mesh: Any) -> None:
    """A table with a style gives a plain tensor for plain positions. With a distributed batch, its gradient would be
    counted on each rank."""
    torch.manual_seed(0)
    single = Positions().double().to(device())
    ids = torch.arange(24, device=device()).reshape(4, 6) % 8
    sharded = copy.deepcopy(single)
    single(ids, "of the batch").square().sum().backward()
    style = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(sharded, mesh["tp"], {"tokens": style, "positions": style})
    fully_shard(sharded, mesh=mesh["dp"])
    batch = distribute_tensor(ids, mesh["dp"], [Shard(0)])
    with implicit_replication():
        for places in ("plain", "without a rule"):
            with pytest.raises(ValueError, match=r"computed from distributed parameters.* sum these over the ranks of"):
                sharded(batch, places)
        sharded(batch, "of the batch").square().sum().backward()
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        close(q.grad, p.grad, name)
    close(sharded.shift.grad, single.shift.grad, "a plain tensor")


@pytest.mark.parametrize(
    "job",
    [single_precision, mixed_precision, meta, offload, positions_of_a_styled_table],
    ids=lambda job: job.__name__,
)
def test_around(pool: Any, job: Any) -> None:
    pool.run(2, job)
