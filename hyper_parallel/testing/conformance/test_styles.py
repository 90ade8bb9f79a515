"""Styles and plans: outputs, input gradients and parameter gradients equal the single-device model's, and the number of
collectives is that of hand-written code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.conformance.checks import same

WORLD_SIZES = [1, 2, 3, 4]


def compare(
    build: Callable[[Any], Any],
    plan: Any,
    array: np.ndarray,
    mesh: Any,
    *,
    takes: Any = None,
    gives: Any = None,
    distributed_input: bool = False,
) -> dict[str, dict[str, int]]:
    """Parallelise a model and compare one forward and backward with the unsharded one.

    Args:
        build: ``build(adapter)`` makes the model; called twice, the weights are loaded after.
        plan: the plan.
        array: the whole input.
        mesh: 1-D mesh.
        takes: placement with which the model is given its input as a plain local tensor; None: the whole of it.
        distributed_input: give the input as a DTensor placed so instead.
        gives: placement of the plain local output; None: the whole of it.

    Returns:
        Collectives in forward and in backward.
    """
    adapter = get_adapter()
    single, sharded = (adapter.load(build(adapter), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, plan)
    takes, gives = takes or Replicate(), gives or Replicate()
    weights: list[np.ndarray] = []

    def reference(x: Any) -> Any:
        y = adapter.call(single, x)
        weights.append(np.random.default_rng(6).standard_normal(tuple(y.shape)).astype(np.float32))
        return adapter.weighted_sum(y, adapter.tensor(weights[0])), y

    counts: dict[str, dict[str, int]] = {}

    def distributed(x: Any) -> Any:
        if distributed_input:
            x = DTensor.from_local(x, mesh, [takes], shape=array.shape)
        with CommDebugMode() as comm:
            y = adapter.call(sharded, x)
        counts["forward"] = comm.get_comm_counts()
        assert not isinstance(y, DTensor)
        whole = DTensor.from_local(y, mesh, [gives], shape=weights[0].shape)
        mine = weights[0][whole._layout.local_index()]
        return adapter.weighted_sum(y, adapter.tensor(mine)), whole

    y, grad_x, grads = adapter.model_value_and_grads(single, reference, array)
    local = array[slices_of(takes, array.shape, mesh)]
    with CommDebugMode() as comm:
        got_y, got_grad_x, got_grads = adapter.model_value_and_grads(sharded, distributed, local)
    counts["backward"] = difference(comm.get_comm_counts(), counts["forward"])
    same(adapter.numpy(got_y), adapter.numpy(y), "output")
    if grad_x is not None:
        same(got_grad_x, grad_x[slices_of(takes, array.shape, mesh)], "gradient of the input")
    assert set(got_grads) == set(grads)
    for name in grads:
        if grads[name] is None:
            assert got_grads[name] is None, name
        else:
            same(adapter.numpy(got_grads[name]), adapter.numpy(grads[name]), f"gradient of {name}")
    return counts


def slices_of(placement: Any, shape: tuple[int, ...], mesh: Any) -> Any:
    from hyper_parallel.core.dtensor.layouts.layout import get_layout

    return get_layout(mesh, (placement,), shape).local_index()


def difference(more: dict[str, int], less: dict[str, int]) -> dict[str, int]:
    return {k: n - less.get(k, 0) for k, n in more.items() if n > less.get(k, 0)}


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


@spmd.on_mesh()
def column(mesh: Any, n_in: int, n_out: int, bias: bool) -> Any:
    return compare(
        lambda adapter: adapter.linear_module(n_in, n_out, bias),
        ColwiseParallel(),
        floats(3, n_in),
        mesh,
        gives=Shard(-1),
    )


@spmd.on_mesh()
def row(mesh: Any, n_in: int, n_out: int, bias: bool) -> Any:
    return compare(
        lambda adapter: adapter.linear_module(n_in, n_out, bias),
        RowwiseParallel(),
        floats(3, n_in),
        mesh,
        takes=Shard(-1),
    )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(12, 24), (7, 5)], ids=["even", "uneven"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_linear(pool: Any, world_size: int, sizes: tuple[int, int], bias: bool) -> None:
    many = world_size > 1
    for counts in pool.run(world_size, column, *sizes, bias):
        assert counts == {"forward": {}, "backward": {"all_reduce": 1} if many else {}}
    for counts in pool.run(world_size, row, *sizes, bias):
        assert counts == {"forward": {"all_reduce": 1} if many else {}, "backward": {}}


@spmd.on_mesh()
def mlp(mesh: Any, features: int, hidden: int) -> Any:
    return compare(
        lambda adapter: adapter.Mlp(features, hidden),
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
        floats(2, 3, features),
        mesh,
    )


@pytest.mark.parametrize("sizes", [(8, 24), (6, 7)], ids=["even", "uneven"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_mlp(pool: Any, world_size: int, sizes: tuple[int, int]) -> None:
    one = {"all_reduce": 1} if world_size > 1 else {}
    for counts in pool.run(world_size, mlp, *sizes):
        assert counts == {"forward": one, "backward": one}


@spmd.on_mesh()
def embedding(mesh: Any, style: str, vocabulary: int, features: int) -> Any:
    ids = np.random.default_rng(8).integers(0, vocabulary, (4, 12)).astype(np.int64)
    plan, gives = {
        "row": (RowwiseParallel(input_layouts=Replicate()), Replicate()),
        "row to sequence": (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), Shard(1)),
        "column": (ColwiseParallel(), Shard(-1)),
        "column to whole": (ColwiseParallel(output_layouts=Replicate()), Replicate()),
    }[style]
    return compare(lambda adapter: adapter.embedding_module(vocabulary, features), plan, ids, mesh, gives=gives)


@pytest.mark.parametrize("sizes", [(12, 24), (11, 7)], ids=["even", "uneven"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_embedding(pool: Any, world_size: int, sizes: tuple[int, int]) -> None:
    expected = {
        "row": ({"all_reduce": 1}, {}),
        "row to sequence": ({"reduce_scatter": 1}, {"all_gather": 1}),
        "column": ({}, {}),
        "column to whole": ({"all_gather": 1}, {}),
    }
    for style, (forward, backward) in expected.items():
        for counts in pool.run(world_size, embedding, style, *sizes):
            wanted = {"forward": forward, "backward": backward} if world_size > 1 else {"forward": {}, "backward": {}}
            assert counts == wanted, style


@spmd.on_mesh()
def sequence_norm(mesh: Any, length: int) -> Any:
    return compare(
        lambda adapter: adapter.norm_module(6),
        {"": SequenceParallel(use_local_output=True)},
        floats(2, length, 6),
        mesh,
        takes=Shard(1),
        gives=Shard(1),
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sequence_parallel_norm(pool: Any, world_size: int) -> None:
    for counts in pool.run(world_size, sequence_norm, 12):
        # The gradients of weight and bias.
        assert counts == {"forward": {}, "backward": {"all_reduce": 2} if world_size > 1 else {}}


@spmd.on_mesh()
def attention(mesh: Any, prepared: bool) -> Any:
    plan: dict[str, Any] = {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel()}
    if prepared:
        plan[""] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return compare(lambda adapter: adapter.Attention(24, 2), plan, floats(2, 5, 24), mesh)


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_attention_shares_one_backward_collective(pool: Any, world_size: int, prepared: bool) -> None:
    one = {"all_reduce": 1} if world_size > 1 else {}
    for counts in pool.run(world_size, attention, prepared):
        assert counts == {"forward": one, "backward": one}


def block_plan(local_between: bool) -> dict[str, Any]:
    """Sequence-parallel Llama block."""
    into = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return {
        "": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Shard(1),
        ),
        "norm?": SequenceParallel(),
        "attention": into,
        "attention.w[qkv]": ColwiseParallel(use_local_output=local_between),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "feed_forward": into,
        "feed_forward.w[13]": ColwiseParallel(use_local_output=local_between),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }


@spmd.on_mesh()
def block(mesh: Any, local_between: bool, length: int) -> Any:
    return compare(
        lambda adapter: adapter.Block(24, 36, 2),
        block_plan(local_between),
        floats(2, length, 24),
        mesh,
        takes=Shard(1),
        gives=Shard(1),
    )


@pytest.mark.parametrize("local_between", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sequence_parallel_block(pool: Any, world_size: int, local_between: bool) -> None:
    if world_size == 1:
        expected: dict = {"forward": {}, "backward": {}}
    else:
        # Each half: gather in, reduce-scatter out, and the other way round in backward. Weight and bias of two norms.
        pair = {"all_gather": 2, "reduce_scatter": 2}
        expected = {"forward": pair, "backward": {**pair, "all_reduce": 4}}
    for counts in pool.run(world_size, block, local_between, 12):
        assert counts == expected


@spmd.on_mesh()
def prepared_output(mesh: Any) -> Any:
    return compare(
        lambda adapter: adapter.Mlp(12, 24),
        {
            "": PrepareModuleOutput(output_layouts=Shard(-1), desired_output_layouts=Replicate()),
            "up": ColwiseParallel(output_layouts=Replicate()),
            "down": ColwiseParallel(),
        },
        floats(3, 12),
        mesh,
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_prepare_module_output(pool: Any, world_size: int) -> None:
    # `up` gathers its output and the root that of `down`; backward slices, and sums the gradients of both inputs.
    for counts in pool.run(world_size, prepared_output):
        if world_size > 1:
            assert counts == {"forward": {"all_gather": 2}, "backward": {"all_reduce": 2}}
        else:
            assert counts == {"forward": {}, "backward": {}}


@spmd.on_mesh()
def tied(mesh: Any, vocabulary: int) -> Any:
    ids = np.random.default_rng(8).integers(0, vocabulary, (3, 4)).astype(np.int64)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return compare(lambda adapter: adapter.Tied(vocabulary, 6), plan, ids, mesh)


@pytest.mark.parametrize("vocabulary", [12, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tied_embedding_and_head(pool: Any, world_size: int, vocabulary: int) -> None:
    for counts in pool.run(world_size, tied, vocabulary):
        if world_size > 1:
            assert counts == {"forward": {"all_reduce": 1, "all_gather": 1}, "backward": {"all_reduce": 1}}
