"""Models of torch whose plain code is followed: no alarm for right plans, and the line of wrong ones."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.distributed.nn.functional as functional
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel,
    ContextParallel,
    DTensor,
    PackedShard,
    Partial,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check_plain_code,
    fully_shard,
    get_platform,
    parallelize_module,
)
from hyper_parallel.core.plain_code import following
from hyper_parallel.core.plain_code.contexts import follow
from hyper_parallel.core.plain_code.first_call import VARIABLE, without_first_calls
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.plain_code.marks import Joined, Lost
from hyper_parallel.testing.spmd import on_mesh
from tests.support.plain_marks import part as shard_of
from tests.support.plain_marks import placed, ways
from tests.torch.support import device

VOCABULARY, FEATURES, HEADS, SIZE = 12, 16, 4, 4
C, W = ColwiseParallel, RowwiseParallel


class FusedAttention(nn.Module):
    """Attention as in nanoGPT: one projection, split, with views by the sizes of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))
        self.flash = True

    def forward(self, x: Any) -> Any:
        b, t, _ = x.size()
        y = self.c_attn(x)
        q, k, v = y.split(y.shape[-1] // 3, dim=2)
        q, k, v = (z.view(b, t, z.shape[-1] // SIZE, SIZE).transpose(1, 2) for z in (q, k, v))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * SIZE**-0.5
            scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, -1))


class GPT(nn.Module):
    def __init__(self, flash: bool = True) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, FEATURES), nn.Linear(FEATURES, VOCABULARY, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(3))
        self.attention, self.up, self.down = FusedAttention(), nn.Linear(FEATURES, 32), nn.Linear(32, FEATURES)
        self.attention.flash = flash

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))


def rotated(x: Any, turns: Any) -> Any:
    """Rotary embedding by complex numbers, (batch, tokens, heads, size)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, : x.shape[1], None, :]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Attention as in torchtitan's Llama, with half as many key and value heads, repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.wk, self.wv = nn.Linear(FEATURES, FEATURES // 2), nn.Linear(FEATURES, FEATURES // 2)

    def forward(self, x: Any, turns: Any) -> Any:
        b, t, _ = x.shape
        q, k, v = (p(x).view(b, t, -1, SIZE) for p in (self.wq, self.wk, self.wv))
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (z[:, :, :, None, :].expand(b, t, z.shape[2], 2, SIZE).reshape(b, t, -1, SIZE) for z in (k, v))
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(FEATURES), nn.RMSNorm(FEATURES)
        self.attention = Attention()
        self.w1, self.w2, self.w3 = (nn.Linear(*n) for n in ((FEATURES, 32), (32, FEATURES), (FEATURES, 32)))

    def forward(self, x: Any, turns: Any) -> Any:
        x = x + self.attention(self.norm1(x), turns)
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """Blocks under checkpointing where ``reentrant`` is no None."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, FEATURES), nn.RMSNorm(FEATURES)
        self.layers, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(FEATURES, VOCABULARY)
        angles = torch.outer(torch.arange(16.0), 100.0 ** -torch.arange(0, 1, 2 / SIZE))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.reentrant: bool | None = None

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x, self.turns)
            else:
                x = checkpoint(layer, x, self.turns, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def gpt_plan(packed: int) -> dict[str, Any]:
    return {"attention.c_attn": C(packed=packed), "attention.c_proj": W(), "up": C(), "down": W()}


LLAMA: dict[str, Any] = {
    "layers.*.attention.w[qkv]": C(),
    "layers.*.attention.wo": W(),
    "layers.*.w[13]": C(),
    "layers.*.w2": W(),
    "head": C(output_layouts=Replicate()),
}
SEQUENCE: dict[str, Any] = {
    "tokens": W(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm?": SequenceParallel(),
    "norm": SequenceParallel(),
    "layers.*.attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    "layers.*.attention.w[qkv]": C(),
    "layers.*.attention.wo": W(output_layouts=Shard(1)),
    "layers.*.w[13]": C(input_layouts=Shard(1)),
    "layers.*.w2": W(output_layouts=Shard(1)),
    "head": C(input_layouts=Shard(1), output_layouts=Replicate()),
}


def ids() -> Any:
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0)).to(device())


def step(model: Any) -> tuple[Any, list[Any]]:
    """The loss and the gradients, whole."""
    x = ids()
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    return loss.detach(), [g.clone() for g in grads]


def followed(model: Any) -> Any:
    """The report of a step, whose numbers are those of a step that is not followed."""
    wanted, of_all = step(model)
    with check_plain_code(model) as checked:
        loss, grads = step(model)
    torch.testing.assert_close(loss, wanted)
    for got, grad in zip(grads, of_all, strict=True):
        torch.testing.assert_close(got, grad)
    assert not checked.unknown, checked.unknown
    return checked


def made(cls: Any, *arguments: Any) -> Any:
    torch.manual_seed(0)
    return cls(*arguments).to(device())


@on_mesh(names=("tp",))
def models(mesh: Any) -> None:
    for flash in (True, False):
        right = parallelize_module(made(GPT, flash), mesh, gpt_plan(3))
        assert not followed(right).findings
        wrong = parallelize_module(made(GPT, flash), mesh, gpt_plan(1))
        with check_plain_code(wrong) as checked:
            wrong(ids())
        (finding,) = checked.findings
        assert finding.module == "attention" and finding.operation == "split" and "packed=" in finding.remedy
        first = FusedAttention.forward.__code__.co_firstlineno
        assert finding.where == f"{__file__}:{first + 3}"
    for plan in (LLAMA, SEQUENCE):
        for reentrant in (None, False, True):
            model = parallelize_module(made(Llama), mesh, plan)
            model.reentrant = reentrant
            assert not (lines := followed(model).lines()), (reentrant, lines)


def test_models(pool: Any) -> None:
    pool.run(2, models)


@on_mesh(2, 2, names=("dp", "tp"))
def corners(mesh: Any) -> None:
    tp, dp = mesh["tp"], mesh["dp"]

    def part(x: Any, dim: int, on: Any = tp) -> Any:
        return shard_of(x, dim, on)

    data = torch.ones(2, 3, 4, 6, device=device())
    with follow(nn.Module(), get_platform()) as following:
        x = part(data, 2)
        # A write into a view is a write to its base.
        base = x.new_empty(2, 3, 4, 8)
        base[..., :6].copy_(x)
        assert placed(base) == [(Shard(2),)]
        # Functions that are compositions of others, and functions of Python.
        some, rows = torch.zeros(2, 3, 5, device=device()), data[:, 0, :, :5]
        y = torch.baddbmm(some, part(data[:, 0], 1).transpose(1, 2)[:, :3], rows, beta=0)
        assert y.shape == (2, 3, 5) and ways(y) is not None
        # Checkpointing counts the tensors that are saved, and recomputes without following.
        grown = part(data[:, 0].clone().requires_grad_(), 1)
        y = checkpoint(lambda x: torch.baddbmm(some, x.mT[:, :3], rows, beta=0), grown, use_reentrant=False)
        y.sum().backward()
        assert placed(F.normalize(x, dim=-1)) == [(Shard(2),)]
        # Sizes that are local: stretched, a slice of all that is here, pieces of packed parts.
        assert placed(x[:, :1].expand(2, 5, 4, 6)) == [(Shard(2),)] and placed(x[:, :, :4]) == [(Shard(2),)]
        packed = DTensor.from_local(data, tp, [PackedShard(3, 3)]).to_local()
        assert all(placed(piece) == [(Shard(3),)] for piece in packed.split(2, -1))
        # One head on each rank: cut at the heads, or at their features.
        flat = part(torch.ones(2, 3, 6, device=device()), 2)
        assert len(ways(flat.view(2, 3, 1, 6))) == 2
        # An index that the rule knows on no shape, next to a tensor: its rule says nothing about parts.
        assert isinstance(ways(x[0, :, :, torch.tensor([1, 0], device=device())]), Lost)
        # Nothing reads the gradient of zeros that the program makes.
        assert placed(x + torch.zeros(4, 6, device=device(), requires_grad=True).abs()) == [(Shard(2),)]
        # Zeros that the program makes are a summand too, whatever their number of rows. Other values are not.
        partial = DTensor.from_local(data[0, 0], tp, [Partial()]).to_local()
        for rows in (0, 2):
            assert placed(torch.vstack((partial, partial.new_zeros(rows, 6)))) == [(Partial(),)]
        unsorted = torch.zeros(4, 6, device=device())
        unsorted[torch.tensor([0, 3, 2, 1], device=device())] = partial
        assert placed(unsorted) == [(Partial(),)]
        assert not following.findings, following
        # Pieces with other gradients are taken apart again, by split and by slices.
        whole = torch.ones(2, 3, 4, device=device(), requires_grad=True)
        summed = DTensor.from_local(whole, tp, [Replicate()]).to_local(grad_placements=[Partial()])
        joined = torch.cat([whole * 1, summed], -1)
        assert isinstance(ways(joined), Joined) and ways(joined.clone()) == ways(joined)
        assert ways(joined.split([4, 4], -1)[1]) == ways(summed) and ways(joined[..., 5:7])[0].summed == (0,)
        for lost in (joined[..., 3:5], joined[..., None], joined[0], joined.flip(-1), joined.split([3, 5], -1)[0]):
            assert isinstance(ways(lost), Lost)
        assert "pieces that differ" in str(ways(joined)) and "with summands as gradients on tp" in str(ways(summed)[0])
        assert not following.findings, following
        # A gradient that is a summand already is not to be summed again.
        DTensor.from_local(summed, tp, [Replicate()])
        assert [f.kind for f in following.findings] == ["input"] and "twice" in str(following)
        # Two meshes, an operand that is written to, a number that is read, an unknown function in place.
        assert isinstance(ways(x * part(data, 0, dp)), Lost)
        assert isinstance(ways(torch.polygamma(1, part(data, 1), out=part(data.clone(), 1))), Lost)
        part(data, 1).sum().item()
        assert any("reads values" in note for note in following.notes)
        # Nothing is known of what was computed of such.
        lost = torch.linalg.lstsq(part(data, 1), data)[0]
        assert isinstance(ways(lost + 1), Lost) and "lstsq" in str(following) and "not followed" in str(ways(lost))
        # On two dimensions.
        both = DTensor.from_local(data, mesh, [Shard(0), Shard(2)]).to_local()
        assert placed(both.flatten(2)) == [(Shard(0), Shard(2))] and placed(both.sum(2)) == [(Shard(0), Partial())]
        assert placed(both + torch.ones(4, 1, device=device())) == [(Shard(0), Shard(2))]
        kinds = len(following.findings)
        both.mean(0)
        assert len(following.findings) == kinds + 1
        # The gradient of a parameter is read.
        part(data, 2) + nn.Parameter(torch.zeros(4, 6, device=device())).abs()
        assert len(following.findings) == kinds + 2 and not following.findings[-1].certain
        torch.vstack((partial, partial.new_ones(2, 6)))
        assert len(following.findings) == kinds + 3 and "once for each rank" in str(following)

    blind = get_platform()
    vars(blind)["follow"] = lambda follower: None
    try:
        with pytest.raises(TypeError, match="cannot follow plain code"), check_plain_code(nn.Module()):
            pass
    finally:
        del vars(blind)["follow"]


def test_corners(pool: Any) -> None:
    pool.run(4, corners)


@on_mesh(2, 2, names=("dp", "tp"))
def under_fully_shard(mesh: Any) -> None:
    for plan in (LLAMA, SEQUENCE):
        model = parallelize_module(made(Llama), mesh["tp"], plan)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        checked = followed(model)
        assert not checked.findings and checked.asked
        wrong = parallelize_module(made(Llama), mesh["tp"], plan)
        for block in wrong.layers:
            block.w1.register_forward_hook(lambda module, args, y: y.softmax(-1))
        fully_shard(wrong, mesh=mesh["dp"])
        with check_plain_code(wrong) as checked:
            wrong(ids())
        assert {f.kind for f in checked.findings} == {"whole"}, checked
        assert [f.module for f in checked.findings] == ["layers.0.w1", "layers.1.w1"]
        assert "(and in 1 more modules)" in str(checked)
    # Sequences cut over the other dimension: what attention gives is this rank's heads still.
    model = parallelize_module(made(Llama), mesh["tp"], LLAMA)
    parallelize_module(model, mesh["dp"], {"layers.*.attention": ContextParallel()})
    checked = followed(model)
    assert not checked.findings and checked.asked, checked


def test_under_fully_shard(pool: Any) -> None:
    pool.run(4, under_fully_shard)


@contextmanager
def by_default() -> Iterator[None]:
    """Inside, models are parallelised whose first calls are followed, as they are where no variable is set."""
    before = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[VARIABLE] = before


def hooks(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


@on_mesh(names=("tp",))
def first_calls(mesh: Any) -> None:
    def spread(model: nn.Module, plan: dict[str, Any]) -> Any:
        with by_default():
            return parallelize_module(model, mesh, plan)

    def usually(model: nn.Module, plan: dict[str, Any]) -> Any:
        with without_first_calls():
            return parallelize_module(model, mesh, plan)

    # The usual numbers; the model keeps its class, and has no hooks after the first step.
    for make, plan in ((GPT, gpt_plan(3)), (Llama, LLAMA), (Llama, SEQUENCE)):
        model, usual = spread(made(make), plan), usually(made(make), plan)
        before = hooks(usual)
        assert type(model) is make and hooks(model) == before + 2
        torch.testing.assert_close(step(model), step(usual))
        assert hooks(model) == before
    with pytest.raises(ValueError, match=r"split gets a part of shape \(2, 8, 24\)"):
        step(spread(made(GPT), gpt_plan(1)))

    # A call without gradients is followed once, and the first one with gradients.
    model = spread(made(GPT), gpt_plan(3))
    asked: list[int] = []
    model.down.register_forward_hook(lambda *given: asked.append(len(FOLLOWING)))
    with torch.no_grad():
        model(ids()), model(ids())
    model(ids()), model(ids())
    assert asked == [1, 0, 1, 0] and not hooks(model)
    frozen = spread(made(GPT).requires_grad_(False), gpt_plan(3))
    frozen(ids())
    assert not hooks(frozen)

    # Blocks with plans of their own are followed with the model around them.
    model = made(Llama)
    for layer in model.layers:
        spread(layer, {path.removeprefix("layers.*."): style for path, style in LLAMA.items() if "layers" in path})
    spread(model, {"head": LLAMA["head"]})
    assert [hooks(layer) for layer in model.layers] == [2, 2]
    model(ids())
    assert [hooks(module) for module in (model, *model.layers)] == [0, 0, 0]

    # Copies and pickles have no hooks that do anything.
    model = spread(made(GPT), gpt_plan(3))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(step(other), step(usual_gpt := usually(made(GPT), gpt_plan(3))))
        assert type(other) is type(usual_gpt)
    assert hooks(model) == 2

    # An error of the judge ends no first call, and is one where a program was to be followed.
    def failing(*given: Any) -> None:
        raise KeyError("of the judge")

    names = vars(following)
    usual_judge, names["judge"] = names["judge"], failing
    try:
        following._VERDICTS.clear()  # ranks outside of this job keep their other caches, which ranks must share
        torch.testing.assert_close(step(spread(made(GPT), gpt_plan(3))), step(usually(made(GPT), gpt_plan(3))))
        with pytest.raises(KeyError, match="of the judge"), check_plain_code(model):
            model(ids())
    finally:
        names["judge"] = usual_judge

    if device().type != "cpu":
        return  # a thread of its own would have to choose its device, and share streams of collectives

    # A program in another thread is none of the one that is followed.
    other, found = usually(made(GPT), gpt_plan(3)), []

    def beside(*given: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(other(ids())))
        thread.start()
        thread.join()

    model.norms[0].register_forward_hook(beside)
    with check_plain_code(model) as checked:
        model(ids())
    assert len(found) == 1 and not checked.findings and checked.asked
    torch.testing.assert_close(found[0], other(ids()))


def test_first_calls(pool: Any) -> None:
    pool.run(2, first_calls)


@on_mesh(names=("tp",))
def own_collectives(mesh: Any) -> None:
    def entropy(y: Any) -> Any:
        """A softmax over features of which each rank has a part, written by hand."""
        top = y.detach().amax(-1, keepdim=True)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        e = (y - top).exp()
        return e / functional.all_reduce(e.sum(-1, keepdim=True), group=group)

    group = mesh.get_group()
    for function in (entropy, lambda y: y + functional.all_reduce(y.sum(-1, keepdim=True), group=group).relu()):
        with by_default():
            model = parallelize_module(made(GPT), mesh, gpt_plan(3))
        model.up.register_forward_hook(lambda module, args, y, function=function: function(y))
        model(ids())
        with check_plain_code(model) as checked:
            model(ids())
        assert not checked.findings and any("all_reduce" in name for name in checked.unknown), checked
    partial = torch.ones(2, 4, device=device())
    with follow(nn.Module(), get_platform()) as following:
        # Each rank gets other values by this one: they are not the same on all ranks.
        sent = DTensor.from_local(partial, mesh, [Partial()]).to_local()
        got = collectives.all_to_all_single(sent, None, None, group)
        assert isinstance(ways(got), Lost) and isinstance(ways(got + 1), Lost)
        partial + got + DTensor.from_local(partial, mesh, [Partial()]).to_local()
        assert not following.findings, following


def test_own_collectives(pool: Any) -> None:
    pool.run(2, own_collectives)


@on_mesh(names=("tp",))
def beside_a_compiler(mesh: Any) -> None:
    with without_first_calls():
        usual = parallelize_module(made(GPT), mesh, gpt_plan(3))
    for whole in (True, False):
        with by_default():
            model = parallelize_module(made(GPT), mesh, gpt_plan(3))
        if whole:  # which compilers see no hook of
            compiled = torch.compile(model, backend="eager", fullgraph=True)
        else:  # a part, which runs as it is written while it is followed
            model.attention.compile(backend="eager", fullgraph=True)
            compiled = model
        torch.testing.assert_close(compiled(ids()), usual(ids()))
        assert hooks(model) == 2 * whole
        torch.testing.assert_close(step(model), step(usual))
        assert not hooks(model)
        torch.testing.assert_close(compiled(ids()), usual(ids()))


@pytest.mark.nightly
def test_beside_a_compiler(pool: Any) -> None:
    pool.run(2, beside_a_compiler)


@on_mesh(names=("tp",))
def zoo(mesh: Any) -> list[str]:
    from hyper_parallel.integrations.huggingface import parallelize_model
    from tests.torch.huggingface_models import CASES, FURTHER, batch, build

    alarms, asked = [], 0
    for case in (*CASES, *FURTHER):
        model = build(case)
        try:
            parallelize_model(model, mesh)
        except ValueError as error:
            assert "heads" in str(error), error
            continue
        with check_plain_code(model) as checked:
            model(**batch(model.config.vocab_size))
        asked += checked.asked
        alarms += [f"{case}: {line}" for line in checked.lines()]
    assert asked > 1000
    return alarms


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("ranks", [2, 4])
def test_models_of_transformers(pool: Any, ranks: int) -> None:
    for alarms in pool.run(ranks, zoo):
        assert not alarms
