"""`check_plain_code` on programs with plain code between styled modules: wrong lines are found, and right lines raise
no alarm."""

from __future__ import annotations

import copy
import inspect
import math
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    HeadNormParallel,
    NoParallel,
    PackedShard,
    Partial,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check_plain_code,
    explain,
    get_platform,
    parallelize_module,
    strict,
)
from hyper_parallel.core.communication.recorder import LISTENERS
from hyper_parallel.core.dtensor.undistributed import planned_meshes
from hyper_parallel.core.plain_code.contexts import follow
from hyper_parallel.core.plain_code.first_call import VARIABLE
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.core.plain_code.marks import held
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import block_plan, compare, floats
from hyper_parallel.testing.conformance.checks import needs_gradients
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.plan_check import PlanCheck, compare_on_ranks, verdict_of

C, W = ColwiseParallel, RowwiseParallel
MLP = {"up": C(), "down": W()}


def program(run: Callable[..., Any], modules: dict[str, Any]) -> Any:
    """Return a module whose forward is ``run(module, x, adapter)``, with submodules from functions of an adapter."""
    adapter = get_adapter()

    def forward(self: Any, x: Any) -> Any:
        return run(self, x, adapter)

    model = adapter.Probe()
    # The class of the framework, with the name of its forward in either framework.
    model.__class__ = type("Program", (type(model),), {"forward": forward, "construct": forward})
    for name, make in modules.items():
        setattr(model, name, make(adapter))
    return adapter.load(model, np.random.default_rng(1))


def linear(n_in: int, n_out: int) -> Callable[[Any], Any]:
    return lambda adapter: adapter.linear_module(n_in, n_out)


UP_DOWN = {"up": linear(8, 24), "down": linear(24, 8)}


@dataclass
class Case:
    """A program and the expected finding.

    Attributes:
        run: ``run(module, x, adapter)``. The wrong line ends in ``# found``, unless it is the only line.
        kind: kind of the finding; None for a right program.
        words: words in the text and the remedy of the finding.
        plan, modules: plan and modules of the model.
        shape: shape of the input.
    """

    run: Callable[..., Any]
    kind: str | None = None
    words: tuple[str, ...] = ()
    plan: dict[str, Any] = field(default_factory=lambda: MLP)
    modules: dict[str, Any] = field(default_factory=lambda: UP_DOWN)
    shape: tuple[int, ...] = (2, 4, 8)

    @property
    def line(self) -> int:
        """Return the line of this file that the check must find."""
        lines, first = inspect.getsourcelines(self.run)
        marked = [i for i, text in enumerate(lines) if "# found" in text]
        return first + marked[0] if marked else first


def heads(x: Any, size: int) -> tuple[int, ...]:
    return (*x.shape[:2], -1, size)


def fused(module: Any, x: Any, a: Any) -> Any:
    """Attention without softmax, with query, key and value in one weight, separated by chunk."""
    q, k, v = a.chunk(module.up(x), 3, -1)  # found
    return module.down(a.silu(q) * k * v)


def sliced(module: Any, x: Any, a: Any) -> Any:
    """Attention as in `fused`, separated by slices with local sizes."""
    y = module.up(x)
    n = y.shape[-1] // 3
    q, k, v = y[..., :n], y[..., n : 2 * n], y[..., 2 * n :]
    return module.down(a.silu(q) * k * v)


def in_heads(module: Any, x: Any, a: Any) -> Any:
    """A norm inside attention heads."""
    q = module.norm(a.reshape(module.up(x), heads(x, 6)))
    return module.down(a.reshape(q, (*x.shape[:2], -1)))


def one_token(module: Any, x: Any, a: Any) -> Any:
    """Keys appended to the keys of a cache, for one head and one token: either dimension could be the sharded one."""
    past, last = (module.norm(a.transpose(a.reshape(module.up(y), heads(y, 6)), 1, 2)) for y in (x, x[:, :1]))
    k = a.transpose(a.cat((past, last), 2), 1, 2)
    return module.down(a.reshape(k, (x.shape[0], x.shape[1] + 1, -1)))


def normed(module: Any, x: Any, a: Any) -> Any:
    """A norm inside heads, written out in elementary operations."""
    y = a.reshape(module.up(x), heads(x, 6))
    y = y * module.norm.weight  # found
    return module.down(a.reshape(y, (*x.shape[:2], -1)))


def latent(module: Any, x: Any, a: Any) -> Any:
    """Attention with latent keys and values, and a part of the keys that all heads share."""
    q = a.reshape(module.up(x), heads(x, 6))
    given = module.shared(x)
    shared = a.reshape(given[..., 2:], (*x.shape[:2], 1, 4))
    y = q[..., :4] * shared  # found
    return module.down(a.reshape(a.cat((y, q[..., 4:]), -1), (*x.shape[:2], -1)))


def gated(module: Any, x: Any, a: Any) -> Any:
    """A gate that is equal on all ranks, multiplied by shards."""
    gate = a.sigmoid(a.sum(module.gate(x), -1, True))
    return module.down(module.up(x) * gate)  # found


def chosen(module: Any, x: Any, a: Any) -> Any:
    """The tokens with the highest scores of a gate. Scores have partial gradients, and indices have none."""
    rows, scores = a.reshape(x, (-1, 8)), a.reshape(a.sigmoid(a.sum(module.gate(x), -1, True)), (-1,))
    places = a.topk(scores, 4)[1]
    y = module.norm(rows)[places]
    return module.down(module.up(y) * a.reshape(scores[places], (-1, 1)))


def attention(module: Any, x: Any, a: Any) -> Any:
    """Attention with heads that are separated by a view, transposed and merged again."""
    q, k, v = (a.transpose(a.reshape(p(x), heads(x, 6)), 1, 2) for p in (module.wq, module.wk, module.wv))
    weights = a.softmax(a.matmul(q, a.transpose(k, -2, -1)) * 6**-0.5, -1)
    y = a.transpose(a.matmul(weights, v), 1, 2)
    return module.wo(a.reshape(y, (*x.shape[:2], -1)))


def merged(module: Any, x: Any, a: Any) -> Any:
    """Heads that are merged with the batch, and with the tokens, and separated again."""
    b, t = x.shape[:2]
    y = a.transpose(a.reshape(module.up(x), (b, t, -1, 6)), 1, 2)
    h = y.shape[1]
    y = a.softmax(a.reshape(y, (b * h, t, 6)), -1)
    y = a.softmax(a.reshape(y, (b * h * t, 6)), -1)
    y = a.reshape(a.reshape(y, (b, h, t, 6)), (-1, 6))
    y = a.transpose(a.reshape(y, (b, h, t, 6)), 1, 2)
    return module.down(a.reshape(y, (b, t, -1)))


def scored(module: Any, x: Any, a: Any) -> Any:
    """Attention whose scores are products of heads merged with the batch."""
    b, t = x.shape[:2]
    q, k, v = (a.transpose(a.reshape(p(x), heads(x, 6)), 1, 2) for p in (module.wq, module.wk, module.wv))
    h = q.shape[1]
    scores = a.matmul(a.reshape(q, (b * h, t, 6)), a.reshape(a.transpose(k, -2, -1), (b * h, 6, t)))
    y = a.matmul(a.softmax(a.reshape(scores, (b, h, t, t)) * 6**-0.5, -1), v)
    return module.wo(a.reshape(a.transpose(y, 1, 2), (b, t, -1)))


def positions(module: Any, x: Any, a: Any) -> Any:
    """A wrong program: positions start from 0 on every rank, and are added to a shard of the sequence."""
    y = module.norm(module.down(a.relu(module.up(x))))
    return y + module.table.weight[: y.shape[1]]  # found


def forgotten(module: Any, x: Any, a: Any) -> Any:
    """A wrong program: it selects the first token of a sharded sequence."""
    y = module.norm(module.down(a.relu(module.up(x))))
    return y[:, 0]  # found


def routed(module: Any, x: Any, a: Any) -> Any:
    """The tokens of a sequence shard, flattened to one dimension, through a layer that treats tokens separately."""
    y = module.norm(module.down(a.relu(module.up(x))))
    scores = a.call(module.router, a.reshape(y, (-1, 8)))
    return module.out(y + a.reshape(scores, tuple(y.shape)))


def gathered_rows(module: Any, x: Any, a: Any) -> Any:
    """The tokens of a sequence shard through a layer that gathers them rank by rank, which changes their order."""
    y = module.norm(module.down(a.relu(module.up(x))))
    rows = a.reshape(y, (-1, 8))
    return x + a.reshape(a.call(module.router, rows), tuple(x.shape))  # found


def shared_heads(module: Any, x: Any, a: Any) -> Any:
    """Query heads that share keys and values, without softmax. The number of heads is global or local."""
    q = a.reshape(module.wq(x), heads(x, 6))
    k, v = (a.reshape(p(x), heads(x, 6)) for p in (module.wk, module.wv))
    times = q.shape[2] // k.shape[2]
    k, v = (a.reshape(a.stack((y,) * times, 3), (*x.shape[:2], -1, 6)) for y in (k, v))
    return module.wo(a.reshape(q * k + v, (*x.shape[:2], -1)))


QKV = {name: linear(8, 24) for name in ("wq", "wk", "wv")} | {"wo": linear(24, 8)}
HEAD_NORM = UP_DOWN | {"norm": lambda a: a.RmsNorm(6)}
SHARED = UP_DOWN | {"shared": linear(8, 6)}
GATED = UP_DOWN | {"gate": linear(8, 8)}
SEQUENCE = UP_DOWN | {"norm": lambda a: a.norm_module(8), "table": linear(8, 4)}
BY_SEQUENCE = {"up": C(), "down": W(output_layouts=Shard(1)), "norm": SequenceParallel(use_local_output=True)}
ROUTED = UP_DOWN | {"norm": lambda a: a.norm_module(8), "router": lambda a: a.norm_module(8), "out": linear(8, 8)}
BY_TOKEN = BY_SEQUENCE | {
    "router": SequenceParallel(sequence_dim=0, use_local_output=True),
    "out": C(input_layouts=Shard(1), output_layouts=Replicate()),
}
PACKED = {"up": linear(8, 72), "down": linear(24, 8)}
WHOLE = {"gate": linear(8, 12), "down": linear(24, 8)}
NEXT = {"up": linear(8, 24), "next": linear(12, 8)}

WRONG = {
    "tokens in another order": Case(
        gathered_rows,
        "input",
        ("Shard(dim=0)",),
        BY_TOKEN | {"router": C(input_layouts=Shard(0), output_layouts=Replicate())},
        ROUTED | {"router": linear(8, 8)},
    ),
    "softmax": Case(lambda m, x, a: m.down(a.softmax(m.up(x), -1)), "whole", ("oftmax", "output_layouts=Replicate()")),
    "mean": Case(lambda m, x, a: m.down(m.up(x) * a.mean(m.up(x), -1, True)), "whole", ("(2, 4, 12) of (2, 4, 24)",)),
    "cumsum": Case(lambda m, x, a: m.down(a.cumsum(m.up(x), 2)), "whole", ("dimension 2",)),
    "index": Case(lambda m, x, a: m.up(x)[..., :3], "whole", ("packed=",)),
    "largest": Case(lambda m, x, a: a.topk(m.up(x), 2)[0], "whole", ("dimension 2",)),
    "norm": Case(
        lambda m, x, a: m.down(a.layer_norm(m.up(x), a.tensor(floats(12)), a.tensor(floats(12)))), "whole", ("Norm",)
    ),
    "fused projection, sliced": Case(
        lambda m, x, a: m.down(m.up(x)[..., 6:18]), "whole", ("packed=",), {"up": C(packed=3), "down": W()}, PACKED
    ),
    "fused projection": Case(fused, "whole", ("packed=", "heads="), {"up": C(packed=1), "down": W()}, PACKED),
    "norm inside heads": Case(normed, "gradient", ("HeadNormParallel()", "a parameter of shape (6,)"), MLP, HEAD_NORM),
    "latent": Case(latent, "gradient", ("partial_features=", "(2, 4, 1, 4)"), MLP | {"shared": NoParallel()}, SHARED),
    "gate": Case(gated, "gradient", ("grad_placements=[Partial()]",), MLP | {"gate": NoParallel()}, GATED),
    "summand and residual": Case(lambda m, x, a: x + a.sum(m.up(x), -1, True), "count", ("RowwiseParallel",)),
    "nonlinear function of summands": Case(lambda m, x, a: a.relu(a.sum(m.up(x), -1)), "sum", ("sum over ranks",)),
    "product of summands": Case(lambda m, x, a: a.square(a.sum(m.up(x), -1)), "sum", ("linear",)),
    "first token": Case(forgotten, "whole", ("(2, 2, 8) of (2, 4, 8)",), BY_SEQUENCE, SEQUENCE),
    "positions": Case(positions, "gradient", ("(2, 8)", "this rank's shard"), BY_SEQUENCE, SEQUENCE),
    "joined": Case(lambda m, x, a: m.down(a.cat((m.up(x), m.up(x)), -1)[..., :12]), "whole", ("dimension 2",)),
    "layer without a style": Case(
        lambda m, x, a: a.call(m.next, m.up(x)), "mixed", ("(8, 12)", "RowwiseParallel()"), {"up": C()}, NEXT
    ),
    "whole as a part": Case(
        lambda m, x, a: m.down(m.gate(x)), "input", ("input_layouts=",), {"down": W(), "gate": NoParallel()}, WHOLE
    ),
    "packed as consecutive": Case(
        lambda m, x, a: m.down(a.relu(m.up(x))), "input", ("PackedShard",), {"up": C(packed=2), "down": W()}
    ),
    "summand given": Case(lambda m, x, a: a.sum(m.up(x), -1), "output", ("PrepareModuleOutput", "'up'"), {"up": C()}),
    "part given": Case(lambda m, x, a: a.relu(m.up(x)), "output", ("PrepareModuleOutput", "'up'"), {"up": C()}),
    "size": Case(lambda m, x, a: m.down((y := m.up(x)) * y.shape[-1] ** -0.5), "size", ("0.288675", "12 of 24")),
    "times": Case(lambda m, x, a: m.down((y := m.up(x)) * (2 * y.shape[-1]) ** -0.5), "size", ("0.204124", "12 of 24")),
    "root": Case(lambda m, x, a: m.down((y := m.up(x)) * (1 / math.sqrt(y.shape[-1]))), "size", ("of a part, 12",)),
}
RIGHT = {
    "mlp": Case(lambda m, x, a: m.down(a.gelu(m.up(x)))),
    "over tokens": Case(lambda m, x, a: m.down(a.softmax(m.up(x), 1))),
    "packed": Case(fused, plan={"up": C(packed=3), "down": W()}, modules=PACKED),
    "packed, sliced": Case(sliced, plan={"up": C(packed=3), "down": W()}, modules=PACKED),
    "attention": Case(attention, plan={"w[qkv]": C(), "wo": W()}, modules=QKV),
    "merged": Case(merged),
    "scores of one head on each of several ranks": Case(scored, plan={"w[qkv]": C(), "wo": W()}, modules=QKV),
    "norm inside heads": Case(in_heads, plan=MLP | {"norm": HeadNormParallel()}, modules=HEAD_NORM),
    "one head of one token": Case(
        one_token,
        plan=MLP | {"norm": HeadNormParallel()},
        modules=HEAD_NORM | {"up": linear(8, 12), "down": linear(12, 8)},
    ),
    "latent": Case(latent, plan=MLP | {"shared": NoParallel(partial_features=4)}, modules=SHARED),
    "one key head": Case(
        shared_heads,
        plan={"wq": C(), "w[kv]": C(heads=1, replicate_heads=True), "wo": W()},
        modules=QKV | {name: linear(8, 6) for name in ("wk", "wv")},
    ),
    "key heads on several ranks": Case(
        shared_heads,
        plan={"wq": C(), "w[kv]": C(heads=2, replicate_heads=True), "wo": W()},
        modules=QKV | {name: linear(8, 12) for name in ("wk", "wv")},
    ),
    "gate": Case(gated, plan=MLP | {"gate": NoParallel(local_output_grad_placements=Partial())}, modules=GATED),
    "tokens by scores": Case(
        chosen,
        plan=MLP | {"gate": NoParallel(local_output_grad_placements=Partial())},
        modules=GATED | {"norm": lambda a: a.norm_module(8)},
    ),
    "gathered": Case(
        lambda m, x, a: m.down(a.softmax(m.up(x), -1)),
        plan={"up": C(output_layouts=Replicate()), "down": W(input_layouts=Replicate())},
    ),
    "tokens of a part": Case(routed, plan=BY_TOKEN, modules=ROUTED),
    "given by a style": Case(lambda m, x, a: m.up(x), plan={"up": C()}),
    "sizes": Case(lambda m, x, a: m.down((y := m.up(x)) * (y.shape[-1] % 4 + y.shape[1]) ** -0.5)),
    "given by a style, negative": Case(lambda m, x, a: -m.up(x), plan={"up": C()}),
}


@spmd.on_mesh()
def followed(mesh: Any, table: str, name: str) -> Any:
    """Return the findings in a program as tuples, and the operations that could not be followed."""
    case = (WRONG if table == "wrong" else RIGHT)[name]
    adapter = get_adapter()
    model = program(case.run, case.modules)
    parallelize_module(model, mesh, case.plan)

    def loss(x: Any) -> Any:
        y = adapter.call(model, x)
        return adapter.sum(y), y

    with check_plain_code(model) as checked:  # gradients are recorded, or nothing is found of them
        y, _, _ = adapter.model_value_and_grads(model, loss, floats(*case.shape))
    assert not FOLLOWING and type(y) is get_platform().Tensor
    assert bool(checked) is not bool(checked.findings)
    assert len(str(checked).splitlines()) == 1 + len(checked.lines()) + len(checked.unknown)
    assert checked.reached == checked.findings and checked.as_dict()["right"] is bool(checked)
    return [(f.kind, f.where, f"{f.text}. {f.remedy}") for f in checked.findings], dict(checked.unknown)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_found(pool: Any, name: str) -> None:
    case = WRONG[name]
    found = pool.run(2, followed, "wrong", name)
    assert found[0] == found[1], "ranks come to different verdicts"
    findings, unknown = found[0]
    (kind, where, text), *more = findings
    assert not unknown and (not more or name == "positions"), findings  # whose sum is given on by no style
    assert kind == case.kind and all(word in text for word in case.words), text
    if kind != "output":  # of which the line is that of the call of the model
        assert where == f"{__file__}:{case.line}", where


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_raise_no_alarm(pool: Any, name: str) -> None:
    for findings, unknown in pool.run(4 if "several" in name else 2, followed, "right", name):
        assert not findings and not unknown


@spmd.on_mesh()
def the_same_numbers(mesh: Any, name: str) -> Any:
    """Compare a program with a single device while it is followed. Return its findings and collectives."""
    case = RIGHT[name]
    build, plan, x = lambda adapter: program(case.run, case.modules), case.plan, floats(*case.shape)
    usual = compare(build, plan, x, mesh)
    with follow(get_adapter().Probe(), get_platform()) as following:
        counts = compare(build, plan, x, mesh)
    assert counts == usual
    return [*map(str, following.findings)], following.asked


@pytest.mark.parametrize("name", in_gate([n for n in RIGHT if "given" not in n], ("attention", "latent", "gate")))
def test_numbers_do_not_change(pool: Any, name: str) -> None:
    for findings, asked in pool.run(4 if "several" in name else 2, the_same_numbers, name):
        assert not findings and bool(asked) is (name != "gathered")


@spmd.on_mesh()
def block_followed(mesh: Any, local_between: bool) -> Any:
    def counts() -> Any:
        plan, x = block_plan(local_between), floats(2, 8, 24)
        return compare(lambda a: a.Block(24, 36, 2), plan, x, mesh, takes=Shard(1), gives=Shard(1))

    usual = counts()
    with follow(get_adapter().Probe(), get_platform()) as following:
        assert counts() == usual
    return [*map(str, following.findings)], dict(following.unknown), following.asked


@pytest.mark.parametrize("local_between", [True, False])
def test_a_sequence_parallel_block(pool: Any, local_between: bool) -> None:
    for findings, unknown, asked in pool.run(2, block_followed, local_between):
        assert not findings and not unknown and asked


@spmd.on_mesh(names=("tp",))  # which all ranks of the pool make: `compare_on_ranks` finds it again
def planned(mesh: Any, name: str) -> Any:
    """Return the reports of `check_plan` and of `explain`."""
    case = (RIGHT | WRONG)[name]
    x = floats(*case.shape)
    platform, sent = get_platform(), pickle.dumps((Maker(name), case.plan, (x,), {}, None, True))
    found = compare_on_ranks((mesh.size(),), ("tp",), sent)
    loss, inputs = get_adapter().sum, get_adapter().tensor(x)
    explained = explain(Maker(name)(), mesh.size(), case.plan, inputs, loss=loss) if platform.rank() == 0 else None
    return found, None if explained is None else (explained.plain_code, str(explained))


@dataclass
class Maker:
    """A picklable function that makes the model of a case."""

    name: str

    def __call__(self) -> Any:
        case = (RIGHT | WRONG)[self.name]
        return program(case.run, case.modules)


def test_plans(pool: Any) -> None:
    needs_gradients()
    for name, kind in (("packed", ""), ("softmax", "oftmax gets a part"), ("gate", "partial_features=")):
        if get_platform().device_type != "cpu" or name not in (WRONG if kind else RIGHT):
            continue
        ranks = pool.run(2, planned, name)
        checked = verdict_of([found for found, _ in ranks], 1e-4)
        (plain_code, text) = ranks[0][1]
        assert bool(checked) is not bool(kind), checked
        for lines, whole in ((checked.plain_code, str(checked)), (plain_code, text)):
            assert len(lines) == bool(kind) and all(kind in line and line in whole for line in lines)
    # A plan that this sample does not show to be wrong.
    lucky = PlanCheck(2, {"output": 0.0, "loss": 0.0}, 1e-4, None, plain_code=["a line"])
    assert not lucky and str(lucky).startswith("wrong in plain code, though for this sample output, loss and 0 grad")


@spmd.on_mesh()
def odd_corners(mesh: Any) -> None:
    adapter, platform = get_adapter(), get_platform()
    with fails(TypeError, "check_plain_code takes a", "got int"), check_plain_code(3):
        pass

    # An input without a dimension is the module's own error.
    model = parallelize_module(program(RIGHT["mlp"].run, UP_DOWN), mesh, MLP)
    with check_plain_code(model), pytest.raises((RuntimeError, ValueError, TypeError)):
        adapter.call(model, adapter.tensor(np.float32(1.0)))

    # So is one that the placement of its style does not fit.
    cut = PackedShard(-1, (3, 5))
    packed = program(lambda m, x, a: m.down(x), {"down": linear(8, 8)})
    parallelize_module(packed, mesh, {"down": W(packed=(3, 5), input_layouts=cut)})
    with fails(ValueError, "shard of the weight takes"), check_plain_code(packed):
        adapter.call(packed, adapter.tensor(floats(2, 7)))

    # Parts of unequal size are not followed, on no rank.
    uneven = program(lambda m, x, a: a.call(m.down, a.softmax(m.up(x), -1)), {"up": linear(8, 7), "down": linear(7, 8)})
    parallelize_module(uneven, mesh, MLP)
    with check_plain_code(uneven) as checked:
        adapter.call(uneven, adapter.tensor(floats(2, 8)))
    assert not checked.findings and list(checked.unknown) == ["parts of unequal size"], str(checked)

    # A number for a log is found, and said to be used for nothing.
    logged = program(lambda m, x, a: (a.mean(y := m.up(x)), m.down(y))[1], UP_DOWN)
    parallelize_module(logged, mesh, MLP)
    with check_plain_code(logged) as checked:
        adapter.call(logged, adapter.tensor(floats(2, 8)))
    assert len(checked.findings) == 1 and not checked.reached
    assert "No module and no output of the model" in str(checked)

    # An operation without a rule is named, and its results raise nothing.
    unruled = program(lambda m, x, a: m.down(a.softmax(a.unruled(m.up(x)), -1)), UP_DOWN)
    parallelize_module(unruled, mesh, MLP)
    with check_plain_code(unruled) as checked:
        adapter.call(unruled, adapter.tensor(floats(12, 8)))
    assert not checked.findings and len(checked.unknown) == 1

    # A tensor that the program declares to be a part is one.
    x = adapter.tensor(floats(2, 8))
    with follow(adapter.Probe(), platform) as following:
        part = DTensor.from_local(x, mesh, [Shard(0)]).to_local()
        adapter.sum(part, 1)
        adapter.mean(part, 0)
    assert [f.kind for f in following.findings] == ["whole"]


def test_odd_corners(pool: Any) -> None:
    pool.run(2, odd_corners)


@contextmanager
def checked(value: str = "") -> Iterator[None]:
    """Set ``HYPER_PARALLEL_CHECK`` inside this context: models are followed in their first call, except with "0"."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def parts_in_and_out(made: Callable[..., Any], x: np.ndarray) -> None:
    """Check blocks that get and return a shard of the sequence: each alone, and one after the other."""
    adapter, platform = get_adapter(), get_platform()

    def block(module: Any, x: Any, a: Any) -> Any:
        return x + module.down(a.relu(module.up(module.norm(x))))

    blocks = [made(block, BY_SEQUENCE | {"up": C(input_layouts=Shard(1))}, SEQUENCE) for _ in range(2)]

    def chain(given: Any) -> Any:
        y = adapter.call(blocks[1], adapter.call(blocks[0], given))
        return adapter.sum(y), y

    with strict():
        adapter.model_value_and_grads(blocks[1], chain, x)
    # The caller's tensor has no mark afterwards: the next program may take it for something else.
    given = adapter.tensor(x)
    with check_plain_code(blocks[0]) as report, platform.no_grad():
        adapter.call(blocks[0], given)
        inside = held(given)
    assert not report.findings and inside is not None and held(given) is None


@spmd.on_mesh()
def first_calls(mesh: Any) -> None:
    adapter = get_adapter()
    x = floats(2, 4, 8)

    def made(run: Callable[..., Any], plan: dict[str, Any] = MLP, modules: dict[str, Any] = UP_DOWN) -> Any:
        with checked():
            return parallelize_module(program(run, modules), mesh, plan)

    def step(model: Any) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(model, x)
            return adapter.sum(y), y

        return adapter.model_value_and_grads(model, loss, x)[0]

    wrong = made(WRONG["softmax"].run)
    with pytest.raises(ValueError, match=r"HYPER_PARALLEL_CHECK=0[^$]*oftmax gets a part"):
        step(wrong)
    step(wrong)  # of which nothing is said a second time

    # Gradients are recorded in the second call.
    gate = made(gated, MLP | {"gate": NoParallel()}, GATED)
    if get_platform().name != "mindspore":  # which records where it is told to
        gate_of_parts = adapter.detach(adapter.tensor(x))
        with get_platform().no_grad():
            adapter.call(gate, gate_of_parts)
    with pytest.raises(ValueError, match="partial_features="):
        step(gate)

    # A number for a log is a warning, and an error inside strict().
    def logged(module: Any, x: Any, a: Any) -> Any:
        y = module.up(x)
        a.mean(y)
        return module.down(y)

    with pytest.warns(UserWarning, match="No module and no output of the model"):
        step(made(logged))
    with strict(), pytest.raises(ValueError, match="No module and no output of the model"):
        step(made(logged))

    # So is a finding about a tensor that the program may have made a part of: positions from 0 on every rank.
    with pytest.warns(UserWarning, match="assumed to be a shard"):
        step(made(WRONG["positions"].run, WRONG["positions"].plan, WRONG["positions"].modules))

    # And a norm inside heads whose style names another dimension than the cut one: its numbers are right.
    norm = MLP | {"norm": SequenceParallel(use_local_output=True)}
    with pytest.warns(UserWarning, match="taken for Shard") as caught:
        by_sequence = step(made(in_heads, norm, HEAD_NORM))
    assert len(str(caught[-1].message).splitlines()) == 2
    usual = step(made(in_heads, MLP | {"norm": HeadNormParallel()}, HEAD_NORM))
    np.testing.assert_allclose(adapter.numpy(by_sequence), adapter.numpy(usual), rtol=1e-5)

    parts_in_and_out(made, x[:, :2])

    # A right program goes on, and its copy.
    right = made(RIGHT["mlp"].run)
    copied = copy.deepcopy(right)
    for _ in range(2):
        np.testing.assert_array_equal(adapter.numpy(step(right)), adapter.numpy(step(copied)))

    # A call that fails leaves nothing behind.
    def failing(module: Any, x: Any, a: Any) -> Any:
        raise RuntimeError("of the program")

    broken = made(failing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of the program"):
            step(broken)
    step(made(RIGHT["mlp"].run))
    calls_no_hook = get_platform().name == "mindspore"  # where a call fails
    assert calls_no_hook or not (FOLLOWING or LISTENERS)

    # Neither does a model that was refused and is no more.
    del wrong, gate, right, copied, broken
    assert not planned_meshes()
    assert not FOLLOWING and not LISTENERS


def test_first_calls(pool: Any) -> None:
    needs_gradients()
    pool.run(2, first_calls)
