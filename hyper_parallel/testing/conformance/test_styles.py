"""Styles and plans: outputs and all gradients equal the single-device model's.

There are as many collectives as in hand-written code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.comparisons import block, compare, floats
from hyper_parallel.testing.extent import on_ranks


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
@on_ranks(1, 2, 3, 4)
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
@on_ranks(1, 2, 3, 4)
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
@on_ranks(1, 2, 3, 4)
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


@on_ranks(1, 2, 3, 4)
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
@on_ranks(1, 2, 3, 4)
def test_attention_shares_one_backward_collective(pool: Any, world_size: int, prepared: bool) -> None:
    one = {"all_reduce": 1} if world_size > 1 else {}
    for counts in pool.run(world_size, attention, prepared):
        assert counts == {"forward": one, "backward": one}


@pytest.mark.parametrize("local_between", [True, False])
@on_ranks(1, 2, 3, 4)
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


@on_ranks(1, 2, 3, 4)
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
@on_ranks(1, 2, 3, 4)
def test_tied_embedding_and_head(pool: Any, world_size: int, vocabulary: int) -> None:
    for counts in pool.run(world_size, tied, vocabulary):
        if world_size > 1:
            assert counts == {"forward": {"all_reduce": 1, "all_gather": 1}, "backward": {"all_reduce": 1}}
