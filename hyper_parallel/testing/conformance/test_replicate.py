"""`replicate`: values, gradients, collectives and training steps as on a single device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DeviceMesh,
    DTensor,
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
from hyper_parallel.testing.comparisons import block_plan, difference, floats, same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import on_ranks

#: Rows of the batch of one rank.
ROWS = 3
#: MiB of a bucket that one parameter fills, and of one that takes all.
SMALL, LARGE = 1e-6, 25


def build(adapter: Any, kind: str, sizes: tuple[int, int]) -> Any:
    return adapter.Mlp(*sizes) if kind == "mlp" else adapter.linear_module(*sizes, kind == "linear")


def held(module: Any, mesh: Any) -> dict[str, Any]:
    """Return all parameters of a model by path."""
    platform = mesh.platform
    found = [(path, *p) for path, sub in platform.named_modules(module) for p in platform.named_parameters(sub)]
    return {f"{path}.{name}".lstrip("."): p for path, name, p in found}


@spmd.on_mesh()
def train(mesh: Any, kind: str, sizes: tuple[int, int], cap: float) -> Any:
    """Train for three steps; return the collectives of forward and backward in each."""
    adapter, size, rank = get_adapter(), mesh.shape[0], mesh.get_local_rank(0)
    single, copied = (adapter.load(build(adapter, kind, sizes), np.random.default_rng(5 + i)) for i in (0, rank))
    assert replicate(copied, mesh, bucket_cap_mb=cap) is copied
    steps = [adapter.sgd(module, 0.1) for module in (single, copied)]
    counts: list[dict[str, dict[str, int]]] = []
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    weights = np.random.default_rng(6).standard_normal((size * ROWS, sizes[kind != "mlp"])).astype(np.float32)

    def reference(x: Any) -> Any:
        y = adapter.call(single, x)
        return adapter.weighted_sum(y * y, adapter.tensor(weights / size)), y

    def distributed(x: Any) -> Any:
        with CommDebugMode() as comm:
            y = adapter.call(copied, x)
        counts.append({"forward": comm.get_comm_counts()})
        assert not isinstance(y, DTensor)
        return adapter.weighted_sum(y * y, adapter.tensor(weights[mine])), y

    for step in range(3):
        batch = np.random.default_rng(step).standard_normal((size * ROWS, sizes[0])).astype(np.float32)
        y, grad_x, grads = adapter.model_value_and_grads(single, reference, batch)
        with CommDebugMode() as comm:
            got_y, got_grad_x, got = adapter.model_value_and_grads(copied, distributed, batch[mine])
        counts[-1]["backward"] = difference(comm.get_comm_counts(), counts[-1]["forward"])
        same(adapter.numpy(got_y), adapter.numpy(y)[mine], f"output at step {step}", 1e-4)
        same(got_grad_x / size, grad_x[mine], f"gradient of the input at step {step}", 1e-4)
        for name, whole in grads.items():
            assert isinstance(got[name], DTensor) and got[name].placements == (Replicate(),), name
            same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name} at step {step}", 1e-4)
        for take, its_grads in zip(steps, (grads, got), strict=True):
            take(its_grads)
    for name, q in held(copied, mesh).items():
        p = held(single, mesh)[name]
        assert q.placements == (Replicate(),) and tuple(q.shape) == tuple(p.shape)
        same(adapter.numpy(q), adapter.numpy(p), f"{name} after three steps", 1e-4)
    assert counts[0] == counts[1] == counts[2]
    return counts[0]


@pytest.mark.parametrize("cap", [SMALL, LARGE])
@pytest.mark.parametrize(("kind", "count"), [("linear", 2), ("linear without bias", 1), ("mlp", 4)])
@on_ranks(1, 2, 3, 4)
def test_training(pool: Any, world_size: int, kind: str, count: int, cap: float) -> None:
    reduces = count if cap is SMALL else 1
    for counts in pool.run(world_size, train, kind, (6, 7), cap):
        assert counts == {"forward": {}, "backward": {"all_reduce": reduces} if world_size > 1 else {}}


@spmd.on_mesh()
def one_batch(mesh: Any) -> Any:
    """Check a batch of DTensors: one loss, summed gradients. Rows do not divide evenly, and some ranks have none."""
    adapter, rows = get_adapter(), mesh.shape[0] + 1
    single, copied = (adapter.load(adapter.Mlp(6, 7), np.random.default_rng(5)) for _ in range(2))
    replicate(copied, mesh)
    for count in (rows, 1):
        batch = floats(count, 6)
        weights = np.random.default_rng(6).standard_normal((count, 6)).astype(np.float32)
        counts: dict[str, int] = {}

        def reference(x: Any) -> Any:
            y = adapter.call(single, x)
            return adapter.weighted_sum(y * y, adapter.tensor(weights)), y  # noqa: B023 - called in the same round

        def distributed(x: Any) -> Any:
            x = distribute_tensor(x, mesh, [Shard(0)])
            y = adapter.call(copied, x)
            w = distribute_tensor(adapter.tensor(weights), mesh, [Shard(0)])  # noqa: B023
            return adapter.weighted_sum(y * y, w), y

        y, _, grads = adapter.model_value_and_grads(single, reference, batch)
        with CommDebugMode() as comm:
            got_y, _, got = adapter.model_value_and_grads(copied, distributed, batch)
        sent = [e for e in comm.events if e.shape]  # without the loss, which a framework may ask to be whole
        counts = {kind: sum(e.kind == kind for e in sent) for kind in {e.kind for e in sent}}
        same(adapter.numpy(got_y), adapter.numpy(y), "output", 1e-4)
        for name, whole in grads.items():
            assert got[name].placements == (Replicate(),), name
            same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name}", 1e-4)
    return counts


@on_ranks(1, 2, 3, 4)
def test_one_batch(pool: Any, world_size: int) -> None:
    for counts in pool.run(world_size, one_batch):
        assert counts == ({"scatter": 2, "all_reduce": 1} if world_size > 1 else {})


@spmd.on_mesh()
def called_often(mesh: Any) -> None:
    """Check two calls in a step with a tied parameter, and calls without gradients, without synchronisation and after
    an error."""
    adapter, size = get_adapter(), mesh.shape[0]
    ids = np.random.default_rng(8).integers(0, 7, (size, 3)).astype(np.int64)
    single, copied = (adapter.load(adapter.Tied(7, 6), np.random.default_rng(5)) for _ in range(2))
    replicate(copied, mesh)
    with pytest.raises(TypeError):
        adapter.call(copied)

    def loss_of(module: Any, scale: float) -> Any:
        def loss(x: Any) -> Any:
            total = sum(adapter.sum(adapter.square(y)) for y in (adapter.call(module, x), adapter.call(module, x)))
            return total * scale, total

        return loss

    _, _, grads = adapter.model_value_and_grads(single, loss_of(single, 1 / size), ids)
    mine = ids[mesh.get_local_rank(0) :][:1]
    # Calls share their all-reduces where the tensors that they read share memory with the parameters.
    reduce = {"all_reduce": 1 if mesh.platform.frees_storage else 2} if size > 1 else {}
    with CommDebugMode() as comm:
        _, _, got = adapter.model_value_and_grads(copied, loss_of(copied, 1.0), mine)
    assert comm.get_comm_counts() == reduce
    for name, whole in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name}", 1e-4)
    with CommDebugMode() as comm, copied.no_sync():
        _, _, got = adapter.model_value_and_grads(copied, loss_of(copied, 1.0), mine)
    assert comm.get_total_counts() == 0
    for x in got.values():
        assert x is None or not adapter.numpy(x).any()
    with CommDebugMode() as comm:
        _, _, got = adapter.model_value_and_grads(copied, loss_of(copied, 1.0), mine)
    assert comm.get_comm_counts() == reduce
    for name, whole in grads.items():
        same(adapter.numpy(got[name]), 2 * adapter.numpy(whole), f"gradient of {name} of two backwards", 1e-4)
    with mesh.platform.no_grad(), CommDebugMode() as comm:
        y = adapter.call(copied, adapter.tensor(mine))
    assert comm.get_total_counts() == 0
    same(adapter.numpy(y), adapter.numpy(adapter.call(single, adapter.tensor(mine))), "output without gradients")


@on_ranks(1, 2, 3, 4)
def test_called_often(pool: Any, world_size: int) -> None:
    pool.run(world_size, called_often)


def tensor_parallel(adapter: Any, kind: str) -> tuple[Any, Any]:
    """Return a model, its plan, and the shape of a sample."""
    if kind == "mlp":
        return lambda: adapter.Mlp(6, 7), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "part of an mlp":
        return lambda: adapter.Mlp(6, 7), {"up": ColwiseParallel(output_layouts=Replicate())}
    return lambda: adapter.Block(8, 10, 2), block_plan(True)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def two_dimensions(mesh: Any, kind: str) -> Any:
    """Check steps on (dp, tp); return the collectives of both dimensions."""
    adapter, tp, dp = get_adapter(), mesh["tp"], mesh["dp"]
    rank, of_block = dp.get_local_rank(0), kind == "block"
    build, plan = tensor_parallel(adapter, kind)
    single, copied = (adapter.load(build(), np.random.default_rng(5 + i)) for i in (0, rank))
    replicate(parallelize_module(copied, tp, plan), dp)
    steps = [adapter.sgd(module, 0.1) for module in (single, copied)]
    shape = (4, 8) if of_block else (6,)
    events: list[Any] = []
    for step in range(3):
        batch = np.random.default_rng(step).standard_normal((2 * ROWS, *shape)).astype(np.float32)
        mine = slice(rank * ROWS, (rank + 1) * ROWS), *[slice(None)] * (len(shape) - 1)
        if of_block:  # each rank has a part of the sequence
            mine = mine[0], slice(tp.get_local_rank(0) * 2, tp.get_local_rank(0) * 2 + 2)

        def reference(x: Any) -> Any:
            y = adapter.call(single, x)
            return adapter.sum(adapter.square(y)) / 2, y

        def distributed(x: Any) -> Any:
            y = adapter.call(copied, x)
            return adapter.sum(adapter.square(y)), y

        y, _, grads = adapter.model_value_and_grads(single, reference, batch)
        with CommDebugMode() as comm:
            got_y, _, got = adapter.model_value_and_grads(copied, distributed, np.ascontiguousarray(batch[mine]))
        events = [(e.kind, e.mesh.mesh_dim_names[e.mesh_dim]) for e in comm.events]
        same(adapter.numpy(got_y), adapter.numpy(y)[mine], f"output at step {step}", 1e-4)
        for name, whole in grads.items():
            p = held(copied, mesh)[name]
            assert got[name].placements == p.placements and got[name].device_mesh is p.device_mesh, name
            same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name} at step {step}", 1e-4)
        for take, its_grads in zip(steps, (grads, got), strict=True):
            take(its_grads)
    placements = {}
    for name, q in held(copied, mesh).items():
        same(adapter.numpy(q), adapter.numpy(held(single, mesh)[name]), f"{name} after three steps", 1e-4)
        placements[name] = (q.device_mesh.mesh_dim_names, q.placements)
        mine = DTensor.from_local(q.to_local(), q.device_mesh, q.placements, shape=q.shape)
        same(adapter.numpy(mine), adapter.numpy(q), name)
    if of_block:  # `test_prepared_batches` has it in a batch that ranks share
        return sorted(events), placements

    def loss_of(module: Any, shared: bool) -> Any:
        def loss(x: Any) -> Any:
            x = distribute_tensor(x, dp, [Shard(0)], src_data_rank=None) if shared else x
            y = adapter.sum(adapter.square(adapter.call(module, x)))
            return y.redistribute(placements=[Replicate()]) if shared else y, None

        return loss

    _, _, grads = adapter.model_value_and_grads(single, loss_of(single, False), batch[1:])
    _, _, got = adapter.model_value_and_grads(copied, loss_of(copied, True), batch[1:])
    for name, wanted in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(wanted), f"gradient of {name}, of one batch", 1e-4)
    return sorted(events), placements


@pytest.mark.parametrize("kind", ["mlp", "part of an mlp", "block"])
def test_with_tensor_parallelism(pool: Any, kind: str) -> None:
    for events, placements in pool.run(4, two_dimensions, kind):
        both = ("dp", "tp")
        if kind == "mlp":
            assert events == [("all_reduce", "dp"), ("all_reduce", "tp"), ("all_reduce", "tp")]
            assert placements["up.weight"] == (both, (Replicate(), Shard(0)))
            assert placements["down.weight"] == (both, (Replicate(), Shard(1)))
            assert placements["down.bias"] == (both, (Replicate(), Replicate()))
        elif kind == "part of an mlp":
            assert placements["down.weight"] == (("dp",), (Replicate(),))
        assert events.count(("all_reduce", "dp")) == 1 and {kind for kind, name in events if name == "dp"} == {
            "all_reduce"
        }


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def refusals(mesh: Any) -> None:
    adapter, tp, dp = get_adapter(), mesh["tp"], mesh["dp"]
    x = adapter.tensor(floats(2, 6))
    with fails(ValueError, "mesh['dp']"):
        replicate(adapter.Mlp(6, 7), mesh)
    with fails(TypeError, "takes a"):
        replicate(x, dp)
    with fails(ValueError, "positive number of MiB"):
        replicate(adapter.Mlp(6, 7), dp, bucket_cap_mb=-1)
    with fails(ValueError, "a device_mesh or a process_group, got both"):
        replicate(adapter.Mlp(6, 7), dp, process_group=dp.get_group())
    with fails(ValueError, "replicate(device_ids=[97])", "Leave device_ids out"):
        replicate(adapter.Mlp(6, 7), dp, device_ids=[97])
    # Twice, and of a part, over the same mesh or another; nothing is changed.
    model = adapter.Mlp(6, 7)
    replicate(model.up, dp)
    for other in (dp, tp):
        with fails(ValueError, "'up' of Mlp", "under replicate already", "once"):
            replicate(model, other)
    assert not isinstance(model.down.weight, DTensor)
    tied = adapter.Tied(7, 6)
    replicate(tied.head, dp)
    with fails(ValueError, "already", "apply replicate or fully_shard once"):
        replicate(tied.embedding, dp)
    with fails(ValueError, "under fully_shard already"):
        replicate(fully_shard(adapter.Mlp(6, 7), mesh=dp), dp)
    # A mesh of the same ranks that is a dimension of nothing.
    alone = [DeviceMesh(None, ranks, mesh_dim_names=("dp",)) for ranks in mesh.ranks.T][tp.get_local_rank(0)]
    model = parallelize_module(adapter.Mlp(6, 7), tp, {"up": ColwiseParallel()})
    with fails(ValueError, "'up.weight'", "not slices of one mesh"):
        replicate(model, alone)
    # The other way round.
    model = replicate(adapter.Mlp(6, 7), dp)
    with fails(ValueError, "placed"):
        parallelize_module(model, tp, {"up": ColwiseParallel()})
    whole = distribute_tensor(x, dp, [Replicate()])
    with fails(ValueError, "one batch", "(2, 6)"):
        adapter.call(model, (whole, x))


def test_refused(pool: Any) -> None:
    pool.run(4, refusals)
