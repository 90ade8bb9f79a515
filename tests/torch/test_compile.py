"""torch.compile of parallelised models: the single device's numbers, by eager mode's collectives, in one graph."""

from __future__ import annotations

import copy
import os
import warnings
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    HeadNormParallel,
    ModuleStyle,
    NoParallel,
    PackedShard,
    ParameterParallel,
    Partial,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.platform.torch.compiled import hooks
from hyper_parallel.platform.torch.compiled import outside as left_outside
from hyper_parallel.platform.torch.handlers.functions import hooked_apply
from hyper_parallel.platform.torch.modules import calls
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.compiled import Graphs, compare, fresh, step
from tests.torch.decoder import Decoder, Sizes
from tests.torch.support import close, device, randn

#: Of sequences. Another length traces everything again, which `test_mlp` and `test_lengths` show in the gate.
LENGTHS = (8, 12) if everything() else (8,)


class Mlp(nn.Module):
    def __init__(self, hidden: int = 8, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, hidden, bias), nn.Linear(hidden, 6, bias)
        self.to(device())

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.up(x)))


class Gated(Mlp):
    """The first reader of its input computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 8).to(device())

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            gate = self.gate(x).sigmoid()
        return self.down(gate * self.up(x))


COLWISE_ROWWISE = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@on_mesh()
def mlp(mesh: Any, hidden: int, bias: bool) -> dict[str, int]:
    return compare(mesh, Mlp(hidden, bias), COLWISE_ROWWISE, [randn(n, 6, seed=n) for n in (2, 3, 5)])


@pytest.mark.parametrize(("world", "hidden"), [(2, 8), (3, 7)])
def test_mlp(pool: Any, world: int, hidden: int) -> None:
    for found in pool.run(world, mlp, hidden, hidden == 8):
        assert found == {"all_reduce": 2}


class Logits(Decoder):
    def forward(self, ids: Any) -> Any:
        return self.head(self.norm(self.block(self.embedding(ids))))


def block_plan(sequence: bool) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "block.attention.w[qkv]": ColwiseParallel(),
        "block.attention.wo": RowwiseParallel(output_layouts=Shard(1) if sequence else None),
        "block.feed_forward.gate": ColwiseParallel(),
        "block.feed_forward.up": ColwiseParallel(),
        "block.feed_forward.down": RowwiseParallel(output_layouts=Shard(1) if sequence else None),
    }
    if sequence:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan |= {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "block.norm[12]": SequenceParallel(),
            "block.attention": whole,
            "block.feed_forward": whole,
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    else:
        plan |= {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    return plan


@on_mesh()
def decoder(mesh: Any, sequence: bool, bias: bool) -> dict[str, int]:
    torch.manual_seed(0)
    single = Logits(Sizes(heads=4, features=8, sequence=8), bias).to(device())
    ids = [torch.randint(12, (2, n), generator=torch.Generator().manual_seed(n)).to(device()) for n in LENGTHS]
    return compare(mesh, single, block_plan(sequence), ids)


@pytest.mark.parametrize("sequence", in_gate([False, True], [True]))
def test_decoder(pool: Any, sequence: bool) -> None:
    """q, k and v read one input, gate and up another: each has one collective in backward."""
    for found in pool.run(2, decoder, sequence, not sequence):
        if not sequence:
            # forward: embedding, attention, feed-forward; backward: these two and the head
            assert found == {"all_reduce": 6, "all_gather": 1}


class One(nn.Module):
    """A module between layers that a plan leaves plain."""

    def __init__(self, module: nn.Module, ids: bool = False) -> None:
        super().__init__()
        self.one, self.ids = module, ids
        self.to(device())

    def forward(self, x: Any) -> Any:
        return self.one(x if self.ids else x * 2) * 3


def styles(name: str) -> tuple[nn.Module, Any, Any]:
    """A module, its style, and how it is given a whole input: as it is, or this rank's part along a dimension."""
    torch.manual_seed(0)
    whole, parts = Replicate(), Shard(1)
    linear, x = (lambda bias=True: nn.Linear(8, 8, bias)), randn(4, 8, 8)
    ids = torch.arange(32).reshape(4, 8).remainder(11).to(device())
    cases: dict[str, Any] = {
        "column, gathered": (linear(), ColwiseParallel(output_layouts=whole), x),
        "column of 7, gathered": (nn.Linear(8, 7), ColwiseParallel(output_layouts=whole), x),
        "row of whole inputs": (linear(), RowwiseParallel(input_layouts=whole), x),
        "row of 7 whole inputs": (nn.Linear(7, 8), RowwiseParallel(input_layouts=whole), x[..., :7]),
        "column embedding": (nn.Embedding(11, 8, 3), ColwiseParallel(output_layouts=whole), ids),
        "row embedding": (nn.Embedding(11, 8, 3), RowwiseParallel(input_layouts=whole), ids),
        "replicated": (linear(), NoParallel(), x),
        "replicated norm": (nn.LayerNorm(8), NoParallel(), x),
        "replicated embedding": (nn.Embedding(11, 8), NoParallel(), ids),
        "column, packed": (
            nn.Sequential(nn.Linear(8, 16), Gate(), linear()),
            {"0": ColwiseParallel(packed=2), "2": RowwiseParallel()},
            x,
        ),
        "parts and back": (
            nn.Sequential(linear(), linear(), nn.LayerNorm(8), linear(False)),
            {
                "0": RowwiseParallel(input_layouts=whole, output_layouts=parts),
                "1": RowwiseParallel(input_layouts=parts, output_layouts=parts, use_local_output=False),
                "2": SequenceParallel(),
                "3": ColwiseParallel(input_layouts=parts, output_layouts=whole),
            },
            x,
        ),
        "prepared": (
            nn.Sequential(nn.Sequential(linear()), linear()),
            {
                "0": PrepareModuleInputOutput(
                    input_layouts=whole,
                    desired_input_layouts=parts,
                    output_layouts=Shard(0),
                    desired_output_layouts=whole,
                ),
                "0.0": NoParallel(input_layout=parts, output_layout=Shard(0)),
                "1": NoParallel(),
            },
            x,
        ),
        "heads": (nn.Sequential(linear(), Heads(), linear()), HEADS, x),
    }
    module, style, given = cases[name]
    return One(module, not given.is_floating_point()), style, given


class Gate(nn.Module):
    def forward(self, x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class Scale(nn.Module):
    """A norm of a user's own, which is registered."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Any) -> Any:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(x.dtype)


class Heads(nn.Module):
    """Norms inside attention heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Scale(2)

    def forward(self, x: Any) -> Any:
        return self.norm(x.unflatten(-1, (-1, 2))).flatten(-2)


HEADS = {"0": ColwiseParallel(), "1.norm": HeadNormParallel(), "2": RowwiseParallel()}
STYLES = (
    *("column, gathered", "column of 7, gathered", "row of whole inputs", "row of 7 whole inputs", "column embedding"),
    *(
        "row embedding",
        "replicated",
        "replicated norm",
        "replicated embedding",
        "column, packed",
        "parts and back",
        "prepared",
        "heads",
    ),
)


def planned(style: Any) -> dict[str, Any]:
    return {f"one.{path}": one for path, one in style.items()} if isinstance(style, dict) else {"one": style}


@on_mesh()
def one_style(mesh: Any, name: str) -> None:
    mesh.platform.register_norm_module(Scale)
    single, style, x = styles(name)
    compare(mesh, single, planned(style), [x])


#: These trace what others trace, with one more branch, which `test_second_forward_in_eager_mode` runs.
ALIKE = ("column of 7, gathered", "row of 7 whole inputs", "replicated norm", "replicated embedding")


@pytest.mark.parametrize("name", in_gate(STYLES, [name for name in STYLES if name not in ALIKE]))
def test_styles(pool: Any, name: str) -> None:
    pool.run(2, one_style, name)


@on_mesh()
def second_forward_in_eager_mode(mesh: Any) -> None:
    """A traced function that Python runs is an ordinary forward."""
    mesh.platform.register_norm_module(Scale)
    with pytest.MonkeyPatch.context() as patch:
        for module in (calls, hooks):
            patch.setattr(module, "is_tracing", lambda: True)
        for name in STYLES[:-1]:  # of the last, a norm of the user's own computes on parameters
            single, style, x = styles(name)
            model = parallelize_module(copy.deepcopy(single), mesh, planned(style))
            y, gradient = step(model, x, model)
            wanted, wanted_gradient = step(single, x, single)
            close(y, wanted, name)
            if gradient is not None:
                close(gradient, wanted_gradient, name)
            of_single = dict(single.named_parameters())
            for path, p in model.named_parameters():
                close(p.grad, of_single[path].grad, f"{name}: {path}")


def test_second_forward_in_eager_mode(pool: Any) -> None:
    pool.run(2, second_forward_in_eager_mode)


# -------------------------------------------------------------------- ways to compile, and their surroundings
def by_module(model: Any, backend: Any) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def by_block(model: Any, backend: Any) -> Any:
    model.block.compile(backend=backend, fullgraph=True)
    return model


def by_function(model: Any, backend: Any) -> Any:
    return torch.compile(lambda x: model(x), backend=backend, fullgraph=True)


def with_checkpoint(model: Any, backend: Any) -> Any:
    compiled: Any = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend=backend, fullgraph=True)
    return compiled


@on_mesh()
def ways(mesh: Any) -> None:
    x = [randn(2, 6), randn(3, 6)]
    for way in (by_module, by_function) if everything() else (by_function,):
        compare(mesh, Mlp(), COLWISE_ROWWISE, x, compile=way)
    compare(mesh, Mlp(), COLWISE_ROWWISE, x, compile=with_checkpoint, counts=False)
    gated, into_parts = (
        nn.Sequential(nn.Linear(6, 6).to(device()), Gated()),
        {
            "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "1": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        },
    )
    readers = {"1.gate": ColwiseParallel(), "1.up": ColwiseParallel(), "1.down": RowwiseParallel()}
    for before in ({}, into_parts):
        compare(mesh, gated, before | readers, [randn(4, 6)], counts=not before)
    torch.manual_seed(0)
    single = Logits(Sizes(heads=4, features=8, sequence=8), False).to(device())
    of_block = {path: style for path, style in block_plan(False).items() if path.startswith("block.")}
    ids = [torch.arange(2 * n).view(2, n).remainder(12).to(device()) for n in LENGTHS]
    assert compare(mesh, single, of_block, ids, compile=by_block) == {"all_reduce": 4}
    autocast = partial(torch.autocast, device().type, torch.bfloat16)
    compare(mesh, Mlp(), COLWISE_ROWWISE, x, around=autocast, tolerance=0.1)
    fresh()
    graphs, mlp_alone = Graphs(), Mlp()
    model = copy.deepcopy(mlp_alone)
    model.compile(backend=graphs.backend, fullgraph=True)
    parallelize_module(model, mesh, COLWISE_ROWWISE)
    for n in (2, 3):
        close(model(randn(n, 6, seed=n)), mlp_alone(randn(n, 6, seed=n)))
    assert graphs.graphs


def test_ways(pool: Any) -> None:
    pool.run(2, ways)


@on_mesh()
def lengths(mesh: Any) -> int:
    """One graph serves all lengths with ``dynamic=True``."""
    fresh()
    graphs = Graphs()
    model = parallelize_module(Mlp(), mesh, COLWISE_ROWWISE)
    call: Any = torch.compile(model, backend=graphs.backend, fullgraph=True, dynamic=True)
    for n in (4, 5, 6, 9):
        step(model, randn(n, 6, seed=n), call)
    return graphs.graphs


def test_lengths(pool: Any) -> None:
    assert pool.run(2, lengths) == [2, 2]  # one forward, one backward


@on_mesh()
def with_the_loss(mesh: Any) -> None:
    """Logits of all classes in a loss inside of the frame; those of a part are refused there too."""
    single = Logits(Sizes(heads=4, sequence=8), False).to(device())
    ids = (torch.arange(8).expand(2, 8) % 12).to(device())

    def loss_of(model: Any, backend: Any = None) -> Any:
        def loss(x: Any) -> Any:
            return F.cross_entropy(model(x).flatten(0, 1), x.flatten())

        return loss if backend is None else torch.compile(loss, backend=backend, fullgraph=True)

    fresh()
    graphs, model = Graphs(), parallelize_module(copy.deepcopy(single), mesh, block_plan(False))
    y, _ = step(model, ids, loss_of(model, graphs.backend))
    wanted, _ = step(single, ids, loss_of(single))
    close(y, wanted)
    for name, p in model.named_parameters():
        close(p.grad, dict(single.named_parameters())[name].grad, name)
    model = parallelize_module(single, mesh, {**block_plan(False), "head": ColwiseParallel()})
    with pytest.raises(Exception, match="this rank's shard of the 12 output features of 'head'"):
        step(model, ids, loss_of(model, "aot_eager"))


def test_with_the_loss(pool: Any) -> None:
    pool.run(2, with_the_loss)


@on_mesh()
def inductor(mesh: Any) -> None:
    fresh()
    torch.manual_seed(0)
    for single, plan, x in (
        (Mlp(), COLWISE_ROWWISE, randn(2, 6)),
        (Logits(Sizes(heads=4, sequence=8), False).to(device()), block_plan(True), torch.arange(8).expand(2, 8) % 12),
    ):
        model, x = parallelize_module(copy.deepcopy(single), mesh, plan), x.to(device())
        y, _ = step(model, x, torch.compile(model, fullgraph=True))
        wanted, _ = step(single, x, single)
        close(y, wanted)
        for name, p in model.named_parameters():
            close(p.grad, dict(single.named_parameters())[name].grad, name)


@pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="Inductor generates code for CPUs here, with gcc"
)
@pytest.mark.nightly
def test_inductor(pool: Any) -> None:
    pool.run(2, inductor)


@on_mesh()
def parameters_change(mesh: Any) -> None:
    """Compiled code sees parameters as they are: other values, other objects, frozen ones."""
    fresh()
    single = Mlp()
    model = parallelize_module(copy.deepcopy(single), mesh, COLWISE_ROWWISE)
    call: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = randn(2, 6)

    def check() -> None:
        y, gradient = step(model, x, call)
        wanted, wanted_gradient = step(single, x, single)
        close(y, wanted)
        close(gradient, wanted_gradient)
        for name, p in model.named_parameters():
            wanted = dict(single.named_parameters())[name]
            assert (p.grad is None) == (wanted.grad is None), name
            if p.grad is not None:
                close(p.grad, wanted.grad, name)

    check()
    for m in (model, single):
        torch.optim.SGD(m.parameters(), 0.1).step()
    check()
    for m in (model, single):
        m.up.weight.requires_grad_(False)
    check()
    for m in (model, single):
        m.up.weight.requires_grad_()
        m.down.weight = nn.Parameter(m.down.weight.detach() * 2)
    check()
    for m in (model, single):
        m.up.bias.data = m.up.bias.data * 2
    check()
    model.up.weight = nn.Parameter(randn(8, 6))
    with pytest.raises(Exception, match="cannot trace with these inputs"):
        call(x)
    fresh()
    with pytest.raises(ValueError, match="is a plain tensor, but its style had made it a DTensor"):
        torch.compile(model, backend="eager")(x)


def test_parameters_change(pool: Any) -> None:
    pool.run(2, parameters_change)


# -------------------------------------------------------------------- operations that leave compiled code
class Outer(nn.Module):
    """Computes on the output of its layer, of any kind."""

    def __init__(self, layer: nn.Module, operation: Any) -> None:
        super().__init__()
        self.layer, self.operation = layer, operation
        self.to(device())

    def forward(self, x: Any) -> Any:
        return self.operation(self.layer(x))


class Gain(nn.Module):
    """Multiplies by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Any) -> Any:
        return x * self.gain


class GainParallel(ModuleStyle):
    """A style of a user's own."""

    placements = MappingProxyType({"gain": Shard(0)})


def outside(name: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    sequence, whole = SequenceParallel(), Replicate()
    into_parts = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0), use_local_output=False)
    return {
        "an operation on a DTensor": (
            Outer(nn.Linear(6, 6), lambda y: y.mean(0).to_local()),
            {"layer": into_parts},
            randn(4, 6),
        ),
        "parts that are not even": (
            Outer(nn.Linear(6, 6), lambda y: y.full_tensor()),
            {"layer": into_parts},
            randn(5, 6),
        ),
        "a module of another kind": (
            Outer(nn.Dropout(0.0), lambda y: y.full_tensor()),
            {"layer": sequence},
            randn(4, 6),
        ),
        "a method of a DTensor": (
            Outer(nn.Linear(6, 6), lambda y: y.full_tensor()),
            {"layer": into_parts},
            randn(4, 6),
        ),
        "parameters by name": (Outer(Gain(), twice), {"layer": ParameterParallel({"gain": Shard(0)})}, randn(4, 6)),
        "a style of a user's own": (Outer(Gain(), twice), {"layer": GainParallel()}, randn(4, 6)),
        "fewer heads than ranks": (
            Outer(nn.Linear(6, 3), twice),
            {"layer": ColwiseParallel(heads=1, replicate_heads=True)},
            randn(4, 6),
        ),
        "a layer of another kind": (Outer(nn.GELU(), twice), {"layer": NoParallel()}, randn(4, 6)),
        "a hook that adds up": (
            Outer(nn.Identity(), twice),
            {"layer": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=whole)},
            randn(4, 6),
        ),
        "a hook of several matrices": (
            Outer(nn.Identity(), twice),
            {"layer": PrepareModuleOutput(output_layouts=PackedShard(1, 2), desired_output_layouts=whole)},
            randn(4, 6),
        ),
    }[name]


def twice(y: Any) -> Any:
    return y * 2


#: Operations that leave compiled code, and how the warning begins.
OUTSIDE = {
    "an operation on a DTensor": "an operation on a DTensor runs",
    "parts that are not even": "'layer' runs",
    "a module of another kind": "'layer' runs",
    "a method of a DTensor": "an operation on a DTensor runs",
    "parameters by name": "'layer' runs",
    "a style of a user's own": "'layer' runs",
    "fewer heads than ranks": "'layer' runs",
    "a layer of another kind": "'layer' runs",
    "a hook that adds up": "a hook of 'layer' runs",
    "a hook of several matrices": "a hook of 'layer' runs",
}


@on_mesh()
def left(mesh: Any, name: str) -> str:
    fresh()
    single, plan, x = outside(name)
    model = parallelize_module(single, mesh, plan)
    wanted, wanted_gradient = step(model, x, model)
    left_outside._SAID.clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        call: Any = torch.compile(model, backend="aot_eager")
        for _ in range(2):
            y, gradient = step(model, x, call)
    close(y, wanted)
    close(gradient, wanted_gradient)
    said = [str(one.message) for one in warned if "outside of compiled code" in str(one.message)]
    assert sum(one.startswith(OUTSIDE[name]) for one in said) == 1, said
    assert len(set(said)) == len(said), said
    fresh()
    with pytest.raises(Exception, match="HyperParallel: ") as error:
        step(model, x, torch.compile(model, backend="aot_eager", fullgraph=True))
    return str(error.value)


#: One for each way out, and for each thing that says so.
IN_GATE = (
    *("an operation on a DTensor", "parts that are not even", "fewer heads than ranks"),
    *("a layer of another kind", "a hook of several matrices"),
)


@pytest.mark.parametrize("name", in_gate(OUTSIDE, IN_GATE))
def test_outside(pool: Any, name: str) -> None:
    """The result is right: there is a graph break, of which a warning tells once. Where breaks are not wanted, the
    error names the cause."""
    for error in pool.run(2, left, name):
        assert "docs/compile.md" in error


@on_mesh()
def dtensors(mesh: Any) -> None:
    """DTensors come into compiled functions, and out of them."""
    fresh()
    single = Mlp()
    model = parallelize_module(
        copy.deepcopy(single), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(use_local_output=False)}
    )
    call: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = randn(4, 6)
    for placement in (Replicate(), Shard(0)):
        given = distribute_tensor(x, mesh, [placement]).requires_grad_()
        y = call(given)
        assert isinstance(y, DTensor) and y.placements == (Replicate(),) and tuple(y.shape) == (4, 6)
        close(y, single(x))
        y.full_tensor().sum().backward()
        of_single = x.clone().requires_grad_()
        single(of_single).sum().backward()
        close(given.grad, of_single.grad)

    def plus(x: Any) -> Any:
        return (x + 1).cumsum(0)

    given = distribute_tensor(x, mesh, [Shard(0)])
    close(torch.compile(plus, backend="aot_eager")(given), plus(x))
    with pytest.raises(Exception, match="HyperParallel: an operation on a DTensor"):
        torch.compile(lambda x: x.cumsum(0), backend="aot_eager", fullgraph=True)(given)


def test_dtensors(pool: Any) -> None:
    pool.run(2, dtensors)


def test_methods_from_before_the_patch() -> None:
    """``f = MyFunction.apply``: torch's compiler compares such a method with that of its class. Until torch 2.13 it is
    one of Python's."""

    class Kept:
        apply: Any = classmethod(lambda cls, x: x + 1)

    before = Kept.apply
    Kept.apply = hooked_apply(vars(Kept)["apply"])
    assert before == Kept.apply and hash(before) == hash(Kept.apply) and Kept.apply(1) == 2
    assert before.__func__ is not Kept.apply.__func__ and before.__func__ != test_dtensors


@on_mesh(2, 2, names=("dp", "tp"))
def inside_of_units(mesh: Any) -> None:
    """Blocks that are compiled inside of `fully_shard` and `replicate`."""
    for wrap in (fully_shard, replicate) if everything() else (fully_shard,):
        fresh()
        single = Mlp()
        model = parallelize_module(copy.deepcopy(single), mesh["tp"], COLWISE_ROWWISE)
        outer = nn.Sequential(model)
        wrap(outer, mesh["dp"]) if wrap is replicate else wrap(outer, mesh=mesh["dp"])
        model.compile(backend="aot_eager", fullgraph=wrap is fully_shard)
        rank = mesh.get_local_rank("dp")
        xs = [randn(3, 6, seed=i) for i in range(2)]
        for _ in range(2):
            outer.zero_grad()
            single.zero_grad()
            outer(xs[rank]).square().sum().backward()
            (sum(single(x).square().sum() for x in xs) / 2).backward()
            for (name, p), q in zip(outer.named_parameters(), single.parameters(), strict=True):
                close(p.grad, q.grad, name)


def test_inside_of_units(pool: Any) -> None:
    pool.run(4, inside_of_units)
