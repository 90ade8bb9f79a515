"""torch.compile of every style: all layout keywords and kinds of modules, by eager mode's numbers and collectives."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    HeadNormParallel,
    ModuleStyle,
    NoParallel,
    ParameterParallel,
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
from hyper_parallel.platform.contract.programs import STEPS
from hyper_parallel.platform.torch.compiled import functions
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.compiled import Graphs, fresh, same_counts
from tests.torch.support import close, device, randn

#: Of the inputs, whole: 4 and 8 divide by the number of ranks, features do not in each case.
SHAPE, FEATURES, ROWS = (4, 8), 12, 11
WHOLE, CUTS = Replicate(), (Replicate(), Shard(0), Shard(1), Shard(-1))

#: A module, its style, and the inputs of each rank.
Case = tuple[nn.Module, Any, dict[Any, Any]]


class Scale(nn.Module):
    """A norm of a user's own, which is registered."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Any) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Gain(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, features))

    def forward(self, x: Any) -> Any:
        return x * self.gain + x


class GainParallel(ModuleStyle):
    """Styles of a user's own, which say the same as ours or something else."""

    placements = MappingProxyType({"gain": Shard(0)})
    input_layouts = desired_input_layouts = output_layouts = (Shard(-1),)


class Columns(ModuleStyle):
    placements = MappingProxyType({"weight": Shard(0), "bias": Shard(0)})
    output_layouts = (Shard(-1),)


class Rows(ModuleStyle):
    placements = MappingProxyType({"weight": Shard(1)})
    input_layouts = desired_input_layouts = (Shard(-1),)
    output_layouts = (Shard(1),)


class EachPosition(ModuleStyle):
    input_layouts = output_layouts = (Shard(1),)
    use_local_output = False
    whole_dims = 1


class Pair(nn.Module):
    """Takes inputs by position and by keyword, and gives two outputs."""

    def forward(self, x: Any, none: Any = None, *, other: Any) -> tuple[Any, Any]:
        return x * 2, other * 3


def part(mesh: Any, placement: Any, features: int = FEATURES) -> Any:
    """The part of an input that this rank has, as a plain tensor."""
    x = randn(*SHAPE, features)
    return x if placement is WHOLE else x.tensor_split(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()


def ids(mesh: Any, placement: Any) -> Any:
    return (part(mesh, placement).abs() * 100).long()[..., 0].remainder(ROWS)


def columns(mesh: Any) -> Iterator[Case]:
    for given in CUTS:
        for wanted in CUTS:
            style = ColwiseParallel(input_layouts=given, output_layouts=wanted, use_local_output=wanted is WHOLE)
            yield nn.Linear(FEATURES, 8, bias=given is WHOLE), style, {0: part(mesh, given)}
    for wanted in (WHOLE, Shard(-1)):
        yield nn.Linear(FEATURES, 7), ColwiseParallel(output_layouts=wanted), {0: part(mesh, WHOLE)}
    yield nn.Linear(FEATURES, 16), ColwiseParallel(packed=2), {0: part(mesh, WHOLE)}


def rows(mesh: Any) -> Iterator[Case]:
    for given in CUTS:
        for wanted in CUTS:
            style = RowwiseParallel(input_layouts=given, output_layouts=wanted, use_local_output=wanted is WHOLE)
            yield nn.Linear(FEATURES, 8, bias=given is WHOLE), style, {0: part(mesh, given)}
    for given in (WHOLE, Shard(-1)):
        yield nn.Linear(7, 8), RowwiseParallel(input_layouts=given), {0: part(mesh, given, 7)}
    yield nn.Linear(16, 8), RowwiseParallel(packed=2), {0: part(mesh, Shard(-1), 16)}


def embeddings(mesh: Any) -> Iterator[Case]:
    for given in CUTS[:3]:
        for wanted in CUTS:
            yield (
                nn.Embedding(ROWS, 8, 3),
                ColwiseParallel(input_layouts=given, output_layouts=wanted),
                {0: ids(mesh, given)},
            )
            yield (
                nn.Embedding(ROWS, 8),
                RowwiseParallel(input_layouts=given, output_layouts=wanted),
                {0: ids(mesh, given)},
            )


def norms(mesh: Any) -> Iterator[Case]:
    for dim in (0, 1, -2):
        for norm in (nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES, bias=False), nn.RMSNorm(FEATURES)):
            style = SequenceParallel(sequence_dim=dim, use_local_output=dim == 0)
            yield norm, style, {0: part(mesh, Shard(dim))}
    yield Scale(FEATURES), SequenceParallel(), {0: part(mesh, Shard(1))}
    for norm in (nn.RMSNorm(FEATURES), nn.LayerNorm(FEATURES), Scale(FEATURES)):
        yield norm, HeadNormParallel(), {0: part(mesh, Shard(1))}


def alike(mesh: Any) -> Iterator[Case]:
    for given in CUTS:
        for wanted in CUTS:
            style = NoParallel(input_layout=given, output_layout=wanted, use_local_output=given is WHOLE)
            yield nn.Linear(FEATURES, 8), style, {0: part(mesh, given)}
    for layer in (nn.LayerNorm(FEATURES), nn.RMSNorm(FEATURES)):
        yield layer, NoParallel(input_layout=Shard(1)), {0: part(mesh, Shard(1))}
    yield nn.Linear(FEATURES, 8), NoParallel(local_output_grad_placements=(Partial(),)), {0: part(mesh, WHOLE)}
    yield nn.Linear(FEATURES, 8), NoParallel(partial_features=3), {0: part(mesh, WHOLE)}
    yield nn.Embedding(ROWS, 8, 3), NoParallel(input_layout=Shard(0), output_layout=Shard(1)), {0: ids(mesh, Shard(0))}


def own(mesh: Any) -> Iterator[Case]:
    yield Gain(FEATURES), GainParallel(), {0: part(mesh, Shard(-1))}
    yield nn.Linear(FEATURES, 8), Rows(), {0: part(mesh, Shard(-1))}
    yield nn.Linear(FEATURES, 8, bias=False), ParameterParallel({"weight": Shard(0)}), {0: part(mesh, WHOLE)}
    yield nn.Linear(FEATURES, 8), Columns(), {0: part(mesh, WHOLE)}
    yield nn.LayerNorm(FEATURES), EachPosition(), {0: part(mesh, Shard(1))}


def prepared(mesh: Any) -> Iterator[Case]:
    for given in CUTS:
        for wanted in CUTS:
            of_input = PrepareModuleInput(
                input_layouts=(given, None),
                desired_input_layouts=(wanted, None),
                input_kwarg_layouts={"other": wanted},
                desired_input_kwarg_layouts={"other": given},
                use_local_output=True,
            )
            inputs = {0: part(mesh, given), 1: None, "other": part(mesh, wanted)}
            yield Pair(), of_input, inputs
            of_outputs = {"output_layouts": (given, wanted), "desired_output_layouts": (wanted, None)}
            yield Pair(), PrepareModuleOutput(**of_outputs), inputs
    yield (
        Pair(),
        PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=WHOLE,
            use_local_input=True,
            output_layouts=(WHOLE, None),
            desired_output_layouts=(Shard(0), None),
            use_local_output=False,
        ),
        {0: part(mesh, Shard(1)), "other": part(mesh, WHOLE)},
    )


GROUPS = {
    "column": columns,
    "row": rows,
    "embedding": embeddings,
    "norm": norms,
    "replicated": alike,
    "of a user's own": own,
    "prepared": prepared,
}


class Several(nn.Module):
    """Layers next to each other, each with inputs of its own."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: list[tuple[list[Any], dict[str, Any]]]) -> list[Any]:
        found = []
        for layer, (args, kwargs) in zip(self.layers, inputs, strict=True):
            y = layer(*args, **kwargs)
            for one in y if isinstance(y, tuple) else (y,):
                found.append(one.to_local() if isinstance(one, DTensor) else one)
        return found


def step(model: nn.Module, cases: list[Case], call: Any) -> list[tuple[str, Any]]:
    """Outputs, and gradients of inputs and parameters."""
    leaves: dict[str, Any] = {}
    inputs: list[tuple[list[Any], dict[str, Any]]] = []
    for i, (_, style, given) in enumerate(cases):
        for key, x in given.items():
            if x is not None and x.is_floating_point():
                leaves[f"input {key} of case {i}, {style}"] = x.detach().clone().requires_grad_()
        own = {key: leaves.get(f"input {key} of case {i}, {style}", x) for key, x in given.items()}
        inputs.append(
            ([own[k] for k in own if isinstance(k, int)], {k: x for k, x in own.items() if isinstance(k, str)})
        )
    outputs = call(inputs)
    sum((y.square() * torch.linspace(0.5, 1.5, y.numel()).view(y.shape).to(y)).sum() for y in outputs).backward()
    found = [(f"output {i}", y) for i, y in enumerate(outputs)]
    found += [(name, x.grad) for name, x in leaves.items()]
    return found + [(name, p.grad.to_local()) for name, p in model.named_parameters()]


@on_mesh()
def some_styles(mesh: Any, names: tuple[str, ...], every: int = 1) -> None:
    fresh(mesh)
    torch.manual_seed(0)
    mesh.platform.register_norm_module(Scale)
    cases = [case for name in names for case in GROUPS[name](mesh)][::every]
    plan = {f"layers.{i}": style for i, (_, style, _) in enumerate(cases)}
    eager = parallelize_module(Several([module for module, *_ in cases]).to(device()), mesh, plan)
    model = copy.deepcopy(eager)
    step(eager, cases, eager)
    eager.zero_grad()
    with CommDebugMode() as comm:
        wanted = step(eager, cases, eager)
    graphs = Graphs()
    found = step(model, cases, torch.compile(model, backend=graphs.backend, fullgraph=True))
    for (what, y), (_, expected) in zip(found, wanted, strict=True):
        close(y, expected, what)
    same_counts(graphs, comm)


def test_every_step_is_traced() -> None:
    assert set(functions._MOVES) == {verb.moves for verb in STEPS.values()}


@pytest.mark.parametrize("name", GROUPS)
def test_styles(pool: Any, name: str) -> None:
    pool.run(2, some_styles, (name,), 1 if everything() else 3)


@pytest.mark.nightly
def test_styles_on_four_ranks(pool: Any) -> None:
    """Several styles of each group, in one graph; `tests.torch.compiled_rows` has all."""
    pool.run(4, some_styles, tuple(GROUPS), 8)
