"""`unshard()` and `reshard()` by hand, at any point of a step: training results do not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, fully_shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
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
