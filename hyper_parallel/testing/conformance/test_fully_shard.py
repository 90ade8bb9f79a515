"""`fully_shard` of one unit: values, gradients, collectives, memory and training steps as on a single device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import ColwiseParallel, CommDebugMode, DTensor, Replicate, Shard, parallelize_module
from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.data_parallel.fully_shard import buffers_of, fully_shard
from hyper_parallel.core.data_parallel.options import OffloadPolicy
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, floats, same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import in_gate, on_ranks

#: Rows of the batch of one rank.
ROWS = 3


def build(adapter: Any, kind: str, sizes: tuple[int, int]) -> Any:
    return adapter.Mlp(*sizes) if kind == "mlp" else adapter.linear_module(*sizes, kind == "linear")


def held_bytes(module: Any) -> int:
    """Return the bytes in the storages of unsharded parameters."""
    wholes = [b.whole for b in buffers_of(module) if b.whole is not None]
    return sum(x.untyped_storage().nbytes() for x in wholes)


@spmd.on_mesh()
def train(mesh: Any, kind: str, sizes: tuple[int, int]) -> Any:
    """Train for three steps; return the collectives of forward and backward in each."""
    adapter, size, rank = get_adapter(), mesh.shape[0], mesh.get_local_rank(0)
    single, sharded = (adapter.load(build(adapter, kind, sizes), np.random.default_rng(5)) for _ in range(2))
    assert fully_shard(sharded, mesh=mesh, reshard_after_forward=True) is sharded
    steps = [adapter.sgd(module, 0.1) for module in (single, sharded)]
    counts: list[dict[str, dict[str, int]]] = []
    mine = slice(rank * ROWS, (rank + 1) * ROWS)
    weights = np.random.default_rng(6).standard_normal((size * ROWS, sizes[kind != "mlp"])).astype(np.float32)

    def reference(x: Any) -> Any:
        y = adapter.call(single, x)
        return adapter.weighted_sum(y * y, adapter.tensor(weights / size)), y

    def distributed(x: Any) -> Any:
        with CommDebugMode() as comm:
            y = adapter.call(sharded, x)
        counts.append({"forward": comm.get_comm_counts()})
        if mesh.platform.frees_storage:
            assert held_bytes(sharded) == 0
        return adapter.weighted_sum(y * y, adapter.tensor(weights[mine])), y

    for step in range(3):
        batch = np.random.default_rng(step).standard_normal((size * ROWS, sizes[0])).astype(np.float32)
        y, grad_x, grads = adapter.model_value_and_grads(single, reference, batch)
        with CommDebugMode() as comm:
            got_y, got_grad_x, got = adapter.model_value_and_grads(sharded, distributed, batch[mine])
        counts[-1]["backward"] = difference(comm.get_comm_counts(), counts[-1]["forward"])
        if mesh.platform.frees_storage:
            assert held_bytes(sharded) == 0
        same(adapter.numpy(got_y), adapter.numpy(y)[mine], f"output at step {step}", 1e-4)
        same(got_grad_x / size, grad_x[mine], f"gradient of the input at step {step}", 1e-4)
        for name, whole in grads.items():
            assert isinstance(got[name], DTensor) and got[name].placements == (Shard(0),), name
            same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name} at step {step}", 1e-4)
        for take, its_grads in zip(steps, (grads, got), strict=True):
            take(its_grads)
    names = [f"{path}.{name}".lstrip(".") for path, name, _ in held(single, mesh)]
    for name, (_, _, p), (_, _, q) in zip(names, held(single, mesh), held(sharded, mesh), strict=True):
        assert q.placements == (Shard(0),) and tuple(q.shape) == tuple(p.shape)
        same(adapter.numpy(q), adapter.numpy(p), f"{name} after three steps", 1e-4)
    assert counts[0] == counts[1] == counts[2]
    return counts[0], mesh.platform.frees_storage


def held(module: Any, mesh: Any) -> list[tuple[str, str, Any]]:
    """Return (path, name, parameter) for all parameters of a model."""
    platform = mesh.platform
    return [(path, *p) for path, sub in platform.named_modules(module) for p in platform.named_parameters(sub)]


# With 5 rows, a rank of four has none; with 2, two of four.
@pytest.mark.parametrize(
    "sizes",
    in_gate([(8, 12), (6, 7), (7, 5), (3, 2)], [(6, 7), (3, 2)]),
    ids=["even", "uneven", "empty", "mostly empty"],
)
@pytest.mark.parametrize("kind", ["linear", "linear without bias", "mlp"])
@on_ranks(1, 2, 3, 4)
def test_training(pool: Any, world_size: int, kind: str, sizes: tuple[int, int]) -> None:
    for counts, frees in pool.run(world_size, train, kind, sizes):
        gather = {"all_gather": 1} if world_size > 1 else {}
        again = gather if frees else {}
        assert counts == {"forward": gather, "backward": {**again, "reduce_scatter": 1} if world_size > 1 else {}}


@spmd.on_mesh()
def kept(mesh: Any) -> None:
    """Check a unit with a shared parameter that runs twice in a step, without gradients, and after an error."""
    adapter, size = get_adapter(), mesh.shape[0]
    ids = np.random.default_rng(8).integers(0, 7, (size, 3)).astype(np.int64)
    single, sharded = (adapter.load(adapter.Tied(7, 6), np.random.default_rng(5)) for _ in range(2))
    fully_shard(sharded, mesh=mesh)
    with pytest.raises(TypeError):
        adapter.call(sharded)

    def loss_of(module: Any, scale: float) -> Any:
        def loss(x: Any) -> Any:
            total = sum(adapter.sum(adapter.square(y)) for y in (adapter.call(module, x), adapter.call(module, x)))
            return total * scale, total

        return loss

    _, _, grads = adapter.model_value_and_grads(single, loss_of(single, 1 / size), ids)
    mine = ids[mesh.get_local_rank(0) :][:1]
    _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded, 1.0), mine)
    for name, whole in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name}", 1e-4)
    with mesh.platform.no_grad(), CommDebugMode() as comm:
        y = adapter.call(sharded, adapter.tensor(mine))
    assert comm.get_comm_counts() == ({"all_gather": 1} if size > 1 else {})
    same(adapter.numpy(y), adapter.numpy(adapter.call(single, adapter.tensor(mine))), "output without gradients")


@on_ranks(1, 2, 3, 4)
def test_called_twice_tied_and_without_gradients(pool: Any, world_size: int) -> None:
    pool.run(world_size, kept)


@spmd.on_mesh()
def refusals(mesh: Any) -> None:
    adapter = get_adapter()
    x = adapter.tensor(floats(2, 4))
    unit = fully_shard(adapter.linear_module(4, 4), mesh=mesh)
    with fails(ValueError, "applied to this", "already"):
        fully_shard(unit, mesh=mesh)
    tied = adapter.Tied(4, 4)
    fully_shard(tied.head, mesh=mesh)
    with fails(ValueError, "sharded by fully_shard already", "'weight'", "modules with this parameter"):
        fully_shard(tied.embedding, mesh=mesh)
    tensor_parallel = parallelize_module(adapter.linear_module(4, 4), mesh, ColwiseParallel())
    with fails(ValueError, "'weight'", "another dimension of the same root mesh"):
        fully_shard(tensor_parallel, mesh=mesh)
    with fails(TypeError, "takes a"):
        fully_shard(x, mesh=mesh)
    with fails(TypeError, "reshard_after_forward", "2.0"):
        fully_shard(adapter.linear_module(4, 4), mesh=mesh, reshard_after_forward=2.0)
    for number in (3, 0, -1):
        with fails(ValueError, "reshard_after_forward", "does not divide 2"):
            fully_shard(adapter.linear_module(4, 4), mesh=mesh, reshard_after_forward=number)
    platform = mesh.platform
    for trained in (True, False):
        shares = adapter.linear_module(4, 4)
        if platform.span(platform.detach(shares.weight)) is None:
            break
        shares.register_buffer("seen", platform.detach(shares.weight))
        if trained:
            with fails(ValueError, "parameter 'weight'", "buffer 'seen'", "share memory", "the same Parameter object"):
                fully_shard(shares, mesh=mesh)
            assert not isinstance(shares.weight, DTensor)
        else:  # nothing writes to a frozen parameter
            adapter.freeze(shares, "weight")
            assert isinstance(fully_shard(shares, mesh=mesh).weight, DTensor)
    mlp = adapter.Mlp(4, 4)
    for modules in ([], [mlp, mlp.up], [mlp.up, mlp.up]):
        with fails(ValueError, "list of distinct modules"):
            fully_shard(modules, mesh=mesh)
    with fails(TypeError, "list of them"):
        fully_shard([mlp, 3], mesh=mesh)
    with fails(TypeError, "mp_policy"):
        fully_shard(adapter.linear_module(4, 4), mesh=mesh, mp_policy=OffloadPolicy())
    with fails(TypeError, "shard_placement_fn", "Replicate"):
        fully_shard(adapter.linear_module(4, 4), mesh=mesh, shard_placement_fn=lambda p: Replicate())
    with fails(ValueError, "'bias'", "Shard(dim=1)"):
        fully_shard(adapter.linear_module(4, 4), mesh=mesh, shard_placement_fn=lambda p: Shard(1))


def test_refused(pool: Any) -> None:
    pool.run(2, refusals)


@spmd.on_mesh(2, 1, 2, names=("a", "b", "c"))
def three_dimensions(mesh: Any) -> None:
    linear = get_adapter().linear_module(4, 4)
    with fails(ValueError, "mesh['dp']"):
        fully_shard(linear, mesh=mesh)
    fully_shard(linear, mesh=mesh["a", "b"])


def test_mesh_of_three_dimensions(pool: Any) -> None:
    pool.run(4, three_dimensions)


@spmd.on_mesh()
def started(mesh: Any) -> None:
    """Check that an asynchronous redistribution gives the result of a synchronous one."""
    adapter, platform, size, rank = get_adapter(), mesh.platform, mesh.shape[0], mesh.get_local_rank(0)
    every = np.random.default_rng(3).standard_normal((size, 2 * size)).astype(np.float32)
    for collective, count, wanted in (
        ("all_gather", 2 * size * size, every.reshape(-1)),
        ("reduce_scatter", 2, every.mean(0).reshape(size, 2)[rank]),
        ("all_reduce", 2 * size, every.mean(0)),
    ):
        out = platform.factory("empty", (count,), None, adapter.tensor(every).dtype)
        work = asynchronous.start(collective, out, adapter.tensor(every[rank]), mesh, 0, "avg")
        work.wait()
        same(adapter.numpy(out), wanted, collective)


@on_ranks(1, 2, 3, 4)
def test_asynchronous_collectives(pool: Any, world_size: int) -> None:
    pool.run(world_size, started)


@spmd.on_mesh()
def bytes_of_shards(mesh: Any) -> None:
    """Check that a shard can be written as bytes and read again, as a checkpoint does."""
    adapter, platform = get_adapter(), mesh.platform
    unit = fully_shard(adapter.load(adapter.linear_module(4, 5), np.random.default_rng(5)), mesh=mesh)
    before = np.array(adapter.numpy(unit.weight))
    with platform.no_dispatch(), platform.no_grad():
        shard = platform.detach(unit.weight)
        values = platform.bytes_of(shard)
        platform.write(unit.weight, shard * 2)
        platform.write(unit.weight, platform.from_bytes(values, platform.shape_of(shard), shard.dtype))
    assert (adapter.numpy(unit.weight) == before).all()


@on_ranks(2, 4)
def test_bytes(pool: Any, world_size: int) -> None:
    pool.run(world_size, bytes_of_shards)
