"""Modules with styles in graphs that MindSpore makes from the source: values, gradients and collectives of eager mode.

Other tests show MindSpore's other ways of making graphs without this library. When one of them fails, a release has
improved, and the refusal that it justifies can be reconsidered.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.graph import jit_trace
from mindspore.graph.api import _JitExecutor
from mindspore.train.anf_ir_pb2 import ModelProto

from examples.train_llama.model_mindspore import LlamaDecoderLayer, LlamaForCausalLM, LlamaRMSNorm, rotary_tables
from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    ModuleStyle,
    NoParallel,
    Partial,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import everything, on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore import llama
from tests.mindspore.nets import batch, error_of, make_net, whole
from tests.mindspore.test_graph_mode import run_program, says_where
from tests.support.pages import ROOT

FEATURES, UNITS = 8, 12


def numbers(net: nn.Cell) -> Any:
    """Fill the parameters, the same on all ranks."""
    rng = np.random.default_rng(0)
    for p in net.get_parameters():
        p.set_data(Tensor((rng.standard_normal(p.shape) * 0.3).astype(np.float32)))
    return net


def activations(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(5).standard_normal(shape).astype(np.float32))


class MLP(nn.Cell):
    """A network with both kinds of linear layers; its input is read by one of them, or by two."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        self.gate = mint.nn.Linear(FEATURES, UNITS)
        self.up = nn.Dense(FEATURES, UNITS)
        self.down = mint.nn.Linear(UNITS, FEATURES)

    def construct(self, x: Any) -> Any:
        hidden = ops.relu(self.up(x))
        if self.gated:
            hidden = hidden * self.gate(x)
        return self.down(hidden)


class Norms(nn.Cell):
    """Norms of MindSpore's and one of a user's, before and after a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm([FEATURES])
        self.second = LlamaRMSNorm(FEATURES, 1e-6)
        self.mlp = MLP()

    def construct(self, x: Any) -> Any:
        return self.mlp(self.second(self.first(x)))


def compared(net: nn.Cell, x: Tensor, *more: Any, inside: bool | None = None) -> float:
    """The largest relative difference between eager mode and a graph: of the output, and of all gradients.

    Args:
        net: the network.
        x: its input.
        more: further inputs.
        inside: True for a graph inside of the differentiated function, False for one that takes the gradients itself,
            None for both, and for one of the network alone.
    """
    parameters = net.trainable_params()
    position = None if x.dtype == ms.int32 else 0

    def loss(x: Any) -> Any:
        return (net(x, *more) ** 2).sum()

    by_hand = ms.value_and_grad(loss, position, parameters)

    def step(x: Any) -> Any:
        return by_hand(x)

    pairs = []
    if inside is not False:
        compiled = ms.jit(loss)
        wanted = flat(value_and_grad(loss, position, parameters)(x))
        pairs += [(wanted, flat(value_and_grad(compiled, position, parameters)(x))) for _ in range(2)]
        assert len(wanted) == len(parameters) + 1 + (position is not None)
    if not inside:
        wanted, found = flat(by_hand(x)), flat(ms.jit(step)(x))
        assert all(g.shape == p.shape for g, p in zip(found[-len(parameters) :], map(local, parameters), strict=True))
        pairs.append((wanted, found))
    if inside is None:
        pairs.append((flat(net(x, *more)), flat(ms.jit(net)(x, *more))))
    return max(
        float(np.abs(a - b).max() / max(np.abs(a).max(), 1e-6)) for e, g in pairs for a, b in zip(e, g, strict=True)
    )


def local(p: Any) -> np.ndarray:
    return (p.to_local() if hasattr(p, "to_local") else p).asnumpy()


def flat(result: Any) -> list[np.ndarray]:
    """Value and gradients in one list, whole ones."""
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in flat(part)]
    return [whole(result)]


class Columns(ModuleStyle):
    """A style of a user's own, which says the same as `ColwiseParallel`."""

    placements = MappingProxyType({"weight": Shard(0), "bias": Shard(0)})
    output_layouts = (Shard(-1),)


# ------------------------------------------------------------------------------------------------ styles and layouts
LINEAR = {
    "column": ({"up": ColwiseParallel(), "down": RowwiseParallel()}, False),
    "gathered": ({"up": ColwiseParallel(output_layouts=Replicate())}, False),
    "row of the whole": ({"down": RowwiseParallel(input_layouts=Replicate())}, False),
    "gated": ({"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}, False),
    "sequence": (
        {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))},
        True,
    ),
    "to a sequence": (
        {"up": ColwiseParallel(output_layouts=Shard(1)), "down": RowwiseParallel(input_layouts=Shard(1))},
        False,
    ),
    "replicated": ({"up": NoParallel(), "down": NoParallel(input_layout=Shard(1), output_layout=Shard(1))}, False),
    "replicated, read by parts": (
        {"up": NoParallel(partial_features=2), "down": NoParallel(local_output_grad_placements=(Partial(),))},
        False,
    ),
    "of a user's own": ({"up": Columns(), "down": RowwiseParallel()}, False),
    "parts of features": ({"down": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))}, False),
}


@on_mesh()
def linear_layers(mesh: Any) -> dict[str, float]:
    mesh._has_uneven_shards = False  # ranks share the mesh with tests of unequal parts
    found = {}
    for number, (name, (plan, cut)) in enumerate(LINEAR.items()):
        # Both ways meet a style in the same functions: each plan goes one of them in the gate.
        inside = None if everything() or name == "column" else bool(number % 2)
        net = numbers(MLP(gated=name == "gated"))
        parallelize_module(net, mesh, dict(plan))
        if name == "replicated":
            parallelize_module(net.gate, mesh, NoParallel())
        x = activations(2, 4, FEATURES)
        x = x[:, : 4 // mesh.size()].contiguous() * (mesh.get_local_rank() + 1) if cut else x
        found[name] = compared(net, x, inside=inside)
    return found


@on_mesh()
def other_modules(mesh: Any) -> dict[str, float]:
    mesh._has_uneven_shards = False  # ranks share the mesh with tests of unequal parts
    mesh.platform.register_norm_module(LlamaRMSNorm)
    inside = None if everything() else True
    found = {"tied network": compared(make_net(mesh), batch()[0], inside=None if everything() else False)}
    x = activations(2, 4 // mesh.size(), FEATURES) + mesh.get_local_rank()
    plan = {
        "first": SequenceParallel(use_local_output=True),
        "second": SequenceParallel(use_local_output=True),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    found["sequence parallel"] = compared(parallelize_module(numbers(Norms()), mesh, plan), x, inside=inside)
    plan = {
        "first": NoParallel(input_layout=Shard(1)),
        "second": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "mlp": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
            use_local_input=True,
        ),
    }
    found["inputs and outputs"] = compared(parallelize_module(numbers(Norms()), mesh, plan), x, inside=inside)
    table = nn.SequentialCell(nn.Embedding(UNITS, FEATURES))
    for name, style in {
        "columns": ColwiseParallel(output_layouts=Replicate()),
        "rows": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    }.items():
        table = parallelize_module(numbers(nn.SequentialCell(nn.Embedding(UNITS, FEATURES))), mesh, {"0": style})
        found[f"embedding in {name}"] = compared(table, Tensor(np.arange(8).reshape(2, 4), ms.int32), inside=inside)
    return found


# ------------------------------------------------------------------------------------------------ Llama
BLOCK = {key.removeprefix("layers.*."): style for key, style in llama.BASE_MODEL_TP_PLAN.items()}


def collectives_of(phases: list[Any]) -> Counter[str]:
    """The number of collectives of each kind in the latest graph."""
    executor, phase = phases[-1]
    model = ModelProto()
    model.ParseFromString(executor._graph_executor.get_func_graph_proto(phase, "anf_ir"))
    kinds = ("AllReduce", "AllGather", "ReduceScatter")
    return Counter(node.op_type for node in model.graph.node if node.op_type in kinds)


@on_mesh()
def llama_block(mesh: Any) -> tuple[float, float, dict[str, int], dict[str, int]]:
    """Differences of a block and of a whole model, and the collectives of a block's step: in a graph and in eager
    mode."""
    config = llama.Config()
    block = parallelize_module(numbers(LlamaDecoderLayer(config, 0)), mesh, BLOCK)
    cos, sin = rotary_tables(llama.LENGTH, config.head_dim, config.rope_theta)
    x = activations(llama.BATCH, llama.LENGTH, config.hidden_size)
    of_block = compared(block, x, cos, sin)
    model = parallelize_module(numbers(LlamaForCausalLM(config)), mesh, llama.PLAN)
    of_model = compared(model, Tensor(np.arange(16).reshape(2, 8), ms.int32))

    def loss(x: Any) -> Any:
        return (block(x, cos, sin) ** 2).sum()

    gradients = ms.value_and_grad(loss, 0, block.trainable_params())

    def step(x: Any) -> Any:
        return gradients(x)

    phases: list[Any] = []
    compile_ = _JitExecutor.compile

    def remember(executor: Any, *args: Any, **kwargs: Any) -> Any:
        phases.append((executor, compile_(executor, *args, **kwargs)))
        return phases[-1][1]

    _JitExecutor.compile = remember
    try:
        ms.jit(step)(x)
    finally:
        _JitExecutor.compile = compile_
    with CommDebugMode() as mode:
        gradients(x)
    return of_block, of_model, dict(collectives_of(phases)), {"AllReduce": mode.get_total_counts()}


@on_ranks(2, 4, gate=(2,), name="size")
def test_linear_layers(pool: Any, size: int) -> None:
    for found in pool.run(size, linear_layers):
        assert list(found) == list(LINEAR)
        assert max(found.values()) < 1e-5, found


def test_other_modules(pool: Any) -> None:
    for found in pool.run(2, other_modules):
        assert len(found) == 5
        assert max(found.values()) < 1e-5, found


@pytest.mark.nightly  # test_graph_mode_models.py has one in the gate
def test_llama(pool: Any) -> None:
    for of_block, of_model, in_graph, eager in pool.run(2, llama_block):
        assert max(of_block, of_model) < 1e-5
        assert in_graph == eager == {"AllReduce": 4}


# ------------------------------------------------------------------------------------------------ refusals
class Reads(nn.Cell):
    """A cell that computes with a parameter of a module with a style, in ways that the walk misses."""

    def __init__(self, net: nn.Cell, way: str) -> None:
        super().__init__()
        self.net, self.way, self.held = net, way, {"up": net.up}

    def construct(self, x: Any) -> Any:
        if self.way == "attribute":
            return x + self.net.up.weight[0]
        if self.way == "getattr":
            return x + getattr(self.net.up, "weight")[0]  # noqa: B009
        if self.way == "table":
            return x + self.net.up._params["weight"][0]
        if self.way == "cells":
            return self.net._cells["up"](x)
        return self.held["up"](x)


@on_mesh()
def refused(mesh: Any) -> dict[str, str]:
    net, x = make_net(mesh), activations(2, FEATURES)
    errors = {way: error_of(ms.jit(Reads(net, way)), x) for way in ("attribute", "getattr", "table", "cells", "dict")}
    for name, style in {
        "DTensor": ColwiseParallel(use_local_output=False),
        "packed": ColwiseParallel(packed=2, output_layouts=Replicate()),
    }.items():
        layer = parallelize_module(numbers(nn.SequentialCell(nn.Dense(FEATURES, UNITS))), mesh, {"0": style})
        errors[name] = error_of(ms.jit(layer), x)
    recomputed = make_net(mesh)
    recomputed.up.recompute()
    errors["recompute"] = error_of(ms.jit(recomputed), batch()[0])
    return errors


def test_what_is_refused(pool: Any) -> None:
    for errors in pool.run(2, refused):
        for way in ("attribute", "getattr", "table"):
            assert "of a module whose style distributed its parameters. Call the module instead" in errors[way], errors[
                way
            ]
        for way in ("cells", "dict", "DTensor", "packed", "recompute"):
            assert "graphs cannot contain" in errors[way], errors[way]
        assert "use_local_output=True" in errors["DTensor"]


@on_mesh()
def replaced(mesh: Any) -> list[float]:
    """Another graph is made once a module has another parameter; new values need none."""
    net, x = numbers(nn.SequentialCell(mint.nn.Linear(FEATURES, UNITS))), activations(2, FEATURES)
    parallelize_module(net, mesh, {"0": ColwiseParallel()})
    run, differences = ms.jit(net), []
    for _ in range(2):
        differences.append(float(np.abs(run(x).asnumpy() - net(x).asnumpy()).max()))
        net[0].weight.set_data(Tensor(np.full((UNITS, FEATURES), 0.5, np.float32)))
        differences.append(float(np.abs(run(x).asnumpy() - net(x).asnumpy()).max()))
        net[0].weight = net[0].weight.clone(init="ones")
    return differences


def test_replaced_parameters(pool: Any) -> None:
    for differences in pool.run(2, replaced):
        assert max(differences) < 1e-5


# ------------------------------------------------------------------------------------------------ MindSpore by itself
class Triple(nn.Cell):
    """A cell whose backward is not the derivative of its forward, as with collectives."""

    def construct(self, x: Any) -> Any:
        return x * 1

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        return (dout * 3,)


triple = Triple()


def by_triple(x: Any) -> Any:
    return triple(x).sum()


def gradients_by_mode() -> dict[str, float]:
    jit_trace._get_caller_lines = says_where
    x = Tensor(np.ones(2, np.float32))
    modes = ("ast", "trace")
    return {mode: float(ms.grad(ms.jit(by_triple, capture_mode=mode))(x).asnumpy()[0]) for mode in modes}


def test_recordings_lose_the_bprop_of_cells(pool: Any) -> None:
    assert pool.run(1, gradients_by_mode) == [{"ast": 3.0, "trace": 1.0}], "see why graphs.py refuses recordings"


PAGE_PROGRAMS = ("trace.py", "bytecode.py")

BYTECODE = """
import mindspore as ms
from tests.mindspore.test_jit import Tensor, np, triple

@ms.jit(capture_mode="bytecode")
def mixed(x):
    if x.asnumpy()[0] > 0:
        print("in Python")
    return triple(x).sum()

try:
    mixed(Tensor(np.ones(2, np.float32)))
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""


def test_bytecode_fails_where_only_a_part_is_compiled(tmp_path: Path) -> None:
    lines = run_program(tmp_path, BYTECODE)
    assert lines[-1] == "shouldn't reach here", "see why graphs.py refuses graphs of the bytecode"


def test_programs_of_the_page(tmp_path: Path) -> None:
    """Programs of docs/mindspore.md, which need a file to be compiled from."""
    text = (ROOT / "docs/mindspore.md").read_text(encoding="utf-8")
    trace, bytecode = (re.findall(rf"^```python\n# {name}\n(.*?)^```", text, re.M | re.S) for name in PAGE_PROGRAMS)
    assert run_program(tmp_path, trace[0]) == ["[3. 3.]", "[1. 1.]"]
    call, promised = re.findall(r"^(g\(x\))  # RuntimeError: (.*)$", bytecode[0], re.M)[0]
    caught = f"try:\n    {call}\nexcept RuntimeError as error:\n    print(str(error).splitlines()[0])"
    lines = run_program(tmp_path, trace[0] + bytecode[0].replace(f"\n{call}", f"\n{caught}"))
    assert lines[-1] == promised
