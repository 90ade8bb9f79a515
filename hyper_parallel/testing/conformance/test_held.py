"""Parameters that were replaced after `parallelize_module`.

A replacement that is placed as the plan says works. Otherwise all ranks refuse it before any communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    HeadNormParallel,
    NoParallel,
    ParameterParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    get_platform,
    implicit_replication,
    overlap_collectives,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import on_ranks

IDS = np.array([[1, 2, 5], [0, 3, 1]], np.int64)

#: The module, its plan, and its whole input.
CASES: dict[str, tuple[Callable[[], Any], Any, np.ndarray]] = {
    "colwise": (lambda: get_adapter().linear_module(6, 12), ColwiseParallel(output_layouts=Replicate()), floats(3, 6)),
    "colwise, short": (lambda: get_adapter().linear_module(6, 12), ColwiseParallel(), floats(3, 6)),
    "rowwise": (lambda: get_adapter().linear_module(6, 12), RowwiseParallel(input_layouts=Replicate()), floats(3, 6)),
    "embedding by features": (
        lambda: get_adapter().embedding_module(12, 6),
        ColwiseParallel(output_layouts=Replicate()),
        IDS,
    ),
    "embedding by vocabulary": (
        lambda: get_adapter().embedding_module(12, 6),
        RowwiseParallel(input_layouts=Replicate()),
        IDS,
    ),
    "norm": (lambda: get_adapter().norm_module(6), SequenceParallel(sequence_dim=0), floats(4, 6)),
    "head norm": (lambda: get_adapter().RmsNorm(6), HeadNormParallel(), floats(2, 3, 6)),
    "replicated": (lambda: get_adapter().linear_module(6, 12), NoParallel(), floats(3, 6)),
    "by name": (
        lambda: get_adapter().Projection(6, 12),
        ParameterParallel({"kernel": Shard(1), "shift": Shard(0)}),
        floats(3, 6),
    ),
}


def first_parameter(module: Any) -> str:
    return next(name for name, _ in get_platform().named_parameters(module))


def assign(module: Any, name: str, value: Any) -> None:
    setattr(module, name, get_platform().Parameter(value))


def other_placement(placement: Any, ndim: int) -> Any:
    return Replicate() if placement is not Replicate() else Shard(ndim - 1)


def replaced(case: str) -> None:
    adapter = get_adapter()
    # Process groups are made on all ranks of the pool.
    mesh, other_mesh = spmd.device_mesh(), spmd.device_mesh(names=("other",))
    if mesh is None:
        return
    make, style, array = CASES[case]
    module = adapter.load(make(), np.random.default_rng(5))
    name = first_parameter(module)
    whole = adapter.numpy(getattr(module, name))
    parallelize_module(module, mesh, style)
    planned = getattr(module, name)
    placement = planned.placements[0]
    x = adapter.tensor(array)
    given = DTensor.from_local(x, mesh, [Replicate()])

    def refused(value: Any, *words: str) -> None:
        assign(module, name, value)
        for each in (x, given):
            with fails(ValueError, repr(name), *words, str([placement])):
                adapter.call(module, each)
            with implicit_replication(), fails(ValueError, repr(name), *words, str([placement])):
                adapter.call(module, each)

    refused(adapter.tensor(whole + 0.5), "plain tensor", "distribute_tensor")
    refused(adapter.tensor(adapter.numpy(planned.to_local()) + 0.5), "plain tensor", "distribute_tensor")
    elsewhere = other_placement(placement, whole.ndim)
    refused(distribute_tensor(adapter.tensor(whole), mesh, [elsewhere]), str([elsewhere]), "redistribute")
    refused(distribute_tensor(adapter.tensor(whole), other_mesh, [placement]), "'other'", "distribute_tensor")

    # Distributed as the plan says it computes, at once.
    values = floats(*whole.shape) + 0.5
    single = make()
    adapter.load(single, np.random.default_rng(5))
    assign(single, name, adapter.tensor(values))
    assign(module, name, distribute_tensor(adapter.tensor(values), mesh, [placement]))
    wanted = adapter.numpy(adapter.call(single, x))
    if case in ("colwise, short", "norm", "head norm"):
        return  # these outputs are this rank's part of those that `values_of_replaced` compares
    same(adapter.numpy(adapter.call(module, x)), wanted, "output")


@pytest.mark.parametrize("case", CASES)
@on_ranks(2, 3)
def test_replaced(pool: Any, world_size: int, case: str) -> None:
    """Check replacements: a plain tensor, full or of the shard's shape; another placement; another mesh."""
    pool.run(world_size, replaced, case)


@spmd.on_mesh()
def replaced_in_a_model(mesh: Any) -> None:
    adapter, platform = get_adapter(), get_platform()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def both() -> tuple[Any, Any]:
        single, sharded = (adapter.load(adapter.Mlp(6, 12), np.random.default_rng(5)) for _ in range(2))
        return single, parallelize_module(sharded, mesh, plan)

    x = adapter.tensor(floats(3, 6))
    for path in ("up", "down"):
        # A bias that is plain, names the module.
        _, sharded = both()
        assign(getattr(sharded, path), "bias", adapter.tensor(floats(12 if path == "up" else 6)))
        if path == "up":
            with fails(ValueError, "'bias'", f"'{path}'", "plain tensor"):
                adapter.call(sharded, x)
        # A module below a style that replicates all.
        model = adapter.load(adapter.Mlp(6, 12), np.random.default_rng(5))
        parallelize_module(model, mesh, NoParallel())
        assign(getattr(model, path), "weight", adapter.tensor(floats(*getattr(model, path).weight.shape)))
        with fails(ValueError, f"'{path}.weight'", "plain tensor"):
            adapter.call(model, x)
        # More hidden features, placed as the plan says: another layout, and right.
    single, sharded = both()
    more = {"up.weight": floats(16, 6), "up.bias": floats(16), "down.weight": floats(6, 16)}
    for name, values in more.items():
        path, _, attribute = name.partition(".")
        placement = getattr(getattr(sharded, path), attribute).placements[0]
        assign(getattr(single, path), attribute, adapter.tensor(values))
        assign(getattr(sharded, path), attribute, distribute_tensor(adapter.tensor(values), mesh, [placement]))
    same(adapter.numpy(adapter.call(sharded, x)), adapter.numpy(adapter.call(single, x)), "output with more features")
    with overlap_collectives(chunks=2, least=0):
        same(adapter.numpy(adapter.call(sharded, x)), adapter.numpy(adapter.call(single, x)), "overlapped")

    # A weight that something else holds and gives now.
    single, sharded = both()
    for model in (single, sharded):
        for path in ("up", "down"):
            module = getattr(model, path)
            own: Any = platform.own_parameters(module)
            object.__setattr__(module, "weight", own.pop("weight"))
    same(adapter.numpy(adapter.call(sharded, x)), adapter.numpy(adapter.call(single, x)), "output of computed weights")


@on_ranks(1, 2, 3, 4)
def test_replaced_in_a_model(pool: Any, world_size: int) -> None:
    """Check replaced biases, parameters of submodules, other sizes, and computed weights."""
    pool.run(world_size, replaced_in_a_model)


@spmd.on_mesh()
def replaced_norm(mesh: Any) -> None:
    """Check norms whose parameters were replaced or removed: the fast path leaves them to the general forward."""
    adapter, platform = get_adapter(), get_platform()
    array = floats(mesh.size() * 2, 6)
    single, sharded = (adapter.load(adapter.norm_module(6), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, SequenceParallel(sequence_dim=0))
    weights = adapter.tensor(floats(*array.shape) + 1)
    name = first_parameter(sharded)

    def check(what: str) -> None:
        def loss(model: Any, x: Any) -> Any:
            y = adapter.call(model, x)
            y = y.full_tensor() if isinstance(y, DTensor) else y
            return adapter.weighted_sum(y, weights), y

        found, wanted = (
            adapter.model_value_and_grads(
                model, lambda x, model=model: loss(model, x if model is single else shard_of(x)), array
            )
            for model in (single, sharded)
        )
        same(adapter.numpy(found[0]), adapter.numpy(wanted[0]), what)
        same(found[1], wanted[1], f"{what}, gradient of the input")

    def shard_of(x: Any) -> Any:
        return DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)])

    check("as it was")
    for model in (single, sharded):
        own: Any = platform.own_parameters(model)
        object.__setattr__(model, name, own.pop(name))
    check("held by something else")


@on_ranks(1, 2)
def test_replaced_norm(pool: Any, world_size: int) -> None:
    """Check a norm whose weight is no longer its own parameter."""
    pool.run(world_size, replaced_norm)


@spmd.on_mesh()
def computed_before(mesh: Any) -> None:
    """Check a linear layer whose weight was computed, not stored, before the plan was applied."""
    platform, probe = get_platform(), get_adapter().Probe()
    platform.register_linear_module(type(probe), weight="kernel")
    try:
        with fails(ValueError, "'kernel'", "after parallelize_module"):
            parallelize_module(probe, mesh, ColwiseParallel())
        with fails(ValueError, "'kernel'", "after parallelize_module"):
            ColwiseParallel().features(probe, platform)
    finally:
        del platform.linear_kinds[type(probe)]


@on_ranks(1, 2)
def test_computed_before(pool: Any, world_size: int) -> None:
    """Check that the plan is refused, and that the message gives the right order."""
    pool.run(world_size, computed_before)


@spmd.on_mesh()
def ties_in_two_calls(mesh: Any) -> None:
    adapter = get_adapter()
    embedding = RowwiseParallel(input_layouts=Replicate())
    head = ColwiseParallel(output_layouts=Replicate())
    ids = adapter.tensor(IDS)

    def model() -> Any:
        return adapter.load(adapter.Tied(12, 6), np.random.default_rng(5))

    wanted = adapter.numpy(adapter.call(model(), ids))
    with fails(ValueError, "'head'", "'embedding'", "to the same plan"):
        parallelize_module(model(), mesh, {"embedding": embedding})
    tied = model()
    parallelize_module(tied.embedding, mesh, embedding)
    parallelize_module(tied.head, mesh, head)
    same(adapter.numpy(adapter.call(tied, ids)), wanted, "output")
    tied = model()
    parallelize_module(tied.embedding, mesh, embedding)
    with fails(ValueError, type(tied.head).__name__, "another module with this parameter", "the same placement"):
        parallelize_module(tied.head, mesh, RowwiseParallel(input_layouts=Replicate()))


@on_ranks(2, 3)
def test_ties_in_two_calls(pool: Any, world_size: int) -> None:
    """Check that tied parameters in two calls are refused with a remedy.

    Modules without ties can be parallelised in two calls.
    """
    pool.run(world_size, ties_in_two_calls)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColwiseParallel(output_layouts=Shard(9)),
        lambda: RowwiseParallel(output_layouts=Shard(9)),
        lambda: RowwiseParallel(input_layouts=Shard(-10)),
        lambda: SequenceParallel(sequence_dim=9),
        lambda: NoParallel(input_layout=Shard(8)),
        lambda: PrepareModuleInput(input_layouts=Shard(9), desired_input_layouts=Replicate()),
        lambda: PrepareModuleInput(input_kwarg_layouts={"x": Shard(9)}, desired_input_kwarg_layouts={"x": Replicate()}),
        lambda: PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(9)),
        lambda: ParameterParallel({"kernel": Shard(9)}),
    ],
)
def test_no_such_dimension(make: Callable[[], Any]) -> None:
    """Check that a style refuses a dimension that no tensor can have."""
    with pytest.raises(ValueError, match=r"at most 8 dimensions; Shard\(-1\) is the last one"):
        make()
