"""Models with cut sequences under both checkpointings, autocast, compilers, clipping: as on a single device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import ContextParallel, fully_shard, parallelize_module, replicate, shard_sequence, token_mean
from hyper_parallel.experimental import context_parallel
from hyper_parallel.testing import spmd
from tests.torch.support import device

VOCABULARY, LENGTH, FEATURES, IGNORED = 11, 9, 12, -100


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(FEATURES), Attention()
        self.feed_forward = nn.Sequential(nn.Linear(FEATURES, 24), nn.GELU(), nn.Linear(24, FEATURES))

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)


class Model(nn.Module):
    """Layers under checkpointing where ``reentrant`` is no None."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, FEATURES), nn.Embedding(LENGTH, FEATURES)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(FEATURES, VOCABULARY)
        self.reentrant: bool | None = None

    def forward(self, ids: Any, positions: Any) -> Any:
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def data(length: int = LENGTH) -> tuple[Any, Any]:
    ids = torch.arange(2 * length).reshape(2, length).mul(7).remainder(VOCABULARY).to(device())
    labels = ids.clone()
    labels[0, 3:6] = IGNORED
    return ids, labels


def single(model: Any, narrow: bool) -> tuple[float, dict[str, Any]]:
    ids, labels = data()
    shifted = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
    with torch.autocast(device().type, dtype=torch.bfloat16, enabled=narrow):
        logits = model(ids, torch.arange(LENGTH, device=device())[None])
    loss = F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def cut(model: Any, mesh: Any, styled: bool, narrow: bool, method: str | None = None) -> float:
    ids, labels = data()
    batch = shard_sequence({"ids": ids, "labels": labels}, mesh)
    with nullcontext() if styled else context_parallel(mesh, length=LENGTH, method=method):
        with torch.autocast(device().type, dtype=torch.bfloat16, enabled=narrow):
            logits = model(batch["ids"], batch["position_ids"])
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="none")
        loss = token_mean(losses, batch["labels"], mesh)
        loss.backward()
    return loss.item()


def fresh() -> Any:
    torch.manual_seed(0)
    return Model().to(device())


def compare(mesh: Any, case: str, *, styled: bool, reentrant: bool | None = None, **more: Any) -> None:
    narrow, method, compiled, shards = (more.get(key) for key in ("narrow", "method", "compiled", "shards"))
    wanted, wanted_grads = single(fresh(), bool(narrow))
    model = fresh()
    model.reentrant = reentrant
    if styled:
        parallelize_module(model, mesh, {"layers.*.attention": ContextParallel(method=method)})
    if shards:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        replicate(model, mesh)
    if compiled:
        for layer in model.layers:
            layer.compile(backend="eager")
    loss = cut(model, mesh, styled, bool(narrow), method)
    tolerance = 2e-2 if narrow else 1e-5
    torch.testing.assert_close(torch.tensor(loss), torch.tensor(wanted), rtol=tolerance, atol=tolerance, msg=case)
    for name, p in model.named_parameters():
        difference = (p.grad.full_tensor() - wanted_grads[name]).abs().max().item()
        assert difference < tolerance, f"{case}: gradient of {name} differs by {difference}"
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    whole = torch.stack([g.norm() for g in wanted_grads.values()]).norm()
    torch.testing.assert_close(norm, whole, rtol=tolerance, atol=tolerance, msg=f"{case}: norm")
    squares = sum(p.grad.full_tensor().square().sum() for p in model.parameters())
    assert squares.sqrt().item() < 0.1 + 1e-5, case


@spmd.on_mesh()
def trained(mesh: Any) -> None:
    for styled in (False, True):
        for reentrant in (True, False):
            compare(
                mesh, f"checkpoint {reentrant}, style {styled}", styled=styled, reentrant=reentrant, shards=reentrant
            )
    for method in ("gather", "exchange", "ring"):
        compare(mesh, f"autocast, {method}", styled=method == "ring", narrow=True, method=method)


def test_checkpointing_and_autocast(pool: Any) -> None:
    pool.run(2, trained)


@spmd.on_mesh()
def backward_outside(mesh: Any) -> None:
    """Reentrant checkpointing would compute attention of the part alone; evaluation and a style have no such thing."""
    ids, _ = data()
    batch = shard_sequence({"ids": ids}, mesh)
    model = fresh()
    model.reentrant = True
    with pytest.raises(ValueError, match="ended before backward"), context_parallel(mesh, length=LENGTH):
        model(batch["ids"], batch["position_ids"])
    with torch.no_grad(), context_parallel(mesh, length=LENGTH):
        evaluated = model(batch["ids"], batch["position_ids"])
    parallelize_module(model, mesh, {"layers.*.attention": ContextParallel()})
    torch.testing.assert_close(model(batch["ids"], batch["position_ids"]), evaluated)


def test_backward_outside_of_the_context(pool: Any) -> None:
    pool.run(2, backward_outside)


@spmd.on_mesh()
def compiled(mesh: Any) -> None:
    for shards, styled in ((False, False), (True, True)):
        compare(mesh, f"compiled, style {styled}, units {shards}", styled=styled, compiled=True, shards=shards)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks(pool: Any) -> None:
    pool.run(2, compiled)
