"""`flex_attention` of DTensors: values, gradients and collectives, with functions and masks that read numbers of heads.

On CPUs torch has gradients and largest scores only when its checks are off. That holds for the reference here too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
    strict,
)
from hyper_parallel.experimental import local_map
from hyper_parallel.platform.torch.compiled import flex as patched
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh
from tests.support.patched_programs import fresh
from tests.torch import compiled
from tests.torch.support import close, device, randn

LENGTH, FEATURES = 12, 4


@contextmanager
def differentiable() -> Iterator[None]:
    """Remove torch's checks, which refuse gradients and largest scores on CPUs although the operator has them."""
    options = flex._apply_kernel_options

    def apply(q: Any, k: Any, v: Any, lse: bool, given: Any, aux: Any = None) -> Any:
        asked = options(q, k, v, lse, given, None if aux is None else AuxRequest(lse=aux.lse))
        return {**asked, "OUTPUT_MAX": aux is not None and aux.max_scores}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_apply_kernel_options", apply)
        patch.setattr(flex, "_validate_device", lambda *_: None)
        yield


def by_numbers(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    return score * (1.0 + 0.3 * b) + 0.7 * h * (q - kv).abs()


def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """A mask that differs for each sample and head; each query sees itself."""
    return (q == kv) | ((q + b + 2 * h) % 3 < kv % 3 + 1)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def mask_of(batch: int | None, heads: int | None, function: Any = seen) -> Any:
    return create_block_mask(function, batch, heads, LENGTH, LENGTH, device=str(device()), BLOCK_SIZE=4)


def operands(batch: int = 2, heads: int = 4, kv_heads: int | None = None) -> list[torch.Tensor]:
    counts = (heads, *(kv_heads or heads,) * 2)
    return [randn(batch, n, LENGTH, FEATURES, seed=i) for i, n in enumerate(counts)]


def compare(
    mesh: Any, placements: Any, given: list[torch.Tensor], what: str, read: list[Any] = [],  # noqa: B006
    call: Callable[..., Any] = flex_attention, **options: Any,
) -> Any:  # fmt: skip
    """The result and all gradients of a call; ``score_mod`` may be made of the tensors in ``read``."""
    each = placements if isinstance(placements[0], list) else [placements] * 3
    make = options.pop("make", None)

    def run(xs: list[Any], tables: list[Any], function: Any) -> tuple[Any, list[Any]]:
        leaves = [x.detach().requires_grad_() for x in (*xs, *tables)]
        score_mod = options.get("score_mod") if make is None else make(*leaves[3:])
        y = function(*leaves[:3], **{**options, "score_mod": score_mod})
        first = y[0] if isinstance(y, tuple) else y
        weights = torch.linspace(-1.0, 2.0, first.numel(), device=device()).reshape(tuple(first.shape))
        loss = first * (distribute_tensor(weights, mesh) if isinstance(first, DTensor) else weights)
        loss = loss.sum()
        if isinstance(y, tuple):
            loss = loss + sum(s.square().sum() for s in flat(y[1]) if s.requires_grad)
        loss.backward()
        return y, [x.grad for x in leaves]

    with differentiable():
        wanted, gradients = run(given, read, flex_attention)
        distributed = [summand(x, mesh, p) for x, p in zip(given, each, strict=True)]
        tables = [distribute_tensor(x, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1)) for x in read]
        with strict():
            got, found = run(distributed, tables, call)
    for mine, theirs in zip(flat(got), flat(wanted), strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, what
        close(mine, theirs, what)
    for mine, theirs in zip(found, gradients, strict=True):
        close(mine, theirs, f"gradient of {what}")
    return got


def flat(y: Any) -> list[Any]:
    if not isinstance(y, tuple):
        return [] if y is None else [y]
    return [x for one in y for x in flat(one)]


def summand(x: torch.Tensor, mesh: Any, placements: list[Any]) -> Any:
    return distribute_tensor(x, mesh, placements)


HEADS, BATCH = [Shard(1)], [Shard(0)]


@on_mesh()
def right(mesh: Any) -> None:
    n, many = mesh.size(), everything()
    for placements in (HEADS, BATCH, [Replicate()]):
        what, by_heads = f"{placements} on {n} ranks", placements == HEADS
        if many or placements == [Replicate()]:
            got = compare(mesh, placements, operands(), f"plain call, {what}")
            assert list(got.placements) == placements
        if many or by_heads:
            compare(mesh, placements, operands(), f"numbers, {what}", score_mod=by_numbers, scale=0.3)
        if placements == [Replicate()]:
            continue
        masks = ((2, 4), (None, None), (None, 4), (2, None))
        for batch, heads in masks[: (4 if by_heads else 2) if many else 1]:
            mask = mask_of(batch, heads)
            compare(mesh, placements, operands(), f"mask, {what}", block_mask=mask, score_mod=by_numbers)
        if not by_heads and not many:
            continue
        if many:
            compare(mesh, placements, operands(), f"sums, {what}", score_mod=by_numbers, return_lse=True)
        statistics = AuxRequest(lse=True, max_scores=True), AuxRequest(lse=True), AuxRequest(max_scores=True)
        for asked in statistics[: 3 if by_heads and many else 1]:
            compare(mesh, placements, operands(), f"{asked}, {what}", block_mask=mask_of(2, 4), return_aux=asked)
        grouped = {"enable_gqa": True, "score_mod": by_numbers, "block_mask": mask_of(2, 8)}
        for kv_heads in ((4, 1) if many else (4,)) if by_heads else (2,):
            compare(mesh, placements, operands(2, 8, kv_heads), f"{kv_heads} groups, {what}", **grouped)


@on_mesh()
def uneven(mesh: Any) -> None:
    """Fewer heads or samples than ranks, or no multiple of them; rank 1 of 2 has none of 1."""
    for count in (3, 1):
        for placements, sizes in ((HEADS, (2, count)), (BATCH, (count, 2))):
            if placements == BATCH and not everything():
                continue
            what = f"{sizes} placed {placements}"
            given = operands(*sizes)
            asked = AuxRequest(lse=True, max_scores=True)
            more = {"score_mod": by_numbers, "block_mask": mask_of(*sizes), "return_aux": asked}
            got, statistics = compare(mesh, placements, given, what, **more)
            assert list(got.placements) == list(statistics.lse.placements) == placements
            rows = got.to_local().shape[placements[0].dim]
            assert rows == distribute_tensor(torch.zeros(count), mesh, [Shard(0)]).to_local().shape[0]
    calls = []
    original = patched.Flex.original
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched.Flex, "original", watched(original, calls))
        x = [distribute_tensor(x, mesh, HEADS) for x in operands(2, 1)]
        flex_attention(*x)
    assert len(calls) == (mesh.get_local_rank() == 0)
    # Groups that cannot be cut as the heads are.
    compare(mesh, HEADS, operands(2, 6, 3), "3 groups", enable_gqa=True, score_mod=by_numbers)


def watched(original: Any, calls: list[Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    # `functools.wraps` has no globals of its own: the handler asks for torch's.
    class Call:
        __globals__ = original.__globals__

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs)

    return Call()


@on_mesh()
def gathered(mesh: Any) -> None:
    """Sequences and features are whole, sums are computed; packed heads keep their numbers."""
    more = {"score_mod": by_numbers, "block_mask": mask_of(2, 4)}
    if everything():
        for placements in ([Shard(2)], [Shard(3)], [Partial()]):
            compare(mesh, placements, operands(), f"{placements}", **more)
        compare(mesh, [[Shard(0)], [Shard(1)], [Shard(1)]], operands(), "samples and heads", **more)
    compare(mesh, [[Shard(1)], [Partial()], [Shard(2)]], operands(), "mixed", **more)
    compare(mesh, [PackedShard(1, 2)], operands(2, 8), "packed", score_mod=by_numbers, block_mask=mask_of(2, 8))
    # A mask that torch reads for the remainder of the head: all heads are computed, with whatever torch makes of it.
    compare(mesh, HEADS, operands(), "a mask of 2 heads", block_mask=mask_of(2, 2))


@on_mesh()
def numbers_of_collectives(mesh: Any) -> None:
    def count(placements: list[Any], given: list[torch.Tensor], make: Any = None, **options: Any) -> dict[str, int]:
        leaves = [distribute_tensor(x, mesh, placements).requires_grad_() for x in given]
        if make is not None:
            options["score_mod"] = make(distribute_tensor(randn(4, seed=5), mesh).requires_grad_())
        with differentiable(), CommDebugMode() as comm, strict():
            y = flex_attention(*leaves, **options)
            y.backward(torch.ones_like(y))
        return {str(kind).rsplit(".", 1)[-1]: n for kind, n in comm.get_comm_counts().items() if n}

    mask = mask_of(2, 4)
    for placements in (HEADS, BATCH, [Replicate()]):
        assert count(placements, operands(), block_mask=mask, score_mod=by_numbers) == {}
    assert count(HEADS, operands(2, 3)) == count(HEADS, operands(2, 1)) == {}
    assert count(HEADS, operands(2, 8, 4), enable_gqa=True) == {}
    # The table is whole, and its gradient a sum over ranks.
    assert count(HEADS, operands(), table) == {"all_reduce": 1}
    assert count([Shard(2)], operands()).get("all_gather", 0) + count([Shard(2)], operands()).get("all_to_all", 0) == 3


def table(x: Any) -> Any:
    def score_mod(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + x[h]

    return score_mod


class Table(nn.Module):
    def __init__(self, x: Any, unused: Any) -> None:
        super().__init__()
        self.rows, self.unused = x, unused

    def forward(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + self.rows[h]

    def method(self, score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score * self.rows[h]

    def inside(self) -> Any:
        return lambda score, b, h, q, kv: score - self.rows[h]


@on_mesh()
def read_by_functions(mesh: Any) -> None:
    """DTensors in closures, defaults, partial functions, lists and modules; and masks that read tensors."""
    rows, more = randn(4, seed=5), [randn(LENGTH, LENGTH, seed=6)]
    whole = torch.zeros(4, device=device())

    def held(x: Any) -> Any:
        module = Table(None, whole)
        module.__dict__["rows"] = x  # the tensor itself, so that its gradient is seen
        return module

    makes: dict[str, Any] = {
        "closure": table,
        "default": lambda x: lambda score, b, h, q, kv, x=x: score + x[h],
        "partial": lambda x: functools.partial(lambda x, score, b, h, q, kv: score + x[h], x),
        "list": lambda x: (lambda xs: lambda score, b, h, q, kv: score + xs[0]["x"][h])([{"x": x}]),
        "function": lambda x: (lambda f: lambda score, b, h, q, kv: f(2 * score, b, h, q, kv))(table(x)),
        "module": held,
        "method": lambda x: held(x).method,
        "inside a module of the plan": lambda x: held(x).inside(),
    }
    for name in makes if everything() else ("list", "method", "inside a module of the plan"):
        make = makes[name]
        for placements in (HEADS, BATCH) if name in ("method", "closure") and everything() else (HEADS,):
            compare(mesh, placements, operands(), f"{name} {placements}", [rows], make=make)
    if everything():
        compare(mesh, HEADS, operands(1, 1), "one head", [rows[:1].clone()], make=table)
    two = lambda x, y: lambda score, b, h, q, kv: score * x[h] + y[q, kv]  # noqa: E731
    compare(mesh, HEADS, operands(2, 3), "two", [rows, *more], make=two)
    # A plain tensor that no gradient flows to, in a mask: the same on all ranks.
    allowed = torch.tensor([[3, 6, 12, 1], [12, 2, 4, 12]], device=device())
    mask = mask_of(2, 4, and_masks(seen, lambda b, h, q, kv: (kv <= allowed[b, h]) | (q == kv)))
    for placements in (HEADS, BATCH):
        compare(mesh, placements, operands(), "plain table", block_mask=mask)
    placed = distribute_tensor(allowed, mesh, HEADS)

    def read(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= placed[b, h]) | (q == kv)

    mask_of_table = mask_of(2, 4, lambda b, h, q, kv: (kv <= allowed[b, h]) | (q == kv))
    wanted = flex_attention(*operands(), block_mask=mask_of_table)
    mask_of_table.mask_mod = read
    got = flex_attention(*[distribute_tensor(x, mesh, HEADS) for x in operands()], block_mask=mask_of_table)
    close(got, wanted, "a mask that reads a DTensor")


GLOBAL: list[Any] = []
NAMED: Any = None


@on_mesh()
def refused(mesh: Any) -> None:
    global NAMED
    q, k, v = (distribute_tensor(x, mesh, HEADS) for x in operands(2, 1))
    own = torch.ones(4, device=device(), requires_grad=True)
    NAMED = distribute_tensor(torch.ones(4, device=device()), mesh)
    few = [distribute_tensor(x, mesh, HEADS) for x in operands(2, 4, 2)]
    short = distribute_tensor(randn(1, 1, LENGTH, FEATURES), mesh, HEADS)
    mask = mask_of(None, None)
    counts = torch.ones(1, 1, 1, 2, dtype=torch.int32, device=device())
    deep = BlockMask.from_kv_blocks(counts, torch.zeros(1, 1, 1, 2, 2, dtype=torch.int32, device=device()))
    of_dtensors = copy.copy(mask)
    of_dtensors.kv_indices = distribute_tensor(mask.kv_indices, mesh)
    cases: list[tuple[Any, str]] = [
        (lambda: flex_attention(q[0], k[0], v[0]), "batch, heads, length, features"),
        (lambda: flex_attention(q, k, v[:, :, 1:]), "do not fit"),
        (lambda: flex_attention(*few), "enable_gqa"),
        (lambda: flex_attention(*operands(2, 4, 3)), "same number of heads"),
        (lambda: flex_attention(q, short, short), "2 samples"),
        (lambda: flex_attention(q, k, v, score_mod=table(own)), "requires gradients"),
        (lambda: flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + NAMED[h]), "global variable 'NAMED'"),
        (lambda: flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True)), "not both"),
        (lambda: flex_attention(q, k, v, block_mask=mask[:, :, :1]), "sliced BlockMask"),
        (lambda: flex_attention(q[:, :, 1:], k, v, block_mask=mask), "block mask is for"),
        (lambda: flex_attention(q, k, v, block_mask=deep), "batch or 1, heads or 1, blocks"),
        (lambda: flex_attention(q, k, v, block_mask=of_dtensors), "consists of DTensors"),
        (lambda: flex_attention(q, operands(2, 1)[1], v), "plain"),
    ]
    for number, (call, words) in enumerate(cases):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words), CommDebugMode() as comm:
            call()
        assert not comm.get_total_counts(), number
    if device().type == "cpu":
        with pytest.raises(NotImplementedError, match="backward on CPU"):
            flex_attention(q.requires_grad_(), k, v)


def on_a_grid() -> None:
    mesh = spmd.device_mesh(2, 2)
    more = {"score_mod": by_numbers, "block_mask": mask_of(3, 4)}
    for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(1)],
                       [Partial(), Shard(1)], [Shard(2), Shard(1)]):  # fmt: skip
        compare(mesh, placements, operands(3, 4), f"{placements}", **more)
    rows = [randn(4, seed=5)]
    compare(mesh, [Shard(0), Shard(1)], operands(3, 4), "table", rows, make=table, block_mask=mask_of(3, 4))
    compare(mesh, [Shard(0), Shard(1)], operands(1, 3), "empty", rows, make=table, block_mask=mask_of(1, 3))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 16)
        self.to(device())
        self.mask = mask_of(2, 4)

    def forward(self, x: Any) -> Any:
        batch, length = x.shape[:2]
        q, k, v = (layer(x) for layer in (self.q, self.k, self.v))
        q, k, v = (y.reshape(batch, length, -1, FEATURES).transpose(1, 2) for y in (q, k, v))
        y = flex_attention(q, k, v, score_mod=by_numbers, block_mask=self.mask, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


def parallel(mesh: Any, model: nn.Module | None = None) -> nn.Module:
    columns = dict.fromkeys("qkv", ColwiseParallel(use_local_output=False))
    return parallelize_module(model or Attention(), mesh, {**columns, "o": RowwiseParallel()})


@on_mesh()
def in_a_model(mesh: Any) -> None:
    x = randn(2, LENGTH, 16)
    with differentiable():
        models = Attention(), parallel(mesh)
        inputs = [x.clone().requires_grad_() for _ in models]
        wanted, got = (model(y) for model, y in zip(models, inputs, strict=True))
        close(got, wanted, "output")
        wanted.square().sum().backward()
        with CommDebugMode() as comm:
            models[1](inputs[1])
        assert comm.get_total_counts() == 1  # of the row-parallel layer
        got.square().sum().backward()
    close(inputs[1].grad, inputs[0].grad, "gradient of the input")
    for (name, p), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        close(other.grad, p.grad, f"gradient of {name}")


@on_mesh()
def in_compiled_code(mesh: Any) -> None:
    """Heads on DTensors, between styled modules or given to the compiled function itself."""
    compiled.fresh(mesh)
    given = [distribute_tensor(x, mesh, HEADS) for x in operands()]
    mask = mask_of(2, 4)
    wanted = flex_attention(*operands(), score_mod=by_numbers, block_mask=mask)
    for fullgraph in (True, False) if everything() else (True,):
        graphs = compiled.Graphs()
        call = torch.compile(flex_attention, backend=graphs.backend, fullgraph=fullgraph)
        got = call(*given, score_mod=by_numbers, block_mask=mask)
        close(got, wanted, "compiled function")
        assert list(got.placements) == HEADS and graphs.graphs == 1 and not graphs.counts
    placed = [distribute_tensor(x, mesh, [Shard(2)]) for x in operands()]
    got = torch.compile(flex_attention, backend="eager")(*placed, score_mod=by_numbers, block_mask=mask)
    close(got, wanted, "sequences, which compiled code does not gather")
    x = randn(2, LENGTH, 16)
    with torch.no_grad():
        wanted, model = Attention()(x), parallel(mesh)
        close(torch.compile(model, backend="eager")(x), wanted, "compiled model")


@on_mesh()
def plain_tensors(mesh: Any) -> None:
    """Plain tensors run the original code, in eager mode and compiled."""
    distribute_tensor(torch.ones(2, device=device()), mesh)
    given, mask = operands(), mask_of(2, 4)
    wanted = patched.Flex.original(*given, score_mod=by_numbers, block_mask=mask, return_aux=None)
    close(flex_attention(*given, score_mod=by_numbers, block_mask=mask), wanted, "eager", 0.0)
    call = torch.compile(flex_attention, backend="eager", fullgraph=True)
    close(call(*given, score_mod=by_numbers, block_mask=mask), wanted, "compiled", 0.0)
    with pytest.raises(ValueError, match="same number of heads"):
        flex_attention(*operands(2, 4, 2))
    mapped = local_map(flex_attention, out_placements=HEADS, in_placements=(HEADS,) * 3)
    close(mapped(*[distribute_tensor(x, mesh, HEADS) for x in given]), flex_attention(*given), "local_map")


def test_right(pool: Any) -> None:
    pool.run(2, right)


@pytest.mark.parametrize(
    "job",
    [uneven, gathered, read_by_functions, refused, in_a_model, in_compiled_code, plain_tensors],
    ids=lambda job: job.__name__,
)
def test_on_two_ranks(pool: Any, job: Any) -> None:
    pool.run(2, job)


def test_collectives(pool: Any) -> None:
    pool.run(2, numbers_of_collectives)


@pytest.mark.nightly
def test_on_a_grid(pool: Any) -> None:
    pool.run(4, on_a_grid)


@pytest.mark.nightly
@pytest.mark.parametrize("first", ["torch.nn.attention.flex_attention", "hyper_parallel"])
def test_import_order(first: str) -> None:
    """The function that a program holds is served, whenever it was imported."""
    fresh(f"""
import {first}
import torch, inspect
if {first!r} == "hyper_parallel":
    import hyper_parallel as hp
    x = hp.distribute_tensor(torch.ones(2), hp.init_device_mesh("cpu", (1,)), None)
from torch.nn.attention.flex_attention import flex_attention
import hyper_parallel as hp
mesh = hp.init_device_mesh("cpu", (1,))
signature = inspect.signature(flex_attention)
given = [torch.randn(1, 2, 4, 4) for _ in range(3)]
wanted = flex_attention(*given)
placed = [hp.distribute_tensor(x, mesh, [hp.Shard(1)]) for x in given]
got = flex_attention(*placed)
assert type(got) is type(placed[0]) and torch.equal(got.full_tensor(), wanted)
assert torch.equal(flex_attention(*given), wanted) and inspect.signature(flex_attention) == signature
print("passed")
hp.get_platform().destroy_process_group()
""")
