"""torch.compile around losses, models of transformers, tied weights, optimizers and units of data parallelism."""

from __future__ import annotations

import copy
import os
import types
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as theirs_parallel
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    RankMismatchError,
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
from hyper_parallel.core.rules import class_shards
from hyper_parallel.platform.torch.compiled import losses
from hyper_parallel.platform.torch.compiled.moves import placed_classes
from hyper_parallel.platform.torch.compiled.placed import settle
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.compiled import Graphs, fresh, same_counts
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


#: Arguments of losses: reductions, weights, smoothing. Two all-reduces of samples in each case.
LOSSES: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "none", "ignore_index": 3},
    {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 1.5, WORDS)},
    {"reduction": "sum", "weight": torch.linspace(0.5, 1.5, WORDS)},
    {"label_smoothing": 0.2},
)


def on_device(how: dict[str, Any]) -> dict[str, Any]:
    return {key: x.to(device()) if isinstance(x, torch.Tensor) else x for key, x in how.items()}


@on_mesh()
def with_losses(mesh: Any) -> None:
    """Logits of a part, plain and as DTensors, with their losses in one graph: by eager mode's collectives."""
    ids = words()

    def loss(model: Any, **how: Any) -> Any:
        return lambda ids: F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten(), **how)

    def vocabulary(model: Any, **how: Any) -> Any:
        return lambda ids: vocab_parallel_cross_entropy(model(ids).flatten(0, 1), ids.flatten(), mesh, **how)

    single, some = Gpt(), slice(1, 3) if everything() else slice(2, 3)
    for head, make in ((ColwiseParallel(use_local_output=False), loss), (ColwiseParallel(), vocabulary)):
        for how in map(on_device, LOSSES[some] if make is vocabulary else LOSSES[2:3]):
            fresh(mesh)
            single.zero_grad()
            model, graphs = parallelize_module(copy.deepcopy(single), mesh, planned(head)), Graphs()
            eager = copy.deepcopy(model)
            with loss_parallel(), CommDebugMode() as comm:
                total(make(eager, **how)(ids)).backward()
            with theirs_parallel.loss_parallel():  # as inside of this library's own, which other tests have
                y = torch.compile(make(model, **how), backend=graphs.backend, fullgraph=True)(ids)
            total(y).backward()
            wanted = loss(single, **how)(ids)
            wanted.sum().backward()
            close(y, wanted, str(how))
            same_gradients(model, single)
            same_counts(graphs, comm)


def total(y: Any) -> Any:
    y = y.sum()
    return y.full_tensor() if isinstance(y, DTensor) else y


@on_mesh()
def with_targets_of_other_kinds(mesh: Any) -> None:
    """Probabilities, log-probabilities, other shapes and dtypes; targets that are no class."""
    fresh(mesh)
    x, ids = randn(2, 4, WORDS), words()[:, :4]
    DTensor.from_local(x, mesh)  # from the first one on losses are traced
    own = slice(mesh.get_local_rank() * WORDS // 2, (mesh.get_local_rank() + 1) * WORDS // 2)
    soft = torch.softmax(randn(2, 4, WORDS, seed=1), -1)

    def compiled(function: Any, *args: Any) -> Any:
        fresh()
        return torch.compile(function, backend="aot_eager", fullgraph=True)(*args)

    def of_parts(x: Any, target: Any, **how: Any) -> Any:
        return vocab_parallel_cross_entropy(x, target, mesh, dim=-1, **how)

    for how in map(on_device, ({}, LOSSES[2])):
        leaves = [t.clone().requires_grad_() for t in (x, soft)]
        parts = [t[..., own].clone().requires_grad_() for t in (x, soft)]
        F.cross_entropy(*(t.movedim(-1, 1) for t in leaves), **how).backward()
        compiled(partial(of_parts, **how), *parts).backward()
        for part, leaf in zip(parts, leaves, strict=True):
            close(part.grad, leaf.grad[..., own], str(how))
    wrong = ids.clone()
    wrong[0, 0] = WORDS + 1
    assert compiled(of_parts, x[..., own], wrong).isnan()
    half = compiled(of_parts, x[..., own].bfloat16(), ids)
    assert half.dtype is torch.bfloat16
    close(half, F.cross_entropy(x.bfloat16().movedim(-1, 1).float(), ids).bfloat16(), tolerance=0.02)

    given = distribute_tensor(x, mesh, [Shard(2)])
    for how in map(on_device, (*LOSSES[:2], LOSSES[3])):
        with loss_parallel():
            y = compiled(lambda x, how=how: F.nll_loss(x.view(-1, WORDS), ids.flatten(), **how), given)
        close(y, F.nll_loss(x.flatten(0, 1), ids.flatten(), **how), str(how))
    with loss_parallel():
        y = compiled(lambda x: F.cross_entropy(x.transpose(1, 2).to(torch.float32), ids), given)
    close(y, F.cross_entropy(x.transpose(1, 2), ids))


@on_mesh()
def losses_that_leave(mesh: Any) -> None:
    """Eager mode reports a misfit, on all ranks."""
    fresh(mesh)
    x, ids = randn(4, WORDS), words()[0, :4]
    own = x[:, : WORDS // 2]
    call: Any = torch.compile(
        lambda x, **how: vocab_parallel_cross_entropy(x, ids, mesh, **how), backend="eager", dynamic=False
    )
    for given, how, said in (
        (own, {"reduction": "max"}, "reduction must be one of"),
        (own, {"vocab_size": 7}, "holds .* of 7 classes"),
        (own, {"weight": x[0, :3]}, "one entry for each of 12 classes"),
        (own[:3], {}, "the target has shape"),
        (distribute_tensor(x, mesh, [Shard(1)]), {}, "must be a plain local tensor"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            call(given, **how)
    vocab_parallel_cross_entropy(x[:3, :5], ids[:3], mesh)
    class_shards._COMPARED.pop(mesh, None)  # shapes are compared once, also where eager mode has done it
    with pytest.raises(RankMismatchError, match="the samples of local_logits"):
        torch.compile(lambda x: vocab_parallel_cross_entropy(x, ids[:1].expand(len(x)), mesh), backend="eager")(
            x[: 3 + mesh.get_local_rank(), :5]
        )
    given = distribute_tensor(x, mesh, [Shard(1)])
    for function in (F.nll_loss, F.cross_entropy):
        fresh()
        with pytest.raises(ValueError, match="got a plain tensor"):  # outside loss_parallel
            torch.compile(lambda a, b, function=function: function(a, b), backend="eager")(given, ids)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    with loss_parallel():  # whole classes: an operation on a DTensor as any other
        close(torch.compile(lambda a: F.cross_entropy(a, ids), backend="eager")(rows), F.cross_entropy(x, ids))


@on_mesh()
def losses_run_by_python(mesh: Any) -> None:
    """A traced function is a function like any other."""
    rank, x, ids = mesh.get_local_rank(), randn(2, 4, WORDS), words()[:, :4]
    DTensor.from_local(x, mesh)
    soft = torch.softmax(randn(2, 4, WORDS, seed=1), -1)
    part = slice(rank * WORDS // 2, (rank + 1) * WORDS // 2)
    traced = losses._traced(vocab_parallel_cross_entropy)
    placed = placed_classes(mesh, mesh.size())[2]
    for how in map(on_device, LOSSES):
        for target in (ids, soft) if "ignore_index" not in how else (ids,):
            leaf, own = x.clone().requires_grad_(), x[..., part].clone().requires_grad_()
            wanted = F.cross_entropy(leaf.movedim(-1, 1), target if target is ids else target.movedim(-1, 1), **how)
            y = traced(own, target if target is ids else target[..., part], mesh, dim=-1, **how)
            close(y, wanted, str(how))
            wanted.sum().backward()
            y.sum().backward()
            close(own.grad, leaf.grad[..., part], str(how))
        with loss_parallel():
            logits = x[..., part].clone().as_subclass(placed)
            y = F.cross_entropy(logits.view(8, WORDS).float(), ids.flatten(), **how)
            close(settle(y), F.cross_entropy(x.flatten(0, 1), ids.flatten(), **how))
            y = F.cross_entropy(torch.flatten(logits.to(torch.float32), 0, 1), ids.flatten(), **how)
            close(settle(y), F.cross_entropy(x.flatten(0, 1), ids.flatten(), **how))
            if "label_smoothing" not in how:
                y = F.nll_loss(logits.transpose(-1, 1), ids, **how)
                close(settle(y), F.nll_loss(x.transpose(-1, 1), ids, **how))
    whole = x.clone().as_subclass(placed_classes(mesh, mesh.size())[None])
    close(settle(whole.reshape(-1, 3).flatten()), x.flatten())
    rows = x[rank : rank + 1].clone().as_subclass(placed_classes(mesh, mesh.size())[0])
    close(settle(rows.flatten(1)), x.flatten(1))
    close(settle(rows.transpose(0, 1)), x.transpose(0, 1))
    # Left to eager mode, which computes on DTensors: operations that change the classes, and arguments that a loss does
    # not take.
    close(settle(logits).flatten(1), x.flatten(1))
    for leaves in (lambda x: x.flatten(1), lambda x: x.view(2, -1), lambda x: x.to(device()), lambda x: x + 1):
        close(settle(leaves(x[..., part].clone().as_subclass(placed))), leaves(x))
    with loss_parallel():
        close(F.cross_entropy(rows.transpose(1, 2), ids), F.cross_entropy(x.transpose(1, 2), ids))
        uneven = {"weight": torch.ones(3, device=device())}
        with pytest.raises((ValueError, RuntimeError)):
            F.cross_entropy(x[..., part].clone().as_subclass(placed).transpose(1, 2), ids, **uneven)
        with pytest.raises((ValueError, RuntimeError)):
            F.nll_loss(x[..., part].clone().as_subclass(placed).transpose(1, 2), ids, **uneven)
        with pytest.raises(TypeError, match="size_average and reduce are not supported"):
            F.cross_entropy(x[..., part].clone().as_subclass(placed).transpose(1, 2), ids, reduce=False)
    for wrong in ({"reduction": "max"}, {"weight": x[0, 0, :3]}):
        with pytest.raises(ValueError):
            traced(x[..., part], ids, mesh, dim=-1, **wrong)
    with pytest.raises(ValueError, match="the target has shape"):
        traced(x[..., part], ids[:, :2], mesh, dim=-1)
    with pytest.raises(ValueError, match="got a plain tensor"):  # outside loss_parallel
        F.cross_entropy(x[..., part].clone().as_subclass(placed).transpose(1, 2), ids)


@on_mesh()
def losses_that_come_late(mesh: Any) -> None:
    """A loss whose module is imported when the DTensor class has long been made is traced too."""
    DTensor.from_local(randn(2, 4), mesh)
    known = vocab_parallel_cross_entropy
    late = types.FunctionType(known.__code__, known.__globals__, known.__name__, known.__defaults__, known.__closure__)
    late.__kwdefaults__ = known.__kwdefaults__
    class_shards.loss_of_shards(late)
    try:
        assert {late, known} <= losses._KNOWN
    finally:
        class_shards._LOSSES.remove(late)


@pytest.mark.parametrize(
    "job", [with_losses, with_targets_of_other_kinds, losses_that_leave, losses_run_by_python, losses_that_come_late]
)
def test_losses(pool: Any, job: Any) -> None:
    pool.run(2, job)


class Halves(nn.Module):
    """Two units, and a module around them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Half(), Half()
        self.to(device())

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x * 2) * 3)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


@on_mesh()
def units(mesh: Any) -> None:
    """Around units of data parallelism graphs break, and the inside of a unit is compiled by itself."""
    for wrap in (fully_shard, replicate) if everything() else (replicate,):
        fresh()
        single, graphs = Halves(), Graphs()
        model = copy.deepcopy(single)
        if wrap is fully_shard:
            for unit in (model.first, model.second, model):
                fully_shard(unit, mesh=mesh)
        else:
            replicate(model, mesh)
        xs = [randn(3, 6, seed=i) for i in range(mesh.size())]
        call: Any = torch.compile(model, backend=graphs.backend)
        for _ in range(2):
            model.zero_grad()
            single.zero_grad()
            y = call(xs[mesh.get_local_rank()])
            y.square().sum().backward()
            close(y, single(xs[mesh.get_local_rank()]))
            (sum(single(x).square().sum() for x in xs) / len(xs)).backward()
            same_gradients(model, single)
        assert graphs.graphs >= 4  # each half, forward and backward
        fresh()
        with pytest.raises(Exception, match="HyperParallel: a unit of data parallelism, which cannot be compiled"):
            torch.compile(model, backend="eager", fullgraph=True)(xs[0])
        with pytest.raises(RuntimeError, match="is being compiled, which is not supported"), torch.no_grad():
            torch.export.export(model, (xs[0],), strict=False)


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
def transformers_llama(mesh: Any, backend: Any = None) -> None:
    """Training in one graph, and words generated on a static cache, which compiles once for all of them.

    ``backend`` is one of torch's; None counts graphs and collectives.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from hyper_parallel.integrations.huggingface import parallelize_model

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    # Where there are fewer of these than ranks, their projections leave compiled code.
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": max(2, mesh.size())}
    single = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0)).to(device()).eval()
    ids = torch.arange(1, 11).reshape(2, 5).to(device())
    fresh(mesh)
    model: Any = parallelize_model(copy.deepcopy(single), mesh)
    graphs = Graphs()
    loss = torch.compile(model, backend=backend or graphs.backend, fullgraph=True)(ids, labels=ids).loss
    loss.backward()
    wanted = single(ids, labels=ids).loss
    wanted.backward()
    close(loss, wanted)
    same_gradients(model, single)
    assert backend or dict(graphs.counts) == {
        "all_reduce": 10,
        "all_gather": 1,
    }  # as in eager mode, see test_huggingface
    fresh()
    graphs = Graphs(copies=True)  # generate() does so where it fills the cache
    model.forward = torch.compile(model.forward, backend=backend or graphs.backend, fullgraph=True)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        found = model.generate(ids, cache_implementation="static", **how)
        assert torch.equal(found, single.generate(ids, **how))
    assert backend or graphs.graphs == 2  # for the words that are given, and for each one that follows


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers(pool: Any) -> None:
    pool.run(2, transformers_llama)
