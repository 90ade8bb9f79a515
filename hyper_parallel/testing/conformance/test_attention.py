"""Attention under tensor parallelism. The cases are grouped heads, fewer key and value heads than ranks, norms inside
the heads, and fused weights."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel import (
    ColwiseParallel,
    HeadNormParallel,
    PackedShard,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import compare, floats
from hyper_parallel.testing.extent import in_gate, on_ranks


def expect(world_size: int, forward: dict[str, int], backward: dict[str, int]) -> dict[str, dict[str, int]]:
    return {"forward": forward, "backward": backward} if world_size > 1 else {"forward": {}, "backward": {}}


@spmd.on_mesh()
def grouped(mesh: Any, heads: int, kv_heads: int, normed: bool, plan: dict[str, Any]) -> Any:
    return compare(
        lambda adapter: adapter.GroupedAttention(heads, kv_heads, 2, normed), plan, floats(2, 5, 2 * heads), mesh
    )


@on_ranks(1, 2, 3, 4)
def test_grouped_heads(pool: Any, world_size: int) -> None:
    plan = {"w[qkv]": "colwise", "wo": "rowwise"}
    for counts in pool.run(world_size, grouped, 24, 12, False, plan):
        assert counts == expect(world_size, {"all_reduce": 1}, {"all_reduce": 1})


NORM_STYLES = {
    "not in the plan": {},
    "by name": {"[qk]_norm": "replicated_with_grad_allreduce"},
    "as a sequence": {"[qk]_norm": SequenceParallel(sequence_dim=2, use_local_output=True)},
}


@pytest.mark.parametrize("norms", NORM_STYLES)
@on_ranks(1, 2, 3, 4)
def test_norms_inside_heads(pool: Any, world_size: int, norms: str) -> None:
    plan = {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel(), **NORM_STYLES[norms]}
    for counts in pool.run(world_size, grouped, 24, 12, True, plan):
        # The weights of two norms, besides the input.
        assert counts == expect(world_size, {"all_reduce": 1}, {"all_reduce": 3})


@pytest.mark.parametrize("norms", [{}, {"[qk]_norm": HeadNormParallel(use_local_output=False)}], ids=["auto", "named"])
@on_ranks(1, 2, 3, 4)
def test_norms_inside_distributed_heads(pool: Any, world_size: int, norms: dict[str, Any]) -> None:
    plan = {"w[qkv]": ColwiseParallel(use_local_output=False), "wo": RowwiseParallel(), **norms}
    for counts in pool.run(world_size, grouped, 24, 12, True, plan):
        assert counts == expect(world_size, {"all_reduce": 1}, {"all_reduce": 3})


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("world_size", "kv_heads"),
    in_gate([(1, 2), (2, 2), (4, 2), (2, 1), (3, 1), (4, 1)], [(1, 2), (4, 2), (3, 1)], unpack=True),
)
def test_fewer_key_value_heads_than_ranks(pool: Any, world_size: int, kv_heads: int, normed: bool) -> None:
    shared = ColwiseParallel(heads=kv_heads, replicate_heads=True)
    plan = {"wq": ColwiseParallel(heads=12), "w[kv]": shared, "wo": RowwiseParallel(heads=12)}
    backward = {"all_reduce": 1 + (2 if world_size > kv_heads else 0) + (2 if normed else 0)}
    for counts in pool.run(world_size, grouped, 12, kv_heads, normed, plan):
        assert counts == expect(world_size, {"all_reduce": 1}, backward)


@pytest.mark.parametrize(("world_size", "kv_heads"), in_gate([(2, 2), (4, 2)], [(4, 2)], unpack=True))
def test_fewer_key_value_heads_that_stay_distributed(pool: Any, world_size: int, kv_heads: int) -> None:
    """Check that with fewer key and value heads than ranks, keys and values are replicated.

    Attention then slices this rank's heads from them.
    """
    kept = {"wq": ColwiseParallel(use_local_output=False), "wo": RowwiseParallel()}
    plan = {**kept, "w[kv]": ColwiseParallel(heads=kv_heads, replicate_heads=True, use_local_output=False)}
    pool.run(world_size, grouped, 12, kv_heads, False, plan)


@pytest.mark.parametrize(("world_size", "heads", "kv_heads"), [(4, 12, 2), (4, 6, 3), (3, 4, 2)])
def test_any_number_of_heads_when_they_stay_distributed(pool: Any, world_size: int, heads: int, kv_heads: int) -> None:
    plan = {
        "wq": ColwiseParallel(use_local_output=False),
        "w[kv]": ColwiseParallel(use_local_output=False),
        "wo": RowwiseParallel(),
    }
    pool.run(world_size, grouped, heads, kv_heads, False, plan)


@spmd.on_mesh()
def fused(mesh: Any, kv_heads: int, viewed: bool, style: Any) -> Any:
    prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {"": prepared, "wqkv": style, "wo": RowwiseParallel()}
    if style.use_local_output:
        del plan[""]
    return compare(lambda adapter: adapter.FusedAttention(12, kv_heads, 2, viewed), plan, floats(2, 5, 24), mesh)


@pytest.mark.parametrize("use_local_output", [True, False])
@on_ranks(1, 2, 3, 4)
def test_fused_projection(pool: Any, world_size: int, use_local_output: bool) -> None:
    once = expect(world_size, {"all_reduce": 1}, {"all_reduce": 1})
    grouped_heads = ColwiseParallel(heads=(12, 12, 12), use_local_output=use_local_output)
    for counts in pool.run(world_size, fused, 12, False, grouped_heads):
        assert counts == once
    for counts in pool.run(world_size, fused, 12, True, ColwiseParallel(packed=3, use_local_output=use_local_output)):
        assert counts == once
    if world_size != 4:
        sizes = ColwiseParallel(packed=(24, 12, 12), heads=(12, 6, 6), use_local_output=use_local_output)
        for counts in pool.run(world_size, fused, 6, False, sizes):
            assert counts == once


@spmd.on_mesh()
def gated(mesh: Any, hidden: int, style: Any) -> Any:
    return compare(
        lambda adapter: adapter.FusedGated(6, hidden), {"w13": style, "w2": "rowwise"}, floats(2, 3, 6), mesh
    )


@pytest.mark.parametrize("hidden", [12, 7], ids=["even", "uneven"])
@on_ranks(1, 2, 3, 4)
def test_fused_gate_and_up(pool: Any, world_size: int, hidden: int) -> None:
    for style in (ColwiseParallel(packed=2), ColwiseParallel(packed=2, use_local_output=False)):
        for counts in pool.run(world_size, gated, hidden, style):
            assert counts == expect(world_size, {"all_reduce": 1}, {"all_reduce": 1})


@spmd.on_mesh()
def packed_row(mesh: Any, n_in: int, sizes: Any) -> Any:
    return compare(
        lambda adapter: adapter.linear_module(n_in, 6),
        RowwiseParallel(packed=sizes),
        floats(2, n_in),
        mesh,
        takes=PackedShard(-1, sizes),
    )


@pytest.mark.parametrize("sizes", [2, (8, 4), (5, 2, 1)], ids=str)
@on_ranks(1, 2, 3, 4, gate=(3, 4))
def test_packed_input_features(pool: Any, world_size: int, sizes: Any) -> None:
    n_in = 12 if isinstance(sizes, int) else sum(sizes)
    for counts in pool.run(world_size, packed_row, n_in, sizes):
        assert counts == expect(world_size, {"all_reduce": 1}, {})


@spmd.on_mesh()
def packed_gathered(mesh: Any) -> Any:
    """Check that the gathered output of a packed weight has the feature order of a single device."""
    return compare(
        lambda adapter: adapter.linear_module(6, 12),
        ColwiseParallel(packed=(7, 3, 2), output_layouts=Replicate()),
        floats(2, 6),
        mesh,
    )


@on_ranks(1, 2, 3, 4)
def test_packed_output_gathered(pool: Any, world_size: int) -> None:
    for counts in pool.run(world_size, packed_gathered):
        assert counts == expect(world_size, {"all_gather": 1}, {"all_reduce": 1})


@spmd.on_mesh()
def state_of_packed(mesh: Any) -> None:
    """Check that a checkpoint contains the packed weight of a single device."""
    import numpy as np

    adapter = get_adapter()
    single, sharded = (adapter.load(adapter.linear_module(6, 12), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, ColwiseParallel(packed=(7, 3, 2)))
    assert sharded.weight.placements == (PackedShard(0, (7, 3, 2)),)
    np.testing.assert_array_equal(adapter.numpy(sharded.weight), adapter.numpy(single.weight))


def test_state_of_packed_weight(pool: Any) -> None:
    pool.run(3, state_of_packed)
