"""Random numbers under data parallelism: for one distributed batch, and for separate batches on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    NoParallel,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    manual_seed,
    parallelize_module,
    replicate,
)
from hyper_parallel.core.communication.collectives import all_gather_object
from hyper_parallel.core.mesh.slices import MESHES
from hyper_parallel.core.rules import random
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.extent import in_gate, on_ranks

FEATURES, HIDDEN = 6, 8
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def build(mesh: Any) -> Any:
    """Return an `Mlp` between two dropout layers."""
    adapter = get_adapter()
    mlp = adapter.load(adapter.Mlp(FEATURES, HIDDEN), np.random.default_rng(5))

    def dropping(forward: Any) -> Any:
        return lambda self, x: adapter.dropout(forward(self, adapter.dropout(x, 0.5)), 0.25)

    mesh.platform.replace_forward(mlp, dropping)
    return mlp


def forget_meshes() -> None:
    """Discard the random state of meshes that contain all ranks. Smaller meshes keep their state: ranks outside would
    not know that it was discarded."""
    for mesh in MESHES.values():
        if set(mesh.ranks.flat) <= set(range(spmd.world_size)):
            random._SYNCHRONIZED.discard(mesh)


def one_batch(mesh: Any, dp: Any, shard: Any, rows: int) -> None:
    """Check that ranks with different generators draw for the full batch as a single device with the first rank's
    generator."""
    adapter = get_adapter()
    x = np.random.default_rng(3).standard_normal((rows, FEATURES)).astype(np.float32)
    single, sharded = build(mesh), shard(build(mesh))
    adapter.seed(100)
    wanted = []
    for _ in range(2):
        y, grad_x, grads = adapter.model_value_and_grads(single, lambda x: squared(single, x), x)
        wanted.append((adapter.numpy(y), grad_x, grads))
    assert np.abs(wanted[0][0] - wanted[1][0]).max() > 1e-3  # other masks in each step
    forget_meshes()
    adapter.seed(100 + mesh.get_rank())

    def distributed(x: Any) -> Any:
        x = distribute_tensor(x, dp, [Shard(0)], src_data_rank=None)
        loss, y = squared(sharded, x)
        return loss.redistribute(placements=[Replicate()]), y

    for y, _, grads in wanted:
        got_y, _, got = adapter.model_value_and_grads(sharded, distributed, x)
        same(adapter.numpy(got_y), y, "output", 1e-4)
        for name, whole in grads.items():
            same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name}", 3e-4)


def squared(module: Any, x: Any) -> Any:
    adapter = get_adapter()
    y = adapter.call(module, x)
    return adapter.sum(adapter.square(y)), y


@spmd.on_mesh()
def on_one_dimension(mesh: Any, how: str, rows: int) -> None:
    def shard(model: Any) -> Any:
        return fully_shard(model, mesh=mesh) if how == "fully_shard" else replicate(model, mesh)

    one_batch(mesh, mesh, shard, rows)


@pytest.mark.parametrize("rows", in_gate([8, 5, 1], [5, 1]), ids=["even", "uneven", "empty"])
@pytest.mark.parametrize("how", ["fully_shard", "replicate"])
@on_ranks(2, 3)
def test_one_batch(pool: Any, world_size: int, how: str, rows: int) -> None:
    pool.run(world_size, on_one_dimension, how, rows)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def on_two_dimensions(mesh: Any, rows: int) -> None:
    """Check dropout of activations that are equal on all tensor-parallel ranks.

    All these ranks drop the same elements.
    """
    dp = mesh["dp"]

    def shard(model: Any) -> Any:
        return fully_shard(parallelize_module(model, mesh["tp"], PLAN), mesh=dp)

    def copy(model: Any) -> Any:
        return replicate(parallelize_module(model, mesh["tp"], PLAN), dp)

    for how in (shard, copy):
        one_batch(mesh, dp, how, rows)


@pytest.mark.parametrize("rows", in_gate([8, 5, 2], [5, 2]), ids=["even", "uneven", "small"])
def test_one_batch_beside_tensor_parallelism(pool: Any, rows: int) -> None:
    pool.run(4, on_two_dimensions, rows)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def between(mesh: Any, how: str, seeded: bool) -> None:
    """Check dropout of plain activations between styled modules.

    Tensor-parallel ranks drop the same elements, and data-parallel ranks drop different elements. Seeds are equal for
    each data-parallel rank, or different on every rank before the plan.
    """
    adapter, dp, tp = get_adapter(), mesh["dp"], mesh["tp"]
    drawn: list[Any] = []

    def watched(forward: Any) -> Any:
        def run(self: Any, x: Any) -> Any:
            x = adapter.dropout(x, 0.5)
            drawn.append(adapter.numpy(x) != 0)
            return forward(self, x)

        return run

    mlp = adapter.load(adapter.Mlp(FEATURES, HIDDEN), np.random.default_rng(5))
    mesh.platform.replace_forward(mlp, watched)
    forget_meshes()
    adapter.seed(50 + mesh.get_rank())
    model = parallelize_module(mlp, tp, PLAN)
    model = fully_shard(model, mesh=dp) if how == "fully_shard" else replicate(model, dp)
    if seeded:
        manual_seed(7 + dp.get_local_rank(), tp)
    for _ in range(2):
        adapter.call(model, adapter.tensor(np.ones((4, FEATURES), np.float32)))
    ours = np.stack(drawn)
    assert (ours[0] != ours[1]).any()  # other elements in each step
    first, second = all_gather_object(ours, mesh, 0)
    assert (first != second).any()
    first, second = all_gather_object(ours, mesh, 1)
    assert (first == second).all()


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "as they are"])
@pytest.mark.parametrize("how", ["fully_shard", "replicate"])
def test_between_styled_modules(pool: Any, how: str, seeded: bool) -> None:
    pool.run(4, between, how, seeded)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def own_parts(mesh: Any, how: str) -> None:
    """Check data-parallel ranks with separate seeds.

    All tensor-parallel ranks with one batch draw the numbers that a single device draws with the seed of that batch.
    """
    adapter, dp, tp = get_adapter(), mesh["dp"], mesh["tp"]
    rank = dp.get_local_rank()
    x = np.random.default_rng(3).standard_normal((2, 3, FEATURES)).astype(np.float32)
    single, sharded = build(mesh), parallelize_module(build(mesh), tp, PLAN)
    sharded = fully_shard(sharded, mesh=dp) if how == "fully_shard" else replicate(sharded, dp)
    outputs, total = [], {}
    for i in range(2):
        adapter.seed(7 + i)
        y, _, grads = adapter.model_value_and_grads(single, lambda x: squared(single, x), x[i])
        outputs.append(adapter.numpy(y))
        for name, g in grads.items():
            total[name] = total.get(name, 0) + adapter.numpy(g) / 2
    manual_seed(7 + rank, tp)
    y, _, got = adapter.model_value_and_grads(sharded, lambda x: squared(sharded, x), x[rank])
    same(adapter.numpy(y), outputs[rank], "output", 1e-4)
    for name, whole in total.items():
        same(adapter.numpy(got[name]), whole, f"gradient of {name}", 3e-4)
    # Which elements are kept of the same input differs between the parts.
    masks = []
    for i in range(2):
        adapter.seed(7 + i)
        masks.append(adapter.numpy(adapter.dropout(adapter.tensor(np.ones((3, FEATURES), np.float32)), 0.5)))
    assert np.abs(masks[0] - masks[1]).max() > 0


@pytest.mark.parametrize("how", ["fully_shard", "replicate"])
def test_own_parts(pool: Any, how: str) -> None:
    pool.run(4, own_parts, how)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def sequences(mesh: Any) -> None:
    """Check that each rank drops in its shard of the sequence the same elements as a single device."""
    adapter, tp, rank = get_adapter(), mesh["tp"], mesh["dp"].get_local_rank()
    probe = adapter.Probe()
    mesh.platform.replace_forward(probe, lambda forward: lambda self, x: adapter.dropout(x, 0.5))
    fully_shard(parallelize_module(probe, tp, SequenceParallel()), mesh=mesh["dp"])
    x = np.ones((2, 6, 5), np.float32)
    wanted = []
    for i in range(2):
        adapter.seed(7 + i)
        wanted.append(adapter.numpy(adapter.dropout(adapter.tensor(x), 0.5)))
    assert np.abs(wanted[0] - wanted[1]).max() > 0 and np.abs(wanted[0][:, :3] - wanted[0][:, 3:]).max() > 0
    manual_seed(7 + rank, tp)
    y = adapter.call(probe, adapter.tensor(x[:, :3]))
    y = y if isinstance(y, DTensor) else DTensor.from_local(y, tp, [Shard(1)])
    same(adapter.numpy(y), wanted[rank], "dropout of a sequence", 1e-6)


def test_sequences(pool: Any) -> None:
    pool.run(4, sequences)


# ---------------------------------------------------------------------- modules of a plan in a distributed batch
def dropping_probe(mesh: Any, drop: Any) -> Any:
    """Return a dropout module that first multiplies its input by its only parameter."""
    adapter = get_adapter()
    linear = adapter.load(adapter.linear_module(5, 5), np.random.default_rng(1))
    mesh.platform.replace_forward(linear, lambda forward: lambda self, x: drop(forward(self, x)))
    return linear


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def styled(mesh: Any, how: str, style: Any, by_counter: bool) -> None:
    """Check that dropout in a styled module drops the elements that a single device drops of the full batch."""
    adapter, dp, tp = get_adapter(), mesh["dp"], mesh["tp"]
    placements = [Shard(0), Shard(1) if isinstance(style, SequenceParallel) else Replicate()]

    def drop(x: Any) -> Any:
        return adapter.dropout(x, 0.5)

    single, model = dropping_probe(mesh, drop), parallelize_module(dropping_probe(mesh, drop), tp, style)
    model = fully_shard(model, mesh=dp) if how == "fully_shard" else replicate(model, dp)
    if by_counter:  # a plain tensor is not drawn by counter
        parallelize_module(single, tp, NoParallel())
    try:
        for rows in (4, 3, 1):
            x = np.random.default_rng(rows).standard_normal((rows, 6, 5)).astype(np.float32)
            found = []
            for run in (single, model):
                manual_seed(11, mesh, parallel_rng="counter" if by_counter else "single_device")

                def loss(x: Any, run: Any = run) -> Any:
                    if run is model:
                        x = distribute_tensor(x, mesh, placements, src_data_rank=None)
                    y = adapter.call(run, x)
                    total = adapter.sum(adapter.square(y))
                    return (total.full_tensor() if isinstance(total, DTensor) else total), y

                steps = [adapter.model_value_and_grads(run, loss, x) for _ in range(2)]
                found.append([(adapter.numpy(y), grads) for y, _, grads in steps])
            for (wanted, grads), (got, own) in zip(*found, strict=True):
                assert 0.2 < (wanted == 0).mean() < 0.8
                same(got, wanted, f"output of {rows} samples", 1e-4)
                for name, whole in grads.items():
                    same(adapter.numpy(own[name]), adapter.numpy(whole), f"gradient of {name}, {rows} samples", 3e-4)
    finally:
        manual_seed(0, mesh)


@pytest.mark.parametrize("by_counter", in_gate([False, True], [False]), ids=["single_device", "counter"])
@pytest.mark.parametrize(
    "style", [SequenceParallel(), NoParallel(use_local_output=False)], ids=["sequence", "replicated"]
)
@pytest.mark.parametrize("how", in_gate(["fully_shard", "replicate"], ["fully_shard"]))
def test_styled_modules(pool: Any, how: str, style: Any, by_counter: bool) -> None:
    pool.run(4, styled, how, style, by_counter)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def not_of_the_batch(mesh: Any) -> None:
    """Check that all ranks refuse dropout of a tensor that may not belong to the batch."""
    adapter, tp = get_adapter(), mesh["tp"]

    def drop(x: Any) -> Any:
        return adapter.reshape(adapter.dropout(adapter.reshape(x, (x.shape[0] * x.shape[1], 5)), 0.5), tuple(x.shape))

    model = fully_shard(parallelize_module(dropping_probe(mesh, drop), tp, NoParallel()), mesh=mesh["dp"])
    x = distribute_tensor(adapter.tensor(np.ones((4, 6, 5), np.float32)), mesh["dp"], [Shard(0)], src_data_rank=None)
    with pytest.raises(ValueError, match=r"dropout of a tensor of shape \(12, 5\), which has no dimension 0 of 2"):
        adapter.call(model, x)


def test_tensors_that_are_not_of_the_batch(pool: Any) -> None:
    pool.run(4, not_of_the_batch)
