"""Batches of sharded sequences: the loss over all tokens and its gradients equal a single device's."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    ContextParallel,
    DTensor,
    Partial,
    RankMismatchError,
    Replicate,
    Shard,
    check_ranks,
    distribute_tensor,
    fully_shard,
    loss_parallel,
    parallelize_module,
    replicate,
    shard_sequence,
    token_mean,
)
from hyper_parallel.core.rules.sequence_cut import balanced_ranges
from hyper_parallel.experimental import context_parallel
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_long_sequences import tells_of_attention
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.pool import WorkerPool

VOCABULARY, LENGTH, IGNORED = 11, 12, -100


def model(seed: int = 3) -> Any:
    adapter = get_adapter()
    return adapter.load(adapter.CausalModel(VOCABULARY, LENGTH, 4, 2, 3), np.random.default_rng(seed))


def tokens(samples: int, length: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, VOCABULARY, (samples, length)).astype(np.int64)


def labels_of(ids: np.ndarray, ignored: float = 0.3) -> np.ndarray:
    return np.where(np.random.default_rng(8).random(ids.shape) < ignored, IGNORED, ids)


def losses_of(logits: Any, labels: Any) -> Any:
    adapter = get_adapter()
    tokens = int(np.prod(labels.shape))
    return adapter.cross_entropy(adapter.reshape(logits, (tokens, VOCABULARY)), labels.reshape((tokens,)), "none")


def single_device(module: Any, ids: np.ndarray, labels: np.ndarray) -> tuple[Any, dict[str, Any]]:
    """Return the mean over all tokens that are not ignored, and its gradients."""
    adapter = get_adapter()
    shifted = np.concatenate([labels[:, 1:], np.full((len(ids), 1), IGNORED)], 1)
    positions = adapter.tensor(np.arange(ids.shape[1])[None])

    def loss(x: Any) -> Any:
        losses = losses_of(adapter.call(module, x, positions), adapter.tensor(shifted))
        mean = adapter.sum(losses) / float((shifted != IGNORED).sum())
        return mean, mean

    value, _, grads = adapter.model_value_and_grads(module, loss, ids)
    return adapter.numpy(value), {name: adapter.numpy(g) for name, g in grads.items()}


def cut(
    mesh: Any,
    across: Any,
    module: Any,
    ids: np.ndarray,
    labels: np.ndarray,
    averaged: bool = True,
    context: bool = True,
) -> Any:
    """Return the loss and the framework's gradients for sequences sharded over ``mesh``.

    A model with styles needs no ``context``.
    """
    adapter = get_adapter()
    batch = shard_sequence({"ids": adapter.tensor(ids), "labels": adapter.tensor(labels)}, mesh)

    def loss(x: Any) -> Any:
        y = adapter.call(module, x, batch["position_ids"])
        with loss_parallel(), CommDebugMode() as comm:
            losses = losses_of(y, batch["labels"])
            before = comm.get_total_counts()
            mean = token_mean(losses, batch["labels"], across, averaged=averaged)
            assert comm.get_total_counts() - before == sum(n > 1 for n in across.shape)
        return mean, mean

    with context_parallel(mesh, length=ids.shape[1]) if context else nullcontext():
        value, _, grads = adapter.model_value_and_grads(module, loss, adapter.numpy(batch["ids"]))
    return adapter.numpy(value), grads


@spmd.on_mesh()
def alone(mesh: Any) -> None:
    """Check that gradients without data parallelism are partial sums."""
    if not tells_of_attention(mesh):
        return
    adapter = get_adapter()
    for length in (max(mesh.size(), 2), 7):
        ids = tokens(2, length)
        labels = labels_of(ids, 0.3 if length == 7 else 0)
        wanted, wanted_grads = single_device(model(), ids, labels)
        for styled, context in ((False, True), (True, False), (True, True)):
            module = model()
            if styled:
                parallelize_module(module, mesh, {"attention": ContextParallel()})
            value, grads = cut(mesh, mesh, module, ids, labels, False, context)
            same(value, wanted, f"loss of {length} tokens, style {styled}", 1e-5)
            for name, whole in wanted_grads.items():
                total = DTensor.from_local(grads[name], mesh, [Partial()]).full_tensor()
                same(adapter.numpy(total), whole, f"gradient of {name}, {length} tokens, style {styled}", 1e-5)


@on_ranks(1, 2, 3, 4)
def test_one_loss(pool: Any, world_size: int) -> None:
    pool.run(world_size, alone)


#: How the model lies over data and sequences together.
PARALLEL = {
    "replicate": lambda module, mesh: replicate(module, mesh["dp", "cp"]._flatten("dp_cp")),
    "fully_shard": lambda module, mesh: fully_shard(module, mesh=mesh["dp", "cp"]._flatten("dp_cp")),
    "both": lambda module, mesh: fully_shard(module, mesh=mesh["dp", "cp"]),
}


def compare_with_data(mesh: Any, kind: str, plan: dict[str, Any] | None = None, styled: bool = False) -> None:
    """Check loss and gradients under data parallelism over dp and cp. Each dp rank has different samples."""
    if not tells_of_attention(mesh["cp"]):
        return
    adapter, module = get_adapter(), model()
    every = tokens(4, 7)
    labels = labels_of(every)
    labels[0] = IGNORED  # so that ranks have different numbers of tokens
    wanted, wanted_grads = single_device(model(), every, labels)
    if plan is not None:
        parallelize_module(module, mesh["tp"], plan)
    if styled:
        parallelize_module(module, mesh["cp"], {"attention": ContextParallel()})
    PARALLEL[kind](module, mesh)
    ranks, rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    mine = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
    value, grads = cut(mesh["cp"], mesh["dp", "cp"], module, every[mine], labels[mine], context=not styled)
    same(value, wanted, f"{kind}: loss", 1e-5)
    for name, whole in wanted_grads.items():
        same(adapter.numpy(grads[name]), whole, f"{kind}: gradient of {name}", 1e-5)


@spmd.on_mesh(2, 2, names=("dp", "cp"))
def with_data(mesh: Any) -> None:
    for kind in PARALLEL:
        compare_with_data(mesh, kind, styled=kind == "replicate")


def test_averages_over_data_and_sequences(pool: Any) -> None:
    pool.run(4, with_data)


#: Heads and classes on tp; heads as plain tensors, or as DTensors.
PLAN: dict[str, Any] = {
    "attention.w[qkv]": "colwise",
    "attention.wo": "rowwise",
    "head": ColwiseParallel(use_local_output=False),
}


DISTRIBUTED = PLAN | {"attention.w[qkv]": ColwiseParallel(use_local_output=False)}


@spmd.on_mesh(1, 2, 2, names=("dp", "cp", "tp"))
def with_heads(mesh: Any) -> None:
    compare_with_data(mesh, "fully_shard", PLAN)
    compare_with_data(mesh, "fully_shard", DISTRIBUTED, styled=True)


def test_tensor_parallel_heads_and_classes(pool: Any) -> None:
    pool.run(4, with_heads)


@spmd.on_mesh(2, 2, 2, names=("dp", "cp", "tp"))
def with_all(mesh: Any) -> None:
    for kind in PARALLEL:
        for plan in (PLAN, DISTRIBUTED):
            for styled in (False, True):
                compare_with_data(mesh, kind, plan, styled)


@pytest.mark.nightly
def test_data_sequences_and_heads() -> None:
    with WorkerPool(os.environ["HYPER_PARALLEL_PLATFORM"], size=8) as eight:
        eight.run(8, with_all)


@spmd.on_mesh()
def parts(mesh: Any) -> None:
    """Check `shard_sequence`: a sequence dimension for each entry, unsharded entries, given positions and labels."""
    adapter, rank = get_adapter(), mesh.get_local_rank(0)
    arrays = {
        "embeds": np.arange(28.0).reshape(2, 7, 2),
        "position_ids": np.arange(42).reshape(3, 2, 7),
        "attention_mask": np.ones((2, 7)),
        "tables": np.arange(14.0).reshape(7, 2),
        "targets": np.arange(14).reshape(2, 7),
    }
    batch = {**{name: adapter.tensor(x) for name, x in arrays.items()}, "note": "kept"}
    found = shard_sequence(batch, mesh, seq_dims={"tables": 0}, labels="targets", ignore_index=-1)
    assert list(found) == list(batch) and found["note"] == "kept"
    (own,) = balanced_ranges(7, mesh.size())[rank : rank + 1]
    places = np.concatenate([np.arange(start, start + n) for start, n in own])
    shifted = np.concatenate([arrays["targets"][:, 1:], [[-1], [-1]]], 1)
    for name, whole in {
        "embeds": arrays["embeds"][:, places],
        "position_ids": arrays["position_ids"][..., places],
        "attention_mask": arrays["attention_mask"],
        "tables": arrays["tables"][places],
        "targets": shifted[:, places],
    }.items():
        np.testing.assert_array_equal(adapter.numpy(found[name]), whole, name)
    plain = shard_sequence({"x": batch["targets"]}, mesh, labels=None, positions=None, balance=False)
    assert list(plain) == ["x"]
    # The ranks that would have positions refuse as well, and nothing is sent.
    for length, sizes in ((4, [2, 2, 0]), (1, [1, 0, 0])):
        short = {"input_ids": adapter.tensor(np.zeros((2, length), np.int64))}
        with CommDebugMode() as comm, pytest.raises(ValueError, match=re.escape(f"give shards of {sizes}")):
            shard_sequence(short, mesh)
        assert comm.get_total_counts() == 0
    five = shard_sequence({"input_ids": adapter.tensor(np.zeros((2, 5), np.int64))}, mesh)
    assert tuple(five["input_ids"].shape) == (2, (2, 2, 1)[rank])


def test_parts_of_a_batch(pool: Any) -> None:
    pool.run(3, parts)


@spmd.on_mesh()
def mean_of_nothing(mesh: Any) -> None:
    """Check a rank without labels in a mean, and gradients without elements."""
    adapter, rank = get_adapter(), mesh.get_rank()
    labels = adapter.tensor(np.arange(4 * (rank == 0)).reshape(1, -1))
    for dtype in (np.float64, np.float16):
        found, (grad,) = adapter.value_and_grads(
            lambda x: 2 * [token_mean(x, labels, mesh, ignore_index=3)], [np.arange(4 * (rank == 0)).astype(dtype)]
        )
        assert float(adapter.numpy(found)) == 2.0
        np.testing.assert_array_equal(grad, np.full(len(grad), mesh.size() / 3).astype(dtype))


def test_mean_with_an_empty_rank(pool: Any) -> None:
    pool.run(2, mean_of_nothing)


@spmd.on_mesh()
def wrong(mesh: Any) -> None:
    adapter, rank = get_adapter(), mesh.get_rank()
    x, y = (adapter.tensor(np.zeros((2, n), np.int64)) for n in (6, 5))
    mine, short = adapter.tensor(np.full((2, 6), rank)), adapter.tensor(np.zeros((2, 1), np.int64))
    losses = adapter.tensor(np.zeros(1, np.float32))
    nothing = adapter.tensor(np.zeros((), np.float32))
    spread = DTensor.from_local(losses, mesh, [Replicate()])
    refusals = [
        (TypeError, "takes a DeviceMesh", lambda: shard_sequence({"x": x}, None)),
        (
            TypeError,
            "call shard_sequence before distribute_tensor",
            lambda: shard_sequence({"x": DTensor.from_local(x, mesh)}, mesh),
        ),
        (ValueError, "no dimension 2", lambda: shard_sequence({"x": x}, mesh, seq_dims={"x": 2})),
        (ValueError, r"'x': 6, 'y': 5", lambda: shard_sequence({"x": x, "y": y}, mesh)),
        (ValueError, "one sequence length", lambda: shard_sequence({"attention_mask": x}, mesh)),
        (ValueError, "Pad the sequences", lambda: shard_sequence({"x": short}, mesh)),
        (RankMismatchError, "one batch", lambda: shard_sequence({"x": mine}, mesh)),
        (TypeError, "plain labels", lambda: token_mean(losses, spread, mesh)),
        (ValueError, "distributed over", lambda: token_mean(spread, x, mesh)),
        # the second rank has no label, and a loss for each: all raise
        (ValueError, "reduction='none'", lambda: token_mean(nothing, nothing if rank else x, mesh)),
    ]
    for kind, words, call in refusals:
        with CommDebugMode() as comm, pytest.raises(kind, match=words), check_ranks(mesh):
            call()
        assert comm.get_total_counts() == 0
    # Outside of `check_ranks` the mean of the rank that does not see it is none.
    assert np.isfinite(adapter.numpy(token_mean(losses, adapter.tensor(np.zeros(1, np.int64)), mesh)))
    if rank:
        assert np.isnan(adapter.numpy(token_mean(nothing, adapter.tensor(np.zeros((), np.int64)), mesh)))
    else:
        with pytest.raises(ValueError, match="reduction='none'"):
            token_mean(nothing, x, mesh)


def test_wrong_use(pool: Any) -> None:
    pool.run(2, wrong)


@spmd.on_mesh()
def wrong_modules(mesh: Any) -> None:
    if not tells_of_attention(mesh):
        return
    adapter, rank = get_adapter(), mesh.get_rank()
    with pytest.raises(ValueError, match="takes one of"):
        ContextParallel(method="alltoall")
    with pytest.raises(TypeError, match="True or False"):
        ContextParallel(balance=1)
    module = adapter.load(adapter.CausalAttention(4, 2, 3), np.random.default_rng(1))
    parallelize_module(module, mesh, ContextParallel(method="ring", balance=False))
    with pytest.raises(ValueError, match="already"):
        parallelize_module(module, mesh, ContextParallel())
    written_out = adapter.load(adapter.Mlp(12, 5), np.random.default_rng(1))
    parallelize_module(written_out, mesh, ContextParallel())

    def rows(*shape: int, dtype: Any = np.float32) -> Any:
        return adapter.tensor(np.ones(shape, dtype))

    refusals = [
        (ValueError, "called no supported attention function", lambda: adapter.call(written_out, rows(2, 3, 12))),
        (ValueError, r"\[\(2, 2, 2\), \(3, 3, 3\)\] positions", lambda: adapter.call(module, rows(1, 2 + rank, 12))),
        (RankMismatchError, "samples, heads and features", lambda: adapter.call(module, rows(1 + rank, 3, 12))),
    ]
    with check_ranks(mesh):
        for kind, words, call in refusals:
            with CommDebugMode() as comm, pytest.raises(kind, match=words):
                call()
            assert comm.get_total_counts() == 0
    part = rows(2, 4, 3, 2)
    mask, other = rows(6, 6), rows(6, 6 - rank)
    heads = DTensor.from_local(part, mesh, [Shard(1)])
    in_context = [
        (RankMismatchError, "differ in the dtype", part if rank else rows(2, 4, 3, 2, dtype=np.float64), None),
        (RankMismatchError, "differ in the mask", part, other),
        (RankMismatchError, "differ in the mask", part, mask if rank else None),
        (ValueError, "plain mask of the full", part, rows(3, 3)),
    ]
    for kind, words, x, given in in_context:
        with context_parallel(mesh, length=6), check_ranks(mesh), CommDebugMode() as comm:
            with pytest.raises(kind, match=words):
                adapter.scaled_attention(x, x, x, given)
            assert comm.get_total_counts() == 0
    with context_parallel(mesh, length=6), check_ranks(mesh):
        with pytest.raises(ValueError, match="that are all plain tensors"):
            adapter.scaled_attention(part, heads, heads)
        with pytest.raises(ValueError, match="a multiple of the key and value heads"):
            adapter.scaled_attention(rows(2, 3, 3, 2), rows(2, 2, 3, 2), rows(2, 2, 3, 2))
        with pytest.raises(ValueError, match="with another load balancing"):
            adapter.call(module, rows(2, 3, 12))


def test_wrong_modules(pool: Any) -> None:
    pool.run(2, wrong_modules)


@spmd.on_mesh(2, 2, names=("cp", "other"))
def distributed_heads(mesh: Any) -> None:
    """Check DTensors whose mesh contains the mesh of `context_parallel`.

    Attention treats such DTensors as it does outside of the context.
    """
    if not tells_of_attention(mesh["cp"]):
        return
    adapter = get_adapter()
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 3)).astype(np.float32)
    wanted = adapter.numpy(adapter.scaled_attention(*[adapter.tensor(x)] * 3, is_causal=True))
    with context_parallel(mesh["cp"], length=6, balance=False):
        q = distribute_tensor(adapter.tensor(x), mesh, [Shard(2), Shard(1)])
        found = adapter.scaled_attention(q, q, q, is_causal=True)
        twice = distribute_tensor(adapter.tensor(x[:, :, :3]), mesh["other"], [Shard(2)])
        with pytest.raises(ValueError, match="shard it again"):
            adapter.scaled_attention(twice, twice, twice, is_causal=True)
    same(adapter.numpy(found), wanted, "attention of DTensors inside of the context", 1e-5)


def test_distributed_tensors_in_the_context(pool: Any) -> None:
    pool.run(4, distributed_heads)
