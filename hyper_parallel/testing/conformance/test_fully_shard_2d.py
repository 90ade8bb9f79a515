"""`fully_shard` with tensor parallelism, on meshes of two and of three dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    NoParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    coalesce_gradients,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.platform.contract import Platform
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import block_plan, difference, same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard_units import Trained, block_of, parameters, shard_block
from hyper_parallel.testing.extent import in_gate

ROWS = 3
#: name -> plan of a block; inputs and outputs are the same on all tensor-parallel ranks.
PLANS: dict[str, Any] = {
    "tensor": {
        "attention.w[qkv]": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "feed_forward.w[13]": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    },
    "partly": {"feed_forward.w[13]": ColwiseParallel(), "feed_forward.w2": RowwiseParallel(), "norm1": NoParallel()},
}


def train(mesh: Any, dp: Any, tp: Any, build: Any, plan: Any, shard: Any, make: Any, steps: int = 2) -> Any:
    """Compare training steps with the single device.

    Return the collectives of each step, by direction and mesh dimension.
    """
    adapter = get_adapter()
    single, sharded, alone = (adapter.load(build(), np.random.default_rng(5)) for _ in range(3))
    parallelize_module(sharded, tp, plan)
    parallelize_module(alone, tp, plan)
    inner = {name: getattr(p, "placements", None) for name, p in parameters(sharded, mesh).items()}
    shard(sharded)
    for name, p in parameters(sharded, mesh).items():
        assert isinstance(p, DTensor), name
        if inner[name] is not None:
            assert p.device_mesh is mesh, (name, p.device_mesh)
        again = DTensor.from_local(p.to_local(), p.device_mesh, p.placements, shape=p.shape)
        assert again._layout is p._layout, name
    taken = [adapter.sgd(module, 0.1) for module in (single, sharded)]
    size = dp.size()
    rank = int(np.argwhere(dp.ranks.reshape(-1) == mesh.get_rank())[0][0])
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    counts = []

    def loss_of(module: Any, weights: np.ndarray, seen: dict[str, Any]) -> Any:
        def loss(x: Any) -> Any:
            with CommDebugMode() as comm:
                y = adapter.call(module, x)
            seen["forward"] = comm.get_comm_counts()
            return adapter.weighted_sum(y * y, adapter.tensor(weights)), y

        return loss

    for step in range(steps):
        rng = np.random.default_rng(step)
        batch = make(rng, size * ROWS)
        weights = rng.standard_normal((size * ROWS, 1, 1)).astype(np.float32)
        y, _, grads = adapter.model_value_and_grads(single, loss_of(single, weights / size, {}), batch)
        seen: dict[str, Any] = {}
        with CommDebugMode() as comm:
            got_y, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded, weights[mine], seen), batch[mine])
        seen["backward"] = difference(comm.get_comm_counts(), seen["forward"])
        without: dict[str, Any] = {}
        with CommDebugMode() as comm:
            adapter.model_value_and_grads(alone, loss_of(alone, weights[mine], without), batch[mine])
        without["backward"] = difference(comm.get_comm_counts(), without["forward"])
        counts.append((seen, without))
        same(adapter.numpy(got_y), adapter.numpy(y)[mine], f"output at step {step}", 1e-4)
        for name, whole in grads.items():
            same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name} at step {step}", 3e-4)
            assert got[name].placements == parameters(sharded, mesh)[name].placements, name
        for take, its_grads in zip(taken, (grads, got), strict=True):
            take(its_grads)
    for name, p in parameters(single, mesh).items():
        same(adapter.numpy(parameters(sharded, mesh)[name]), adapter.numpy(p), f"{name} at the end", 3e-4)
    return counts


def sequences(features: int) -> Any:
    return lambda rng, rows: rng.standard_normal((rows, 4, features)).astype(np.float32)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def block(mesh: Any, plan: str, sizes: tuple[int, int]) -> Any:
    adapter, dp = get_adapter(), mesh["dp"]
    counts = train(
        mesh,
        dp,
        mesh["tp"],
        lambda: adapter.Block(sizes[0], sizes[1], sizes[0] // 4),
        PLANS[plan],
        lambda model: shard_block(model, dp),
        sequences(sizes[0]),
    )
    return counts, mesh.platform.frees_storage


def check_counts(counts: Any, units: int, again: int) -> None:
    """Check that data parallelism only adds collectives: tensor parallelism has the same collectives as without it."""
    for seen, without in counts:
        more = {"forward": {"all_gather": units}, "backward": {"all_gather": again, "reduce_scatter": units}}
        for direction, own in more.items():
            wanted = dict(without[direction])
            for kind, n in own.items():
                wanted[kind] = wanted.get(kind, 0) + n
            assert seen[direction] == {kind: n for kind, n in wanted.items() if n}, (direction, seen, without)


@pytest.mark.parametrize("sizes", in_gate([(8, 12), (12, 14)], [(12, 14)]), ids=["even", "uneven"])
@pytest.mark.parametrize("plan", list(PLANS))
def test_block(pool: Any, plan: str, sizes: tuple[int, int]) -> None:
    for counts, frees in pool.run(4, block, plan, sizes):
        check_counts(counts, 3, 2 if frees else 0)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def sequence_parallel(mesh: Any, local_between: bool, coalesced: bool) -> Any:
    """Check plain inputs that are this rank's shard of the sequence."""
    adapter, dp, tp = get_adapter(), mesh["dp"], mesh["tp"]
    single, sharded = (adapter.load(adapter.Block(24, 36, 2), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, tp, block_plan(local_between))
    fully_shard(sharded, mesh=dp)
    rng = np.random.default_rng(1)
    batch = rng.standard_normal((2, 3, 8, 24)).astype(np.float32)
    rank, part = dp.get_local_rank(), slice(4 * tp.get_local_rank(), 4 * tp.get_local_rank() + 4)
    _, _, grads = adapter.model_value_and_grads(
        single, lambda x: (adapter.sum(adapter.square(adapter.call(single, x))) * 0.5, x), batch.reshape(6, 8, 24)
    )

    def loss(x: Any) -> Any:
        y = adapter.call(sharded, x)
        y = DTensor.from_local(y, tp, [Shard(1)]) if not isinstance(y, DTensor) else y
        return adapter.sum(adapter.square(y)).full_tensor(), x

    with CommDebugMode() as comm:
        if coalesced:
            with coalesce_gradients():
                _, _, got = adapter.model_value_and_grads(sharded, loss, batch[rank][:, part])
        else:
            _, _, got = adapter.model_value_and_grads(sharded, loss, batch[rank][:, part])
    for name, whole in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name}", 3e-4)
    return comm.get_comm_counts()


@pytest.mark.parametrize("local_between", [True, False])
def test_sequence_parallel(pool: Any, local_between: bool) -> None:
    apart = pool.run(4, sequence_parallel, local_between, False)
    together = pool.run(4, sequence_parallel, local_between, True)
    for a, b in zip(apart, together, strict=True):
        assert a.pop("all_reduce") - b.pop("all_reduce") == 3  # of four parameters of norms
        assert a == b


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def tied(mesh: Any, vocabulary: int) -> None:
    """Check a vocabulary that both mesh dimensions shard, and that two modules read."""
    adapter, dp = get_adapter(), mesh["dp"]
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    train(
        mesh,
        dp,
        mesh["tp"],
        lambda: adapter.Tied(vocabulary, 6),
        plan,
        lambda model: fully_shard(model, mesh=dp),
        lambda rng, rows: rng.integers(0, vocabulary, (rows, 4)).astype(np.int64),
    )


@pytest.mark.parametrize("vocabulary", in_gate([12, 7, 3], [7, 3]), ids=["even", "uneven", "empty"])
def test_tied_vocabulary(pool: Any, vocabulary: int) -> None:
    pool.run(4, tied, vocabulary)


@spmd.on_mesh(2, 2, names=("dp_replicate", "dp_shard"))
def hybrid(mesh: Any, sizes: tuple[int, int]) -> Any:
    trained = Trained(mesh, lambda: block_of(sizes), lambda b: shard_block(b, mesh), (2, sizes[0]))
    for step in range(2):
        trained.step(step)
    trained.check()
    return trained.counts


@pytest.mark.parametrize("sizes", in_gate([(8, 12), (6, 7)], [(6, 7)]), ids=["even", "uneven"])
def test_replicated_and_sharded(pool: Any, sizes: tuple[int, int]) -> None:
    for counts in pool.run(4, hybrid, sizes):
        for step in counts:
            assert step["forward"] == {"all_gather": 3}
            assert step["backward"]["reduce_scatter"] == step["backward"]["all_reduce"] == 3


@spmd.on_mesh(2, 1, 2, names=("dp_replicate", "dp_shard", "tp"))
def three(mesh: Any, sizes: tuple[int, int]) -> None:
    adapter, dp = get_adapter(), mesh["dp_replicate", "dp_shard"]
    train(
        mesh,
        dp,
        mesh["tp"],
        lambda: adapter.Block(sizes[0], sizes[1], sizes[0] // 4),
        PLANS["tensor"],
        lambda model: shard_block(model, dp),
        sequences(sizes[0]),
    )


@spmd.on_mesh(1, 2, 2, names=("dp_replicate", "dp_shard", "tp"))
def three_of_shards(mesh: Any, sizes: tuple[int, int]) -> None:
    adapter, dp = get_adapter(), mesh["dp_replicate", "dp_shard"]
    train(
        mesh,
        dp,
        mesh["tp"],
        lambda: adapter.Block(sizes[0], sizes[1], sizes[0] // 4),
        PLANS["tensor"],
        lambda model: shard_block(model, dp),
        sequences(sizes[0]),
    )


@pytest.mark.parametrize("job", [three, three_of_shards], ids=lambda job: job.__name__)
@pytest.mark.parametrize("sizes", in_gate([(8, 12), (12, 14)], [(12, 14)]), ids=["even", "uneven"])
def test_three_dimensions(pool: Any, job: Any, sizes: tuple[int, int]) -> None:
    pool.run(4, job, sizes)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def wrong_order(mesh: Any) -> None:
    adapter = get_adapter()
    linear = fully_shard(adapter.linear_module(4, 4), mesh=mesh["dp"])
    with fails(ValueError, "fully_shard was applied", "parallelize_module first"):
        parallelize_module(linear, mesh["tp"], ColwiseParallel())
    styled = parallelize_module(adapter.linear_module(4, 4), mesh["tp"], ColwiseParallel())
    with fails(ValueError, "'weight'", "another dimension of the same root mesh"):
        fully_shard(styled, mesh=mesh["tp"])
    with fails(ValueError, "'weight'", "init_device_mesh"):
        fully_shard(styled, mesh=init_device_mesh(None, (4,), mesh_dim_names=("dp",)))
    assert styled.weight.device_mesh is mesh["tp"]


def test_wrong_use(pool: Any) -> None:
    pool.run(4, wrong_order)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def old_state(mesh: Any) -> bool:
    """Check that an optimizer state from before `fully_shard` is refused.

    Parameters are plain or tensor-parallel. Return False if the backend has no optimizers.
    """
    adapter = get_adapter()
    if type(mesh.platform).is_optimizer is Platform.is_optimizer:
        return False
    for plan in (None, {"up": ColwiseParallel(), "down": RowwiseParallel()}):
        for name in ("adamw", "momentum"):
            mlp = adapter.load(adapter.Mlp(6, 8), np.random.default_rng(5))
            if plan is not None:
                parallelize_module(mlp, mesh["tp"], plan)

            def step(take: Any, mlp: Any = mlp) -> None:
                x = np.ones((2, 6), np.float32)
                _, _, grads = adapter.model_value_and_grads(
                    mlp, lambda x: (adapter.sum(adapter.square(adapter.call(mlp, x))), None), x
                )
                take(grads)

            _, take = adapter.optimizer(mlp, name, 0.1)
            step(take)
            fully_shard(mlp, mesh=mesh["dp"])
            before = {key: adapter.numpy(p) for key, p in parameters(mlp, mesh).items()}
            with pytest.raises(ValueError, match=r"(?i)make the optimizer after parallelize_module and fully_shard"):
                step(take)
            for key, p in parameters(mlp, mesh).items():
                same(adapter.numpy(p), before[key], f"{key}, which nothing has changed")
            step(adapter.optimizer(mlp, name, 0.1)[1])
    return True


def test_state_from_before(pool: Any) -> None:
    if not any(pool.run(4, old_state)):
        pytest.skip("programs for this framework do not have this")
