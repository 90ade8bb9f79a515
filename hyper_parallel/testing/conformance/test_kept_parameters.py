"""Aliases that a program has saved of a parameter: they share its memory throughout data-parallel training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel import Shard, fully_shard, replicate
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_fully_shard_units import Trained, block_of, parameters, shard_block
from hyper_parallel.testing.extent import everything, on_ranks

#: How a model comes under data parallelism. Sizes do not divide, and some ranks have nothing of a parameter.
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "units in units": shard_block,
    "one unit": lambda block, mesh: fully_shard(block, mesh=mesh, reshard_after_forward=True),
    "a list": lambda block, mesh: fully_shard(
        block, mesh=mesh if fully_shard([block.attention, block.feed_forward], mesh=mesh) else None
    ),
    "kept whole": lambda block, mesh: shard_block(block, mesh, reshard_after_forward=False),
    "another dimension": lambda block, mesh: shard_block(
        block, mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim else None
    ),
    "replicate": lambda block, mesh: replicate(block, mesh),
}


def taken_of(p: Any, mesh: Any) -> dict[str, Any]:
    """Return aliases of a parameter that a program may save, by the name of the operation that makes them."""
    platform = mesh.platform
    with platform.no_dispatch(), platform.no_grad():
        memory = platform.detach(p)
    return {"to_local": p.to_local(), "detach": get_adapter().detach(p), "memory": memory}


class Kept(Trained):
    """A model in training, and saved aliases of its parameters."""

    def __init__(self, mesh: Any, way: str) -> None:
        super().__init__(mesh, lambda: block_of((6, 5)), lambda block: WAYS[way](block, mesh), (2, 6))
        self.taken: list[tuple[str, str, Any]] = []

    def take(self, when: str) -> None:
        """Save aliases of each parameter."""
        for name, p in parameters(self.sharded, self.mesh).items():
            for how, x in taken_of(p, self.mesh).items():
                self.taken.append((f"{how} {when}", name, x))

    def compare(self, when: str) -> None:
        """Check that all saved aliases have the values of the parameters."""
        adapter, wanted = self.adapter, parameters(self.sharded, self.mesh)
        locals_ = {name: adapter.numpy(p.to_local()) for name, p in wanted.items()}
        for how, name, x in self.taken:
            x = x.to_local() if hasattr(x, "to_local") else x
            same(adapter.numpy(x), locals_[name], f"{how} of {name}, {when}", 0)

    def load(self, seed: int) -> None:
        """Write new values to both models."""
        platform, rng = self.mesh.platform, np.random.default_rng(seed)
        whole = parameters(self.single, self.mesh)
        for name, p in parameters(self.sharded, self.mesh).items():
            values = rng.standard_normal(p.shape).astype(np.float32) * 0.3
            for x, part in ((p, values[p._layout.local_index()]), (whole[name], values)):
                with platform.no_dispatch(), platform.no_grad():
                    if part.size:
                        platform.write(platform.detach(x), self.adapter.tensor(np.ascontiguousarray(part)))

    def evaluate(self, seed: int) -> None:
        """Run a forward without gradients."""
        adapter = self.adapter
        x = adapter.tensor(np.random.default_rng(seed).standard_normal((3, *self.shape)).astype(np.float32))
        with self.mesh.platform.no_grad():
            found, wanted = (adapter.call(module, x) for module in (self.sharded, self.single))
        same(adapter.numpy(found), adapter.numpy(wanted), "output without gradients", 1e-4)

    def unshard(self, seed: int) -> None:
        """Unshard and reshard the parameters."""
        if hasattr(self.sharded, "unshard"):
            self.sharded.unshard()
            self.sharded.reshard()

    def copy(self, seed: int) -> None:
        """Check saved aliases of a copy, which has separate parameters."""
        other = copy.copy(self)
        other.taken, other.sharded = [], copy.deepcopy(self.sharded)
        other.take("of a copy")
        other.evaluate(seed)
        other.compare("after a forward of the copy")


@spmd.on_mesh()
def keeps(mesh: Any, way: str, seeds: list[int]) -> None:
    """Run random sequences of events, and save aliases before each event."""
    for seed in seeds:
        rng, kept = np.random.default_rng(seed), Kept(mesh, way)
        kept.take("at the beginning")
        events = ["step", "load", "evaluate", "unshard", "step", "copy"]
        for i, event in enumerate([*rng.permutation(events), "step"]):
            getattr(kept, str(event))(seed + i)
            kept.compare(f"{way}: after {event}, number {i} of seed {seed}")
            kept.take(f"after {event}")
        kept.check()


@on_ranks(1, 2, 3, gate=(3,))
def test_what_was_taken_stays_the_parameter(pool: Any, world_size: int) -> None:
    for i, way in enumerate(WAYS):
        pool.run(world_size, keeps, way, [20 * i + n for n in range(8 if everything() else 1)])
