"""Nested units of `fully_shard`: which unit each parameter belongs to, the order of gathers, and training results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, FSDPModule, Shard, fully_shard
from hyper_parallel.core.data_parallel.fully_shard import buffers_of
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, same
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import in_gate, on_ranks

ROWS = 3


def parameters(module: Any, mesh: Any) -> dict[str, Any]:
    """Return the parameters by name."""
    platform = mesh.platform
    return {
        f"{path}.{name}".lstrip("."): p
        for path, sub in platform.named_modules(module)
        for name, p in platform.named_parameters(sub)
    }


def block_of(sizes: tuple[int, int]) -> Any:
    """Return a transformer block of (features, hidden)."""
    return get_adapter().Block(sizes[0], sizes[1], sizes[0] // 2)


def shard_block(block: Any, mesh: Any, **options: Any) -> Any:
    """Make attention and feed-forward separate units, and put the norms in the unit of the block."""
    fully_shard(block.attention, mesh=mesh, **options)
    fully_shard(block.feed_forward, mesh=mesh, **options)
    return fully_shard(block, mesh=mesh, **options)


class Trained:
    """A model and its sharded copy, whose training steps must agree."""

    def __init__(self, mesh: Any, build: Any, shard: Any, shape: tuple[int, ...], rate: float = 0.1) -> None:
        self.mesh, self.shape, self.adapter = mesh, shape, get_adapter()
        self.size, self.rank = mesh.size(), int(np.argwhere(mesh.ranks.reshape(-1) == mesh.get_rank())[0][0])
        self.single, self.sharded = (self.adapter.load(build(), np.random.default_rng(5)) for _ in range(2))
        shard(self.sharded)
        self.steps = [self.adapter.sgd(module, rate) for module in (self.single, self.sharded)]
        self.counts: list[dict[str, dict[str, int]]] = []

    def step(self, seed: int, calls: int = 1) -> None:
        """Run one training step on a new batch, with ``calls`` calls of the model."""
        adapter, rng = self.adapter, np.random.default_rng(seed)
        batch = rng.standard_normal((self.size * ROWS, *self.shape)).astype(np.float32)
        weights = rng.standard_normal((self.size * ROWS, *self.shape)).astype(np.float32)
        mine = slice(self.rank * ROWS, (self.rank + 1) * ROWS)

        def loss_of(module: Any, weights: np.ndarray) -> Any:
            def loss(x: Any) -> Any:
                with CommDebugMode() as comm:
                    total = None
                    for i in range(calls):
                        y = adapter.call(module, x * (1.0 + i))
                        term = adapter.weighted_sum(y * y, adapter.tensor(weights))
                        total = term if total is None else total + term
                self.forward = comm.get_comm_counts()
                return total, y

            return loss

        y, _, grads = adapter.model_value_and_grads(self.single, loss_of(self.single, weights / self.size), batch)
        with CommDebugMode() as comm:
            got_y, _, got = adapter.model_value_and_grads(
                self.sharded, loss_of(self.sharded, weights[mine]), batch[mine]
            )
        self.counts.append({"forward": self.forward, "backward": difference(comm.get_comm_counts(), self.forward)})
        same(adapter.numpy(got_y), adapter.numpy(y)[mine], f"output, seed {seed}", 1e-4)
        for name, whole in grads.items():
            if whole is None:
                assert got[name] is None, name
                continue
            assert isinstance(got[name], DTensor), name
            same(adapter.numpy(got[name]), adapter.numpy(whole), f"gradient of {name}, seed {seed}", 2e-4)
        for take, its_grads in zip(self.steps, (grads, got), strict=True):
            take(its_grads)

    def check(self) -> None:
        """Check that the parameters are equal."""
        wanted, got = (parameters(module, self.mesh) for module in (self.single, self.sharded))
        assert list(wanted) == list(got)
        for name, p in wanted.items():
            same(self.adapter.numpy(got[name]), self.adapter.numpy(p), f"{name} at the end", 2e-4)


@spmd.on_mesh()
def nested(mesh: Any, sizes: tuple[int, int], reshard: bool | None) -> Any:
    def shard(block: Any) -> None:
        shard_block(block, mesh, reshard_after_forward=reshard)

    trained = Trained(mesh, lambda: block_of(sizes), shard, (2, sizes[0]))
    block = trained.sharded
    assert isinstance(block, FSDPModule) and isinstance(block.attention, FSDPModule)
    assert not isinstance(block.attention.wq, FSDPModule)
    for step in range(3):
        trained.step(step)
    trained.step(7, calls=2)
    trained.check()
    if mesh.platform.frees_storage:
        for module in (block, block.attention, block.feed_forward):
            (buffer,) = buffers_of(module)
            assert buffer.whole.untyped_storage().nbytes() == 0
    return trained.counts, mesh.platform.frees_storage


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("sizes", in_gate([(8, 12), (6, 7)], [(6, 7)]), ids=["even", "uneven"])
@on_ranks(1, 2, 3, 4)
def test_nested(pool: Any, world_size: int, sizes: tuple[int, int], reshard: bool | None) -> None:
    for counts, frees in pool.run(world_size, nested, sizes, reshard):
        # The block stays whole until the end of its first forward; its inner units are freed after one backward.
        again = {None: (2, 4), True: (3, 5), False: (0, 2)}[reshard] if frees else (0, 0)
        for i, step in enumerate(counts):
            calls = 2 if i == 3 else 1
            if world_size == 1:
                assert step == {"forward": {}, "backward": {}}
                continue
            assert step["forward"] == {"all_gather": 3 * calls}
            backward = dict(step["backward"])
            assert backward.pop("reduce_scatter") == 3 * calls
            assert backward.pop("all_gather", 0) == again[calls - 1] and not backward


@spmd.on_mesh()
def owned(mesh: Any) -> None:
    """Check tied, frozen and ignored parameters, modules without parameters, and dimensions other than the first."""
    adapter = get_adapter()

    def frozen(*names: str) -> Any:
        block = block_of((8, 12))
        for name in parameters(block, mesh):
            if name.startswith(names):
                adapter.freeze(block, name)
        return block

    for names in (("attention.wk", "norm1"), ("attention",)):
        trained = Trained(mesh, lambda names=names: frozen(*names), lambda b: shard_block(b, mesh), (2, 8))
        for step in range(2):
            trained.step(step)
        trained.check()
    ignored = block_of((8, 12))
    left = parameters(ignored.feed_forward, mesh)
    fully_shard(ignored, mesh=mesh, ignored_params=set(left.values()))
    assert not any(isinstance(p, DTensor) for p in parameters(ignored.feed_forward, mesh).values())
    assert all(isinstance(p, DTensor) for p in parameters(ignored.attention, mesh).values())
    probe = fully_shard(adapter.Probe(), mesh=mesh)
    with CommDebugMode() as comm:
        adapter.call(probe, adapter.tensor(np.ones((2, 3), np.float32)))
    assert comm.get_total_counts() == 0

    def by_columns(p: Any) -> Any:
        return Shard(-1)

    for sizes in ((8, 12), (6, 7)):
        columns = Trained(
            mesh,
            lambda sizes=sizes: block_of(sizes),
            lambda b: shard_block(b, mesh, shard_placement_fn=by_columns),
            (2, sizes[0]),
        )
        assert columns.sharded.attention.wq.weight.placements == (Shard(1),)
        for step in range(2):
            columns.step(step)
        columns.check()


@on_ranks(1, 2, 3, 4)
def test_parameters_of_all_kinds(pool: Any, world_size: int) -> None:
    pool.run(world_size, owned)


@spmd.on_mesh()
def methods(mesh: Any) -> None:
    """Check the effects of the methods on modules."""
    adapter = get_adapter()
    rng = np.random.default_rng(3)
    block = shard_block(adapter.load(block_of((8, 12)), rng), mesh)
    single = adapter.load(block_of((8, 12)), np.random.default_rng(3))
    x = adapter.tensor(rng.standard_normal((2, 2, 8)).astype(np.float32))
    wanted = adapter.numpy(adapter.call(single.feed_forward, x))
    unit = block.feed_forward
    # Without storage to free, parameters that `unshard` has made whole serve one forward.
    gathers = 0 if mesh.size() == 1 else 1 if mesh.platform.frees_storage else 2
    for async_op in (False, True):
        with CommDebugMode() as comm:
            handle = unit.unshard(async_op=async_op)
            if async_op:
                handle.wait()
            same(adapter.numpy(unit.w1.weight), adapter.numpy(single.feed_forward.w1.weight), "whole")
            assert not isinstance(unit.w1.weight, DTensor)
            same(adapter.numpy(adapter.call(unit, x)), wanted, "output of a whole unit")
            same(adapter.numpy(adapter.call(unit, x)), wanted, "output of a whole unit, again")
        assert comm.get_total_counts() == gathers
        unit.reshard()
        assert isinstance(unit.w1.weight, DTensor)
    block.attention.set_modules_to_forward_prefetch([block.feed_forward])
    block.feed_forward.set_modules_to_backward_prefetch([block.attention])
    same(adapter.numpy(adapter.call(block, x)), adapter.numpy(adapter.call(single, x)), "with explicit prefetch")
    for refused in (
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "set_all_reduce_hook",
        "set_post_optim_event",
    ):
        with fails(TypeError, refused):
            getattr(block, refused)(3)
    with fails(ValueError, "stream"):
        block.set_all_reduce_hook(print, stream=3)
    with fails(ValueError, "set_modules_to_forward_prefetch", "fully_shard was applied"):
        block.set_modules_to_forward_prefetch([single])
    with fails(ValueError, "set_gradient_divide_factor"):
        block.set_gradient_divide_factor(0)
    with fails(ValueError, "set_reshard_after_forward"):
        block.set_reshard_after_forward(1)


@on_ranks(1, 2, 3)
def test_methods(pool: Any, world_size: int) -> None:
    pool.run(world_size, methods)


@spmd.on_mesh()
def accumulated(mesh: Any) -> Any:
    """Check two micro batches of which only the second reduces gradients, and other scales of gradients."""
    adapter, size, rank = get_adapter(), mesh.shape[0], mesh.get_local_rank(0)
    rng = np.random.default_rng(4)
    batches = rng.standard_normal((2, size * ROWS, 2, 8)).astype(np.float32)
    mine = slice(rank * ROWS, (rank + 1) * ROWS)

    def loss_of(module: Any) -> Any:
        def loss(x: Any) -> Any:
            y = adapter.call(module, x)
            return adapter.sum(y * y), y

        return loss

    single = adapter.load(block_of((8, 12)), np.random.default_rng(5))
    wanted: dict[str, Any] = {}
    for batch in batches:
        _, _, grads = adapter.model_value_and_grads(single, loss_of(single), batch)
        for name, g in grads.items():
            wanted[name] = wanted.get(name, 0) + adapter.numpy(g)
    for factor in (None, 3.0):
        for force_sum in (False, True):
            sharded = shard_block(adapter.load(block_of((8, 12)), np.random.default_rng(5)), mesh)
            for _, module in mesh.platform.named_modules(sharded):
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(force_sum)
                    if factor is not None:
                        module.set_gradient_divide_factor(factor)
            total: dict[str, Any] = {}
            for i, batch in enumerate(batches):
                sharded.set_requires_gradient_sync(i == 1)
                with CommDebugMode() as comm:
                    _, _, grads = adapter.model_value_and_grads(sharded, loss_of(sharded), batch[mine])
                assert comm.get_comm_counts().get("reduce_scatter", 0) == (3 if i and size > 1 else 0)
                for name, g in grads.items():
                    if g is not None:
                        total[name] = total.get(name, 0) + adapter.numpy(g)
            for name, g in wanted.items():
                same(total[name], g / (factor or size), f"{name}, factor {factor}, force_sum {force_sum}", 2e-4)


@on_ranks(1, 2, 3)
def test_accumulated_without_communication(pool: Any, world_size: int) -> None:
    pool.run(world_size, accumulated)
