"""torch.compile around losses, models of transformers, tied weights, optimizers and units of data parallelism."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    loss_parallel,
    parallelize_module,
    replicate,
    vocab_parallel_cross_entropy,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.compiled import Graphs, fresh
from tests.torch.support import close, device, randn

WORDS, FEATURES = 12, 8


class Gpt(nn.Module):
    """Packed queries, keys and values; the head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, FEATURES), nn.Linear(FEATURES, WORDS, bias=False)
        self.packed, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head.weight = self.embedding.weight
        self.to(device())

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        q, k, v = self.packed(x).chunk(3, -1)
        return self.head(x + self.out(torch.sigmoid(q) * k + v))


def planned(head: Any) -> dict[str, Any]:
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "packed": ColwiseParallel(packed=3),
        "out": RowwiseParallel(),
        "head": head,
    }


def same_gradients(model: nn.Module, single: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        close(p.grad, q.grad, name)


def words() -> Any:
    return (torch.arange(8).expand(2, 8) % WORDS).to(device())


@on_mesh()
def with_losses(mesh: Any) -> None:
    """Whole logits in one graph; logits of a part leave it, as DTensors."""
    ids = words()

    def loss(model: Any) -> Any:
        return lambda ids: F.cross_entropy(model(ids).transpose(1, 2), ids)

    def vocabulary(model: Any) -> Any:
        return lambda ids: vocab_parallel_cross_entropy(model(ids).flatten(0, 1), ids.flatten(), mesh).mean()

    for head, make, whole in (
        (ColwiseParallel(output_layouts=Replicate()), loss, True),
        (ColwiseParallel(use_local_output=False), loss, False),
        (ColwiseParallel(), vocabulary, False),
    ):
        fresh(mesh)
        single = Gpt()
        model = parallelize_module(copy.deepcopy(single), mesh, planned(head))
        with loss_parallel():
            y = torch.compile(make(model), backend="aot_eager" if whole else "eager", fullgraph=whole)(ids)
            y.backward()
        wanted = loss(single)(ids)
        wanted.backward()
        close(y, wanted)
        same_gradients(model, single)
    x, target = randn(4, WORDS), ids[0, :4]
    given = distribute_tensor(x, mesh, [Shard(1)])
    for function in (F.nll_loss, F.cross_entropy):
        fresh()
        call: Any = torch.compile(lambda a, b, function=function: function(a, b), backend="eager")
        with loss_parallel():
            close(call(given, target), function(x, target))
    with pytest.raises(ValueError, match="got a plain tensor"):
        call(given, target)


def test_losses(pool: Any) -> None:
    pool.run(2, with_losses)


@on_mesh()
def units(mesh: Any) -> None:
    """A unit of data parallelism is not compiled itself."""
    for wrap in (fully_shard, replicate):
        fresh()
        unit = nn.Sequential(nn.Linear(6, 6)).to(device())
        wrap(unit, mesh=mesh) if wrap is fully_shard else wrap(unit, mesh)
        with pytest.raises(RuntimeError, match="is being compiled, which is not supported: compile the modules inside"):
            torch.compile(unit, backend="aot_eager")(randn(2, 6))


def test_units(pool: Any) -> None:
    pool.run(2, units)


@on_mesh()
def optimizer_steps(mesh: Any) -> None:
    fresh()
    single = Gpt()
    model = parallelize_module(copy.deepcopy(single), mesh, planned(ColwiseParallel(output_layouts=Replicate())))
    for one in (model, single):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
        step: Any = torch.compile(optimizer.step, backend="aot_eager") if one is model else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            one(words()).square().mean().backward()
            step()
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        close(p.full_tensor(), q, name)


@pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] == "torch-npu", reason="torch_npu's foreach kernels take no fake tensors"
)
def test_optimizer_steps(pool: Any) -> None:
    pool.run(2, optimizer_steps)


@on_mesh()
def transformers_llama(mesh: Any) -> None:
    """Training in one graph, and words generated on a static cache, which compiles once for all of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hyper_parallel.integrations.huggingface import parallelize_model

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    single = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0)).to(device()).eval()
    ids = torch.arange(1, 11).reshape(2, 5).to(device())
    fresh(mesh)
    model: Any = parallelize_model(copy.deepcopy(single), mesh)
    graphs = Graphs()
    loss = torch.compile(model, backend=graphs.backend, fullgraph=True)(ids, labels=ids).loss
    loss.backward()
    wanted = single(ids, labels=ids).loss
    wanted.backward()
    close(loss, wanted)
    same_gradients(model, single)
    assert dict(graphs.counts) == {"all_reduce": 10, "all_gather": 1}  # as in eager mode, see test_huggingface
    fresh()
    graphs = Graphs()
    model.forward = torch.compile(model.forward, backend=graphs.backend, fullgraph=True)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        found = model.generate(ids, cache_implementation="static", **how)
        assert torch.equal(found, single.generate(ids, **how))
    assert graphs.graphs == 2  # for the words that are given, and for each one that follows


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers(pool: Any) -> None:
    pool.run(2, transformers_llama)
