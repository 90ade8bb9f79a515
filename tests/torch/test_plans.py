"""Plans on torch: torch's own classes given to this library, and parameters that a plan leaves plain."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as their_styles
import torch.nn.functional as F
from torch import nn

from hyper_parallel import ColwiseParallel, DTensor, Placement, RowwiseParallel, parallelize_module, strict
from hyper_parallel.testing import spmd
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import on_ranks
from tests.torch.support import device, randn


@spmd.on_mesh()
def torchs_own_classes(mesh: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 8)), torch.ones(4, 4)
    with fails(TypeError, "'0'", "ColwiseParallel of torch.distributed.tensor.parallel", "import ColwiseParallel`"):
        parallelize_module(model, mesh, {"0": their_styles.ColwiseParallel()})
    with fails(TypeError, "SequenceParallel of torch.distributed.tensor", "import SequenceParallel`"):
        parallelize_module(model, mesh, {"0": their_styles.SequenceParallel()})
    for placement in (theirs.Shard(1), theirs.Replicate(), theirs.Partial()):
        with fails(TypeError, "RowwiseParallel", "by position", f"{type(placement).__name__} of torch.distributed"):
            RowwiseParallel(placement)
        with fails(TypeError, "one placement per mesh dimension", "write ["):
            DTensor.from_local(x, mesh).redistribute(placements=placement)
        assert all(isinstance(p, Placement) for p in ColwiseParallel(output_layouts=placement).output_layouts)
        assert DTensor.from_local(x, mesh, [placement]).placements == (placement,)
    with fails(ValueError, "bxor"):
        DTensor.from_local(x, mesh, [theirs.Partial("bxor")])


@on_ranks(1, 2)
def test_torchs_own_classes(pool: Any, world_size: int) -> None:
    pool.run(world_size, torchs_own_classes)


@spmd.on_mesh()
def what_stays_plain(mesh: Any) -> None:
    rank = mesh.get_local_rank()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(rank)
            self.norm, self.lazy = nn.BatchNorm1d(4), nn.LazyLinear(3)
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.position = nn.Parameter(torch.randn(3, 4).t())
            self.nowhere = nn.Parameter(torch.empty(2, device="meta"))
            self.register_buffer("expanded", torch.full((1, 3), float(rank)).expand(4, 3))
            self.register_buffer("sparse", torch.eye(3).to_sparse() * (rank + 1))
            self.register_buffer("brain", torch.full((3,), float(rank), dtype=torch.bfloat16))
            self.register_buffer("turned", (torch.arange(3) * (1 + 1j) + rank).conj())

    model = Model()
    state = {name: (id(p), type(p), p.requires_grad) for name, p in model.named_parameters()}
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert torch.equal(model.expanded, torch.zeros(4, 3))
    assert torch.equal(model.brain, torch.zeros(3, dtype=torch.bfloat16))
    assert torch.equal(model.turned, (torch.arange(3) * (1 + 1j)).conj())
    # Of another format than the usual one, or without values: left alone.
    assert torch.equal(model.sparse.to_dense(), torch.eye(3) * (rank + 1))
    assert model.nowhere.is_meta and isinstance(model.lazy.weight, nn.parameter.UninitializedParameter)
    torch.manual_seed(0)
    first = nn.ModuleList([nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 4)])  # the numbers that rank 0 drew before
    assert torch.equal(model.position, torch.randn(3, 4).t()) and len(first)
    for name, p in model.named_parameters():
        assert (id(p), p.requires_grad) == (state[name][0], state[name][2]), name


@on_ranks(1, 2)
def test_what_stays_plain(pool: Any, world_size: int) -> None:
    pool.run(world_size, what_stays_plain)


class Attention(nn.Module):
    """Attention of nanoGPT, with local heads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, 8
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        batch, length = x.shape[:2]
        q, k, v = (
            part.view(batch, length, -1, self.n_embd // self.n_head).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, -1))


@spmd.on_mesh()
def fused_attention(mesh: Any) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return nn.ModuleDict({"attn": Attention()}).to(device())

    plan: dict[str, Any] = {"attn.qkv": ColwiseParallel(), "attn.proj": RowwiseParallel()}
    words = ("'attn.qkv' has 24 output features", "(n_head)", "heads=(4, 4, 4)", "packed=(8, 8, 8)", "packed=1")
    with fails(ValueError, *words):
        parallelize_module(model(), mesh, plan)
    with fails(ValueError, *words), strict():
        parallelize_module(model(), mesh, plan)
    x = randn(2, 3, 8, seed=1)
    for style in (ColwiseParallel(heads=(4, 4, 4)), ColwiseParallel(packed=3)):
        sharded = parallelize_module(model(), mesh, {**plan, "attn.qkv": style})
        torch.testing.assert_close(sharded["attn"](x), model()["attn"](x))


@on_ranks(1, 2, 4)
def test_fused_attention(pool: Any, world_size: int) -> None:
    pool.run(world_size, fused_attention)
