"""DTensors as batches under `fully_shard`: all ranks have one loss, and gradients are summed over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    ModuleStyle,
    Partial,
    Placement,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard_units import block_of, parameters, shard_block
from hyper_parallel.testing.extent import in_gate, on_ranks


@spmd.on_mesh()
def blocks(mesh: Any, rows: int) -> Any:
    adapter = get_adapter()
    batch = np.random.default_rng(3).standard_normal((rows, 2, 8)).astype(np.float32)
    return compare(
        mesh,
        lambda: block_of((8, 12)),
        lambda model: shard_block(model, mesh),
        batch,
        lambda y, _: adapter.sum(adapter.square(y)),
    )


def compare(
    mesh: Any,
    build: Any,
    shard: Any,
    batch: np.ndarray,
    loss_of: Any,
    targets: Any = None,
    cut: Sequence[Placement] | None = None,
) -> Any:
    """Compare loss and gradients of one step on a distributed batch with the single device."""
    adapter = get_adapter()
    single, sharded = (adapter.load(build(), np.random.default_rng(5)) for _ in range(2))
    shard(sharded)
    cut = [Shard(0)] * mesh.ndim if cut is None else cut

    def reference(x: Any) -> Any:
        loss = loss_of(adapter.call(single, x), None if targets is None else adapter.tensor(targets))
        return loss, loss

    seen: dict[str, Any] = {}

    def distributed(x: Any) -> Any:
        x = distribute_tensor(x, mesh, cut, src_data_rank=None)
        wanted = None
        if targets is not None:
            wanted = distribute_tensor(adapter.tensor(targets), mesh, cut, src_data_rank=None)
        with CommDebugMode() as comm:
            y = adapter.call(sharded, x)
        seen["forward"] = comm.get_comm_counts()
        loss = loss_of(y, wanted).redistribute(placements=[Replicate()] * mesh.ndim)
        return loss, loss

    loss, _, grads = adapter.model_value_and_grads(single, reference, batch)
    with CommDebugMode() as comm:
        got_loss, _, got = adapter.model_value_and_grads(sharded, distributed, batch)
    seen["all"] = comm.get_comm_counts()
    same(adapter.numpy(got_loss), adapter.numpy(loss), "loss", 1e-4)
    for name, whole in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name}", 3e-4)
        assert got[name].placements == parameters(sharded, mesh)[name].placements
    return seen


@pytest.mark.parametrize("rows", in_gate([12, 7, 2], [7, 2]), ids=["even", "uneven", "empty"])
@on_ranks(1, 2, 3, 4)
def test_block(pool: Any, world_size: int, rows: int) -> None:
    for seen in pool.run(world_size, blocks, rows):
        if world_size > 1:
            assert seen["forward"] == {"all_gather": 3}
            assert difference(seen["all"], {})["reduce_scatter"] == 3


@spmd.on_mesh()
def ignored_labels(mesh: Any, rows: int) -> None:
    """Check the mean over labels that are not ignored. Ranks have different numbers of such labels."""
    adapter = get_adapter()
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 7, rows).astype(np.int64)
    targets = np.where(np.arange(rows) % 3 == 0, -100, ids).astype(adapter.TARGET_DTYPE)
    compare(
        mesh,
        lambda: adapter.Tied(7, 6),
        lambda model: fully_shard(model, mesh=mesh),
        ids,
        lambda y, wanted: adapter.loss(y, wanted),
        targets,
    )


@pytest.mark.parametrize("rows", [8, 5])
@on_ranks(1, 2, 3)
def test_ignored_labels(pool: Any, world_size: int, rows: int) -> None:
    pool.run(world_size, ignored_labels, rows)


@spmd.on_mesh(2, 2, names=("dp_replicate", "dp_shard"))
def hybrid(mesh: Any, rows: int) -> None:
    adapter = get_adapter()
    compare(
        mesh,
        lambda: block_of((8, 12)),
        lambda model: shard_block(model, mesh),
        np.random.default_rng(3).standard_normal((rows, 2, 8)).astype(np.float32),
        lambda y, _: adapter.sum(adapter.square(y)),
    )


@pytest.mark.parametrize("rows", [8, 7])
def test_replicated_and_sharded(pool: Any, rows: int) -> None:
    pool.run(4, hybrid, rows)


@spmd.on_mesh()
def both(mesh: Any) -> None:
    """Check parameters read by replicated computations and by computations that are divided over the ranks."""
    adapter = get_adapter()

    def build() -> Any:
        return adapter.linear_module(6, 5)

    def shard(linear: Any) -> None:
        fully_shard(linear, mesh=mesh)

    single, sharded = (adapter.load(build(), np.random.default_rng(5)) for _ in range(2))
    shard(sharded)
    x = np.random.default_rng(3).standard_normal((5, 6)).astype(np.float32)

    def loss_of(linear: Any, whole: Any, cut: Any) -> Any:
        return adapter.sum(adapter.square(adapter.call(linear, cut))) + adapter.sum(
            adapter.square(adapter.call(linear, whole))
        )

    _, _, grads = adapter.model_value_and_grads(single, lambda x: (loss_of(single, x * 2, x), x), x)

    def distributed(x: Any) -> Any:
        cut = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
        whole = distribute_tensor(x * 2, mesh, [Replicate()], src_data_rank=None)
        return loss_of(sharded, whole, cut).redistribute(placements=[Replicate()]), x

    _, _, got = adapter.model_value_and_grads(sharded, distributed, x)
    for name, g in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(g), f"gradient of {name}", 2e-4)


@on_ranks(1, 2, 3)
def test_read_by_both(pool: Any, world_size: int) -> None:
    pool.run(world_size, both)


def mixed() -> None:
    """Check the refusal of an inner unit that gets plain tensors while the outer unit gets DTensors, and vice versa."""
    # Process groups are made on all ranks of the pool.
    mesh, another = spmd.device_mesh(), spmd.device_mesh(spmd.world_size, 1, names=("rows", "columns"))
    if mesh is None:
        return
    adapter, x = get_adapter(), np.ones((2, 4), np.float32)
    plain = adapter.tensor(x)
    distributed = distribute_tensor(plain, mesh, [Shard(0)], src_data_rank=None)
    for given, convert in (
        (distributed, lambda h: h.to_local()),
        (plain, lambda h: distribute_tensor(h, mesh, [Shard(0)], src_data_rank=None)),
    ):
        mlp = adapter.Mlp(4, 6)
        fully_shard(mlp.down, mesh=mesh)
        fully_shard(mlp, mesh=mesh)
        mesh.platform.register_forward_pre_hook(mlp.down, lambda module, args, convert=convert: (convert(args[0]),))
        # A tensor that has the data of a batch comes from the unit around it, which has gathered by then, on all ranks.
        with pytest.raises(ValueError, match="data-parallel ranks have one loss"):
            adapter.call(mlp, given)
    other = adapter.tensor(x)
    with fails(ValueError, "pass a DTensor on the mesh"):
        adapter.call(
            fully_shard(adapter.linear_module(4, 4), mesh=mesh),
            distribute_tensor(other, another, [Shard(0), Replicate()], src_data_rank=None),
        )
    # Accumulated gradients are summands of an average, those of a distributed batch of a sum.
    linear = fully_shard(adapter.load(adapter.linear_module(4, 4), np.random.default_rng(5)), mesh=mesh)

    def gradients(batch: Any = None) -> dict[str, Any]:
        def loss(x: Any) -> Any:
            return adapter.sum(adapter.call(linear, x if batch is None else batch)), None

        return {name: adapter.numpy(g) for name, g in adapter.model_value_and_grads(linear, loss, x)[2].items()}

    once = gradients()
    linear.set_requires_gradient_sync(False)
    adapter.model_value_and_grads(linear, lambda x: (adapter.sum(adapter.call(linear, x)), None), x)
    linear.set_requires_gradient_sync(True)
    with fails(
        ValueError,
        "Linear",
        "distributed inputs",
        "has accumulated gradients of plain inputs that were not all-reduced",
    ):
        gradients(distributed)
    for name, g in gradients().items():
        same(g, 2 * once[name], f"gradient of {name} of two batches", 1e-4)


def test_mixed(pool: Any) -> None:
    pool.run(2, mixed)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def tensor_parallel(mesh: Any, rows: int, replicated: bool) -> Any:
    """Check styled modules, which get this rank's shard of the batch. Their outputs become shards of a DTensor."""
    adapter = get_adapter()

    def shard(model: Any) -> None:
        parallelize_module(model, mesh["tp"], TENSOR)
        (replicate if replicated else shard_block)(model, mesh["dp"])

    return compare(
        mesh["dp"],
        lambda: block_of((8, 12)),
        shard,
        np.random.default_rng(3).standard_normal((rows, 2, 8)).astype(np.float32),
        lambda y, _: adapter.mean(adapter.square(y)),
    )


TENSOR = {
    "attention.w[qkv]": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w[13]": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
}


@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
@pytest.mark.parametrize("rows", in_gate([8, 7, 1], [7, 1]), ids=["even", "uneven", "empty"])
def test_tensor_parallel_block(pool: Any, rows: int, replicated: bool) -> None:
    for seen in pool.run(4, tensor_parallel, rows, replicated):
        # Two more all-reduces in forward than without tensor parallelism: those of the row-parallel layers.
        gathers = {} if replicated else {"all_gather": 3}
        assert seen["forward"] == {**gathers, "all_reduce": 2}
        assert seen["all"].get("reduce_scatter", 0) == (0 if replicated else 3)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def taken_out(mesh: Any) -> Any:
    """Check a batch of one sample, which is indexed (and so gathered) and unsqueezed between two styled modules."""
    adapter = get_adapter()

    def shard(mlp: Any) -> None:
        parallelize_module(mlp, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh.platform.register_forward_pre_hook(mlp.down, lambda module, args: (args[0][0][None],))
        fully_shard(mlp, mesh=mesh["dp"])

    return compare(
        mesh["dp"],
        lambda: adapter.Mlp(4, 6),
        shard,
        np.random.default_rng(3).standard_normal((1, 2, 4)).astype(np.float32),
        lambda y, _: adapter.mean(adapter.square(y)),
    )


def test_a_sample_that_is_taken_out(pool: Any) -> None:
    """Check that the row-parallel module shards the gathered batch again: one data-parallel rank gets the sample."""
    for seen in pool.run(4, taken_out):
        assert seen["forward"] == {"all_gather": 2, "all_reduce": 1}


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def tensor_parallel_labels(mesh: Any, rows: int, replicated: bool) -> None:
    """Check a column-parallel head with the mean over labels that are not ignored."""
    adapter = get_adapter()
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 7, rows).astype(np.int64)
    targets = np.where(np.arange(rows) % 3 == 0, -100, ids).astype(adapter.TARGET_DTYPE)

    def shard(model: Any) -> None:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        if replicated:
            replicate(model, mesh["dp"])
        else:
            fully_shard(model, mesh=mesh["dp"])

    compare(mesh["dp"], lambda: adapter.Tied(7, 6), shard, ids, lambda y, wanted: adapter.loss(y, wanted), targets)


@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
@pytest.mark.parametrize("rows", [8, 5, 2])
def test_tensor_parallel_labels(pool: Any, rows: int, replicated: bool) -> None:
    pool.run(4, tensor_parallel_labels, rows, replicated)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def not_parts(mesh: Any) -> None:
    """Check the refusal of DTensors that are no shard of the batch. Without data parallelism, all DTensors are
    refused."""
    adapter = get_adapter()
    x = adapter.tensor(np.ones((4, 6), np.float32))

    def styled(**options: Any) -> Any:
        return parallelize_module(adapter.linear_module(6, 8), mesh["tp"], ColwiseParallel(**options))

    def placed(placements: Any, where: Any) -> Any:
        return distribute_tensor(x, where, placements, src_data_rank=None)

    alone = styled()
    everywhere = [placed([placement], mesh["dp"]) for placement in (Shard(0), Replicate(), Partial())]
    for given in (*everywhere, placed([Replicate(), Shard(0)], mesh)):
        with fails(ValueError, "but the style is applied to"):
            adapter.call(alone, given)
    for given in (placed([Partial()], mesh["dp"]), placed([Replicate(), Shard(0)], mesh)):
        with pytest.raises(ValueError, match="but the style is applied to"):
            adapter.call(fully_shard(styled(), mesh=mesh["dp"]), given)
    on_both = adapter.call(fully_shard(styled(use_local_output=False), mesh=mesh["dp"]), placed([Shard(0)], mesh["dp"]))
    assert on_both.device_mesh is mesh and on_both.placements == (Shard(0), Shard(1))
    elsewhere = styled(output_layouts=Shard(0), use_local_output=True)
    with pytest.raises(ValueError, match="does not have this rank's samples"):
        adapter.call(fully_shard(elsewhere, mesh=mesh["dp"]), placed([Shard(0)], mesh["dp"]))


def test_what_is_no_part_of_a_batch(pool: Any) -> None:
    pool.run(4, not_parts)


class Several(ModuleStyle):
    """Module that is called with a number, a batch and a scale, and returns the batch and the number."""

    input_layouts = (None, Replicate(), Replicate())
    output_layouts = (Replicate(), None)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def several(mesh: Any, rows: int) -> None:
    """Check a module with several inputs and results. A replicated input gets a gradient from each rank's shard."""
    adapter = get_adapter()
    platform, rng = mesh.platform, np.random.default_rng(4)
    x, scale = rng.standard_normal((rows, 6)).astype(np.float32), rng.standard_normal((1, 8)).astype(np.float32)

    def build() -> Any:
        module = adapter.load(adapter.linear_module(6, 8), np.random.default_rng(5))
        platform.replace_forward(module, lambda forward: lambda self, n, x, scale: (forward(self, x) * scale, n))
        return module

    single, styled = build(), fully_shard(parallelize_module(build(), mesh["tp"], Several()), mesh=mesh["dp"])

    part = -(-rows // 2)
    mine = slice(mesh.get_local_rank("dp") * part, (mesh.get_local_rank("dp") + 1) * part)

    def reference(x: Any, scale: Any) -> Any:
        y, _ = adapter.call(single, 3, x, scale)
        return adapter.sum(adapter.square(y)), y

    def batch_of(x: Any) -> Any:
        return DTensor.from_local(x, mesh["dp"], [Shard(0)], shape=(rows, 6))

    def distributed(x: Any, scale: Any) -> Any:
        y, n = adapter.call(styled, 3, batch_of(x), DTensor.from_local(scale, mesh["dp"], [Replicate()]))
        assert n == 3 and y.device_mesh is mesh["dp"] and y.placements == (Shard(0),)
        return adapter.sum(adapter.square(y)).redistribute(placements=[Replicate()]).to_local(), y

    y, wanted = adapter.value_and_grads(reference, [x, scale])
    got_y, got = adapter.value_and_grads(distributed, [x[mine], scale])
    same(adapter.numpy(got_y), adapter.numpy(y), "output", 1e-4)
    same(got[0], wanted[0][mine], "gradient of the batch", 1e-4)
    same(got[1], wanted[1], "gradient of the replicated input", 1e-4)
    on_tp = distribute_tensor(adapter.tensor(scale), mesh["tp"], [Replicate()], src_data_rank=None)
    with pytest.raises(ValueError, match=r"inputs on different meshes: .* Redistribute the latter"):
        adapter.call(styled, 3, batch_of(adapter.tensor(x[mine])), on_tp)


@pytest.mark.parametrize("rows", [4, 3, 1])
def test_several_inputs_and_results(pool: Any, rows: int) -> None:
    pool.run(4, several, rows)
