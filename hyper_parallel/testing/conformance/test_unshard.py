"""`unshard()` and `reshard()` by hand, at any point of a step: training results do not change. If a program writes to
parameters that were gathered early, the writes take effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, fully_shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_fully_shard_units import Trained, block_of, parameters, shard_block
from hyper_parallel.testing.extent import everything, on_ranks

SIZES, RESHARD = (6, 5), (None, True, False)


class ByHand(Trained):
    """A model whose units are unsharded and resharded by hand, at the points in ``drawn``."""

    def __init__(self, mesh: Any, rng: np.random.Generator) -> None:
        reshard = RESHARD[rng.integers(0, 3)]
        super().__init__(
            mesh, lambda: block_of(SIZES), lambda b: shard_block(b, mesh, reshard_after_forward=reshard), (2, SIZES[0])
        )
        self.rng, block = rng, self.sharded
        self.units = [block, block.attention, block.feed_forward]
        # Without storage to free, a unit that is gathered after its forward stays whole until `reshard`.
        for module in (block, block.attention, block.feed_forward.w1) if mesh.platform.frees_storage else ():
            mesh.platform.register_forward_pre_hook(module, lambda module, args: self.act())
            mesh.platform.register_forward_hook(module, lambda module, args, output: self.act())

    def act(self) -> None:
        """Unshard a unit, reshard it if it is not running, or do nothing."""
        unit = self.units[self.rng.integers(0, 3)]
        drawn = self.rng.integers(0, 4)
        if drawn == 0:
            unit.unshard()
        elif drawn == 1:
            handle = unit.unshard(async_op=True)
            if self.rng.integers(0, 2):
                handle.wait()


@spmd.on_mesh()
def by_hand(mesh: Any, seeds: list[int]) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        trained = ByHand(mesh, rng)
        for step in range(4):
            for _ in range(2):
                trained.act()
            if rng.integers(0, 3) == 0:
                trained.units[rng.integers(0, 3)].reshard()
            trained.step(step, calls=int(rng.integers(1, 3)))
            assert all(isinstance(p, DTensor) for p in parameters(trained.sharded, mesh).values())
        trained.check()


@spmd.on_mesh()
def tutorial(mesh: Any) -> None:
    """Check a first unshard by hand, as in torch's tutorial. Changes of unsharded parameters are refused."""
    adapter = get_adapter()
    trained = Trained(mesh, lambda: block_of(SIZES), lambda b: shard_block(b, mesh), (2, SIZES[0]))
    for step in range(3):
        trained.sharded.unshard()
        trained.step(step)
    trained.check()
    unit = fully_shard(adapter.load(adapter.linear_module(*SIZES), np.random.default_rng(5)), mesh=mesh)
    x = np.ones((2, SIZES[0]), np.float32)

    def loss(x: Any) -> Any:
        y = adapter.call(unit, x)
        return adapter.sum(y), y

    take = adapter.sgd(unit, 0.1)
    _, _, grads = adapter.model_value_and_grads(unit, loss, x)
    unit.unshard()
    unit.reshard()
    unit.set_reshard_after_backward(False)
    _, _, grads = adapter.model_value_and_grads(unit, loss, x)
    take(grads)
    stays_whole = mesh.platform.frees_storage  # else nothing can be stale
    for call in (unit.unshard, lambda: adapter.call(unit, adapter.tensor(x))) if stays_whole else ():
        with pytest.raises(RuntimeError, match=r"changed while it was unsharded: call reshard\(\)"):
            call()
    unit.reshard()
    adapter.call(unit, adapter.tensor(x))


@on_ranks(1, 2, 3)
def test_as_in_the_tutorial(pool: Any, world_size: int) -> None:
    pool.run(world_size, tutorial)


@on_ranks(1, 2, 3)
def test_anywhere_in_a_step(pool: Any, world_size: int) -> None:
    pool.run(world_size, by_hand, list(range(40 if everything() else 4)))


def replace_data(p: Any) -> None:
    p.data = p.data * 0.9


#: Whether the framework counts writes -> how a program writes to a parameter.
WAYS: dict[bool, list[Callable[[Any], Any]]] = {
    True: [lambda p: p.mul_(0.9), replace_data, lambda p: p.data.mul_(0.9)],
    False: [lambda p: p.set_data(p * 0.9)],
}


@spmd.on_mesh()
def written_between(mesh: Any) -> None:
    """Check parameters that a program writes after they were prefetched: between two units, and between two forwards.
    Some ranks have no elements of some parameters."""
    adapter, platform = get_adapter(), mesh.platform
    x = np.random.default_rng(2).standard_normal((2, 2, SIZES[0])).astype(np.float32)

    def compare(what: str, modules: list[Any]) -> None:
        found = [adapter.numpy(adapter.call(module, adapter.tensor(x))) for module in modules]
        same(found[1], found[0], what, 1e-4)

    def compare_gradients(what: str, modules: list[Any]) -> None:
        def loss_of(module: Any) -> Any:
            def loss(x: Any) -> Any:
                y = adapter.call(module, x)
                return adapter.sum(adapter.square(y)), y

            return loss

        wanted, got = (adapter.model_value_and_grads(module, loss_of(module), x) for module in modules)
        same(adapter.numpy(got[0]), adapter.numpy(wanted[0]), what, 1e-4)
        for name, gradient in wanted[2].items():
            same(adapter.numpy(got[2][name]), adapter.numpy(gradient), f"{what}: gradient of {name}", 2e-4)

    for way in WAYS[platform.counts_writes]:

        def write(*modules: Any, way: Any = way) -> None:
            with platform.no_grad():
                for module in modules:
                    for p in parameters(module, mesh).values():
                        way(p)

        def built(write: Any = write) -> list[Any]:
            modules = [adapter.load(block_of(SIZES), np.random.default_rng(5)) for _ in range(2)]
            for module in modules:
                platform.register_forward_pre_hook(module.feed_forward, lambda module, args: write(module))
            return modules

        both = built()
        sharded = shard_block(both[1], mesh)
        for step in range(3):  # prefetched from the second one on
            compare_gradients(f"step {step}", both)
        sharded.attention.set_modules_to_forward_prefetch([sharded.feed_forward])
        compare("a unit that is called by itself, and prefetches", [m.attention for m in both])
        write(*both)
        compare("the next forward", both)
        sharded.feed_forward.unshard(async_op=True)
        write(*both)
        compare("a write after unshard(async_op=True)", both)
        both = built()
        fully_shard([both[1].attention, both[1].feed_forward], mesh=mesh)
        for step in range(2):
            compare(f"step {step}, a write between two modules of one unit", both)


@on_ranks(1, 2, 4)
def test_writes_after_the_gather(pool: Any, world_size: int) -> None:
    pool.run(world_size, written_between)
