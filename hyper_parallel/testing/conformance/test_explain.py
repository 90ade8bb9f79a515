"""Predictions of `explain` equal `CommTrace`: every collective, in order, with module, direction and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    DTensor,
    HeadNormParallel,
    NoParallel,
    ParameterParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    describe,
    explain,
    fully_shard,
    get_platform,
    parallelize_module,
    replicate,
    visualize_plan,
)
from hyper_parallel.planning import DryStep
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import block_plan, floats
from hyper_parallel.testing.conformance.checks import needs_gradients
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh

IDS = np.arange(12, dtype=np.int64).reshape(3, 4) % 7


def _prepared(style: Any) -> dict[str, Any]:
    return {"": style, "up": ColwiseParallel(), "down": RowwiseParallel()}


def _sharded_data(model: Any, mesh: Any) -> None:
    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh)


#: name -> (the model, the plan, this rank's input)
CASES: dict[str, tuple[Callable[[Any], Any], Any, np.ndarray]] = {
    "mlp": (lambda a: a.Mlp(12, 24), {"up": ColwiseParallel(), "down": RowwiseParallel()}, floats(3, 4, 12)),
    "uneven": (lambda a: a.Mlp(7, 9), {"up": ColwiseParallel(), "down": RowwiseParallel()}, floats(3, 7)),
    "empty shards": (lambda a: a.Mlp(5, 1), {"up": ColwiseParallel(), "down": RowwiseParallel()}, floats(3, 5)),
    "gathered": (
        lambda a: a.Mlp(12, 24),
        {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())},
        floats(3, 12),
    ),
    "block": (lambda a: a.Block(24, 36, 4), block_plan(local_between=True), floats(2, 3, 24)),
    "block of DTensors": (lambda a: a.Block(24, 36, 4), block_plan(local_between=False), floats(2, 3, 24)),
    "embedding by rows": (lambda a: a.embedding_module(8, 6), {"": RowwiseParallel(input_layouts=Replicate())}, IDS),
    "embedding by columns": (lambda a: a.embedding_module(8, 6), ColwiseParallel(output_layouts=Replicate()), IDS),
    "tied": (
        lambda a: a.Tied(8, 6),
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
        IDS,
    ),
    "sequence": (lambda a: a.norm_module(8), SequenceParallel(use_local_output=True), floats(2, 3, 8)),
    "whole": (lambda a: a.linear_module(8, 6), NoParallel(input_layout=Shard(0)), floats(2, 8)),
    "parameters": (lambda a: a.linear_module(8, 6), ParameterParallel({"weight": Shard(1)}), floats(2, 8)),
    "heads": (lambda a: a.norm_module(8), HeadNormParallel(), floats(2, 3, 8)),
    "input": (
        lambda a: a.Mlp(12, 24),
        _prepared(PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)),
        floats(2, 12),
    ),
    "output": (
        lambda a: a.Mlp(12, 24),
        _prepared(PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))),
        floats(8, 12),
    ),
    "input and output": (
        lambda a: a.Mlp(12, 24),
        _prepared(
            PrepareModuleInputOutput(
                input_layouts=Shard(0),
                desired_input_layouts=Replicate(),
                use_local_input=True,
                output_layouts=Replicate(),
                desired_output_layouts=Shard(0),
            )
        ),
        floats(2, 12),
    ),
    "fully sharded": (lambda a: a.Mlp(12, 7), _sharded_data, floats(2, 12)),
    "replicated": (lambda a: a.Mlp(12, 7), lambda model, mesh: replicate(model, device_mesh=mesh), floats(2, 12)),
}


def facts(collectives: list[Any]) -> list[tuple]:
    return [(c.module, c.direction, c.kind, c.op, c.ranks, c.shape, c.dtype, c.bytes) for c in collectives]


@on_mesh()
def foreseen_and_seen(mesh: Any, case: str) -> tuple[list[tuple], list[tuple], list[tuple]]:
    """Return the collectives that `explain` predicts for this rank, and the collectives of two real steps."""
    adapter, platform = get_adapter(), get_platform()
    build, plan, array = CASES[case]
    model = adapter.load(build(adapter), np.random.default_rng(3))

    def class_of_a_tensor() -> type:
        return type(DTensor.from_local(adapter.tensor(array), mesh, [Replicate()]))

    own_class = class_of_a_tensor()
    foreseen = explain(model, mesh, plan, adapter.tensor(array), rank=mesh.get_local_rank())
    assert class_of_a_tensor() is own_class  # fast paths of modules look at the class
    assert foreseen.mesh == {"tp": mesh.size()} and not foreseen.unmatched
    before = describe(model).bytes
    if callable(plan) and not hasattr(plan, "apply"):
        model = plan(model, mesh) or model
    else:
        parallelize_module(model, mesh, plan)
    assert describe(model).local_bytes == foreseen.model.local_bytes and before == foreseen.model.bytes
    parameters = [p for _, module in platform.named_modules(model) for _, p in platform.named_parameters(module)]
    seen = []

    def loss() -> Any:
        y = adapter.call(model, adapter.tensor(array))
        return (y.to_local() if isinstance(y, DTensor) else y).sum()

    for _ in range(2):
        with CommTrace(model) as trace:
            platform.differentiate(loss, parameters)
        seen.append(facts(trace.collectives))
        assert all(c.seconds is not None and c.start is not None for c in trace.collectives)
    json.loads(trace.to_json())
    return facts(foreseen.collectives), *seen


@on_ranks(2, 3)
@pytest.mark.parametrize("case", CASES)
def test_what_is_foreseen_is_seen(pool: Any, case: str, world_size: int) -> None:
    needs_gradients()
    for foreseen, first, second in pool.run(world_size, foreseen_and_seen, case):
        assert foreseen == first
        assert sorted(second) == sorted(first)  # the second step knows the next unit to gather
        assert foreseen


@on_mesh(names=("tp",))
def texts(mesh: Any, folder: str) -> tuple[str, str, str]:
    adapter = get_adapter()
    model = adapter.load(adapter.Mlp(4, 8), np.random.default_rng(3))
    assert "weight (8, 4) float32" in str(describe(model)) and "ColwiseParallel" not in repr(model)
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    parallelize_module(model, mesh, {"": style, "up": ColwiseParallel(), "down": RowwiseParallel(heads=2)})
    found, path = describe(model), f"{folder}/plan{mesh.get_local_rank()}.svg"
    assert found.as_dict()["local_bytes"] == found.local_bytes < found.bytes
    assert found.bytes == sum(m.bytes for m in found.modules)
    shown = visualize_plan(model, path=path)
    with open(path, encoding="utf-8") as file:
        assert file.read().startswith("<svg")
    return str(found), repr(model), shown


def test_texts(pool: Any, tmp_path: Any) -> None:
    described, printed, shown = pool.run(2, texts, str(tmp_path))[0]
    assert "up  Linear  ColwiseParallel()" in described.replace("Dense", "Linear")
    assert "weight (8, 4) -> (4, 4) float32, Shard(0) on tp" in described
    assert "ColwiseParallel(), weight: Shard(0) on tp, bias: Shard(0) on tp" in printed
    assert "RowwiseParallel(heads=2), weight: Shard(1) on tp, bias: Replicate() on tp" in printed
    assert "PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())" in printed
    assert "   =   weight (8, 4) -> (4, 4)" in shown and "   ||| weight (4, 8) -> (4, 4)" in shown
    assert "   []  bias (4,) float32, Replicate() on tp" in shown


@on_mesh()
def refused(mesh: Any) -> None:
    with pytest.raises(TypeError, match="describe takes a"):
        describe("model")


def test_what_is_no_model(pool: Any) -> None:
    pool.run(1, refused)


def job_of_any_size(case: str, size: int) -> tuple[int, list[tuple]]:
    adapter = get_adapter()
    build, plan, array = CASES[case]
    step = DryStep(adapter.load(build(adapter), np.random.default_rng(3)), size, plan, rank=size - 1)
    return step.mesh.size(), facts(step.run(adapter.tensor(array)))


@on_mesh()
def any_size(mesh: Any) -> None:
    size, found = job_of_any_size("mlp", 16384)
    assert size == 16384 and [(f[0], f[1], f[2], f[4]) for f in found] == [("down", "forward", "all_reduce", 16384)]


def test_any_size(pool: Any) -> None:
    """Check `explain` for a mesh larger than any machine, in a process that has another mesh."""
    needs_gradients()
    pool.run(1, any_size)
