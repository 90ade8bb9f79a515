"""Rare arguments of `fully_shard`: fewer ranks after forward, several modules, custom collectives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DataParallelMeshDims, FSDPModule, Shard, fully_shard
from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.data_parallel.fully_shard import buffers_of
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.conformance.test_fully_shard import held_bytes
from hyper_parallel.testing.conformance.test_fully_shard_units import Trained, block_of, shard_block
from hyper_parallel.testing.extent import in_gate, on_ranks

EVEN, UNEVEN = (8, 12), (6, 7)


def sent(comm: Any) -> list[tuple[str, int, int]]:
    """Return the kind, number of ranks and operand elements of each collective."""
    return [(e.kind, e.mesh.shape[e.mesh_dim], int(np.prod(e.shape))) for e in comm.events]


@spmd.on_mesh()
def fewer(mesh: Any, sizes: tuple[int, int], ranks: int) -> Any:
    """Train with parameters that stay sharded over ``ranks`` ranks after forward.

    Return the sizes of the gathers of each unit.
    """

    def shard(block: Any) -> None:
        shard_block(block, mesh, reshard_after_forward=ranks)

    trained = Trained(mesh, lambda: block_of(sizes), shard, (2, sizes[0]))
    with CommDebugMode() as comm:
        trained.step(0)
    # The events after the last reduction are comparisons.
    events = sent(comm)
    last = max((i for i, (kind, _, _) in enumerate(events) if kind == "reduce_scatter"), default=0)
    gathers = [(size, count) for kind, size, count in events[:last] if kind == "all_gather"]
    trained.step(1)
    trained.step(2, calls=2)
    for module in (trained.sharded, trained.sharded.attention, trained.sharded.feed_forward):
        assert not mesh.platform.frees_storage or held_bytes(module) == 0
        assert all(b.part is None for b in buffers_of(module))
    with mesh.platform.no_grad():
        trained.adapter.call(trained.sharded, trained.adapter.tensor(np.ones((1, 2, sizes[0]), np.float32)))
    trained.sharded.set_reshard_after_forward(True)
    trained.step(3)
    trained.check()
    whole = [b.whole.shape[0] for b in buffers_of(trained.sharded.attention) if b.whole is not None]
    return gathers, whole, mesh.platform.frees_storage


@pytest.mark.parametrize(
    ("world_size", "ranks", "sizes"),
    in_gate(
        [(4, 2, EVEN), (4, 2, UNEVEN), (2, 2, UNEVEN), (2, 1, EVEN), (1, 1, EVEN)],
        [(4, 2, UNEVEN), (2, 1, EVEN)],
        unpack=True,
    ),
    ids=str,
)
def test_fewer_ranks(pool: Any, world_size: int, ranks: int, sizes: tuple[int, int]) -> None:
    for gathers, whole, frees in pool.run(world_size, fewer, sizes, ranks):
        if world_size == 1:
            assert not gathers
            continue
        forward, backward = gathers[:3], gathers[3:]
        assert [size for size, _ in forward] == [world_size] * 3
        if ranks == 1 or not frees:  # each rank keeps all
            assert not backward
            continue
        assert [size for size, _ in backward] == [ranks] * 3
        assert -(-whole[0] // ranks) in [count for _, count in backward]


@spmd.on_mesh(1, 4, names=("dp_replicate", "dp_shard"))
def fewer_on_two_dimensions(mesh: Any) -> None:
    def shard(block: Any) -> None:
        shard_block(block, mesh, reshard_after_forward=2)

    trained = Trained(mesh, lambda: block_of((8, 12)), shard, (2, 8))
    for step in range(2):
        trained.step(step)
    trained.check()


def test_fewer_ranks_of_a_slice(pool: Any) -> None:
    pool.run(4, fewer_on_two_dimensions)


@spmd.on_mesh()
def together(mesh: Any, reshard: bool | None) -> Any:
    """Check attention and feed-forward as one unit: one gather before both, and one reduction after both."""

    def shard(block: Any) -> None:
        modules = [block.attention, block.feed_forward]
        assert fully_shard(modules, mesh=mesh, reshard_after_forward=reshard) is modules
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)

    trained = Trained(mesh, lambda: block_of((6, 7)), shard, (2, 6))
    block: Any = trained.sharded
    assert all(isinstance(m, FSDPModule) for m in (block, block.attention, block.feed_forward))
    with fails(ValueError, "already"):
        fully_shard(block.feed_forward, mesh=mesh)
    for step in range(2):
        trained.step(step)
    counts = list(trained.counts)
    trained.step(2, calls=2)
    trained.check()
    if mesh.platform.frees_storage:
        assert held_bytes(block.attention) == 0 and buffers_of(block.attention) is buffers_of(block.feed_forward)
    twin = copy.deepcopy(block)
    adapter, x = trained.adapter, np.random.default_rng(3).standard_normal((2, 2, 6)).astype(np.float32)
    wanted = adapter.numpy(adapter.call(trained.single, adapter.tensor(x)))
    same(adapter.numpy(adapter.call(twin, adapter.tensor(x))), wanted, "a copy", 1e-4)
    # One of them by itself, and again, with the other not called at all.
    alone = adapter.numpy(adapter.call(trained.single.feed_forward, adapter.tensor(x)))
    for _ in range(2):
        same(adapter.numpy(adapter.call(block.feed_forward, adapter.tensor(x))), alone, "one alone", 1e-4)
    same(adapter.numpy(adapter.call(block, adapter.tensor(x))), wanted, "after that", 1e-4)
    return counts, mesh.platform.frees_storage


@pytest.mark.parametrize("reshard", in_gate([None, True, False], [None, False]))
@on_ranks(1, 2, 3)
def test_several_modules(pool: Any, world_size: int, reshard: bool | None) -> None:
    for counts, frees in pool.run(world_size, together, reshard):
        again = {None: 1, True: 2, False: 0}[reshard] if frees else 0
        for step in counts:
            if world_size == 1:
                assert step == {"forward": {}, "backward": {}}
                continue
            assert step["forward"] == {"all_gather": 2}
            gathers = {"all_gather": again} if again else {}
            assert step["backward"] == {**gathers, "reduce_scatter": 2}


@spmd.on_mesh()
def tied_in_two(mesh: Any) -> None:
    """Check a parameter that both modules of a unit share."""
    adapter = get_adapter()
    ids = np.random.default_rng(8).integers(0, 7, (mesh.size(), 3)).astype(np.int64)
    single, sharded = (adapter.load(adapter.Tied(7, 6), np.random.default_rng(5)) for _ in range(2))
    fully_shard([sharded.embedding, sharded.head], mesh=mesh, reshard_after_forward=True)
    assert sharded.embedding.weight is sharded.head.weight if hasattr(sharded.embedding, "weight") else True
    mine = ids[mesh.get_local_rank(0) :][:1]

    def loss_of(module: Any) -> Any:
        return lambda x: (adapter.sum(adapter.square(adapter.call(module, x))), None)

    _, _, grads = adapter.model_value_and_grads(single, loss_of(single), ids)
    _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded), mine)
    for name, whole in grads.items():
        same(adapter.numpy(got[name]) * mesh.size(), adapter.numpy(whole), f"gradient of {name}", 1e-4)


@on_ranks(1, 2, 3)
def test_a_parameter_of_both(pool: Any, world_size: int) -> None:
    pool.run(world_size, tied_in_two)


class Own:
    """Custom collective of a program, with the interface of the contract. The object counts its calls."""

    def __init__(self, mesh: Any, collective: str) -> None:
        self.mesh, self.collective = mesh, collective
        self.allocated = self.called = 0
        self.ops: list[Any] = []

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        self.allocated += 1
        return self.mesh.platform.factory("empty", tuple(size), None, dtype)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, *op: Any, async_op: bool = False) -> Any:
        assert async_op and group == self.mesh.get_group(0)
        self.called += 1
        self.ops += op
        work = asynchronous.start(self.collective, output_tensor, input_tensor, self.mesh, 0, "sum" if op else "")
        if self.called % 2:
            work.wait()
            return None
        return work


class Event:
    """Event that `set_post_optim_event` waits for."""

    waited = 0

    def wait(self) -> None:
        self.waited += 1


@spmd.on_mesh()
def brought(mesh: Any) -> None:
    """Check custom collectives, a hook on the reduced gradients, and an event."""
    trained = Trained(mesh, lambda: block_of((6, 7)), lambda b: shard_block(b, mesh), (2, 6))
    gather, reduce = Own(mesh, "all_gather"), Own(mesh, "reduce_scatter")
    block: Any = trained.sharded
    block.attention.set_custom_all_gather(gather)
    block.attention.set_custom_reduce_scatter(reduce)
    with CommDebugMode() as comm:
        trained.step(0)
    alone = mesh.size() == 1
    backward = 1 if mesh.platform.frees_storage else 0
    assert gather.called == (0 if alone else 1 + backward) and reduce.called == (0 if alone else 1)
    assert reduce.ops == ([] if alone else [mesh.platform.native_op("sum")])
    assert gather.allocated == 2 * (1 + backward) and reduce.allocated == 2
    assert comm.get_comm_counts().get("reduce_scatter", 0) == (0 if alone else 3 + 1)  # its own is recorded twice
    block.attention.set_custom_all_gather(None)
    block.attention.set_custom_reduce_scatter(None)
    rows: list[Any] = []

    def hook(row: Any) -> None:
        rows.append(row.shape[0])
        with mesh.platform.no_grad():
            mesh.platform.write(row, row * 1.0)

    event = Event()
    block.feed_forward.set_all_reduce_hook(hook)
    block.set_post_optim_event(event)
    trained.step(1)
    trained.step(2)
    block.feed_forward.set_all_reduce_hook(None)
    trained.step(3)
    trained.check()
    assert event.waited == 1
    (buffer,) = buffers_of(block.feed_forward)
    assert rows == [sum(b.reduced for b in buffer.blocks)] * 2


@on_ranks(1, 2, 3)
def test_what_a_program_brings(pool: Any, world_size: int) -> None:
    pool.run(world_size, brought)


@spmd.on_mesh()
def hooked(mesh: Any) -> None:
    """Check that the gradient is the value that a hook writes."""
    adapter = get_adapter()
    linear = fully_shard(adapter.load(adapter.linear_module(5, 5), np.random.default_rng(5)), mesh=mesh)

    def double(row: Any) -> None:
        with mesh.platform.no_grad():
            mesh.platform.write(row, row * 2.0)

    x = np.random.default_rng(1).standard_normal((2, 5)).astype(np.float32)
    found = []
    for hook in (None, double):
        linear.set_all_reduce_hook(hook)
        _, _, grads = adapter.model_value_and_grads(linear, lambda x: (adapter.sum(adapter.call(linear, x)), None), x)
        found.append({name: adapter.numpy(g) for name, g in grads.items()})
    for name, g in found[0].items():
        same(found[1][name], 2 * g, name)


@on_ranks(1, 2, 3)
def test_a_hook_changes_gradients(pool: Any, world_size: int) -> None:
    pool.run(world_size, hooked)


@spmd.on_mesh(2, 2, 1, names=("a", "b", "c"))
def dimensions(mesh: Any) -> None:
    for dims, names in (
        (DataParallelMeshDims(shard="a"), ("a",)),
        (DataParallelMeshDims(shard=("a", "b")), ("a_b",)),
        (DataParallelMeshDims("b", "a"), ("a", "b")),
    ):
        trained = Trained(
            mesh[tuple(names)] if "a_b" not in names else mesh["a", "b"],
            lambda: block_of((6, 7)),
            lambda block, dims=dims: shard_block(block, mesh, dp_mesh_dims=dims),
            (2, 6),
        )
        weight = trained.sharded.attention.wq.weight
        assert weight.device_mesh.mesh_dim_names == names and weight.placements[-1] == Shard(0)
        trained.step(0)
        trained.step(1)
        trained.check()
    linear = get_adapter().linear_module(4, 4)
    with fails(ValueError, "has no dimension 'dp'"):
        fully_shard(linear, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("dp"))
    with fails(ValueError, "comes after the shard dimension"):
        fully_shard(linear, mesh=mesh, dp_mesh_dims=DataParallelMeshDims("a", "b"))
    with fails(TypeError, "DataParallelMeshDims"):
        fully_shard(linear, mesh=mesh, dp_mesh_dims="a")
    with fails(ValueError, "replicate(module, mesh)"):
        DataParallelMeshDims(replicate="a")


def test_dimensions_by_name(pool: Any) -> None:
    pool.run(4, dimensions)
