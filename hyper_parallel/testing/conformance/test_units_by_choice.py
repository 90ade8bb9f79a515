"""Ranks that run different units of `fully_shard`: all raise an error. Ranks that change the order together
continue."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, RankMismatchError, check_ranks, fully_shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.conformance.test_fully_shard_units import Trained
from hyper_parallel.testing.extent import everything, on_ranks

COUNT, FEATURES = 4, 6


def build(mesh: Any) -> Any:
    """Return a model of linear layers, which calls the layers in ``order``, one after the other."""
    adapter = get_adapter()
    root = adapter.Probe()
    for i in range(COUNT):
        setattr(root, f"expert{i}", adapter.linear_module(FEATURES, FEATURES))
    object.__setattr__(root, "order", [[0]])

    def forward(self: Any, x: Any) -> Any:
        for i in self.order[0]:
            x = x + getattr(self, f"expert{i}")(x)
        return x

    mesh.platform.replace_forward(root, lambda _: forward)
    return root


def shard(root: Any, mesh: Any, **options: Any) -> Any:
    for i in range(COUNT):
        fully_shard(getattr(root, f"expert{i}"), mesh=mesh, **options)
    return fully_shard(root, mesh=mesh)


def orders_of(rng: np.random.Generator, count: int) -> list[list[int]]:
    return [list(rng.integers(0, COUNT, rng.integers(1, 5))) for _ in range(count)]


def together(seeds: list[int]) -> None:
    """Check that all ranks can change the order of units together, often and back again, with single-device results."""
    # Meshes of the same ranks; all ranks of the pool make them, also those that are in none.
    meshes = [spmd.device_mesh(names=(f"other{seed}",) if seed % 2 else None) for seed in seeds]
    for seed, here in zip(seeds, meshes, strict=True):
        if here is None:
            continue
        rng = np.random.default_rng(seed)
        trained = Trained(here, partial(build, here), partial(shard, mesh=here), (FEATURES,), 1e-4)
        known = orders_of(rng, 3)
        for step in range(7):
            order = known[rng.integers(0, 3)]
            for root in (trained.single, trained.sharded):
                root.order[0] = order
            with check_ranks(here) if step == 5 else nullcontext():
                trained.step(step, calls=int(rng.integers(1, 3)))
        trained.check()


@spmd.on_mesh()
def by_choice(mesh: Any, seeds: list[int]) -> None:
    """Check ranks that each choose their first unit at random: equal choices run, and different choices raise on all
    ranks."""
    adapter, rank, x = get_adapter(), mesh.get_local_rank(0), np.ones((2, FEATURES), np.float32)
    for seed in seeds:
        drawn = [orders_of(np.random.default_rng([seed, r // (1 + seed % 2)]), 1)[0] for r in range(mesh.size())]
        root = adapter.load(build(mesh), np.random.default_rng(5))
        root.order[0] = drawn[rank]
        wanted = adapter.numpy(adapter.call(root, adapter.tensor(x)))
        shard(root, mesh)
        with check_ranks(mesh) if seed % 3 == 0 else nullcontext():
            if all(order == drawn[0] for order in drawn):
                np.testing.assert_allclose(adapter.numpy(adapter.call(root, adapter.tensor(x))), wanted, rtol=1e-4)
                continue
            with pytest.raises(RankMismatchError) as error:
                adapter.call(root, adapter.tensor(x))
        at = next(i for i in range(5) if len({tuple(order[i : i + 1]) for order in drawn}) > 1)
        for order in drawn:
            if at < len(order):
                assert f"'expert{order[at]}'" in str(error.value), (drawn, str(error.value))
        assert "apply fully_shard to the module around the choice" in str(error.value)
        # Ranks that go on together after it are right.
        together = list(range(COUNT))
        single = adapter.load(build(mesh), np.random.default_rng(5))
        for order in (together, together, [1], together):
            single.order[0] = root.order[0] = order
            found, wanted = (adapter.numpy(adapter.call(module, adapter.tensor(x))) for module in (root, single))
            np.testing.assert_allclose(found, wanted, rtol=1e-4)


@spmd.on_mesh()
def later(mesh: Any, how: str) -> None:
    """Check ranks that first run the same units and then different units, so that no rank waits in a collective."""
    adapter, rank = get_adapter(), mesh.get_local_rank(0)
    trained = Trained(mesh, lambda: build(mesh), lambda root: shard(root, mesh), (FEATURES,), 0.01)
    root: Any = trained.sharded
    for module in (root, trained.single):
        module.order[0] = [0, 1, 2, 3]
    for step in range(2):
        trained.step(step)
    root.order[0] = [min(2 + rank, 3)] if how == "different" else [3]
    x = adapter.tensor(np.ones((2, FEATURES), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        if how == "no answer":
            patch.setattr(mesh.platform, "exchange_texts", lambda ranks, place, text: {mesh.get_rank(): text})
        if how == "no exchange":
            patch.setattr(mesh.platform, "exchange_texts", lambda ranks, place, text: None)
            adapter.call(root, x)
        elif mesh.size() > 1:
            usual = "'expert1'"  # the first one was gathered ahead
            other = f"'expert{3 - (rank > 0)}'" if how == "different" else f"probably the gather of {usual}"
            with pytest.raises(RankMismatchError) as error:
                adapter.call(root, x)
            for text in (f"'expert{root.order[0][0]}'", other, "apply fully_shard to the module around the choice"):
                assert text in str(error.value)


@spmd.on_mesh()
def gone(mesh: Any) -> None:
    """Check a model that some ranks deleted after a forward without communication.

    Then a unit of another model is gathered by hand.
    """
    adapter = get_adapter()
    x = adapter.tensor(np.ones((2, FEATURES), np.float32))
    root = shard(build(mesh), mesh)
    root.order[0] = []
    adapter.call(root, x)
    kept = [root] if mesh.get_local_rank(0) else []
    del root
    gc.collect()
    unit = fully_shard(adapter.load(adapter.linear_module(FEATURES, 3), np.random.default_rng(5)), mesh=mesh)
    wanted = adapter.load(adapter.linear_module(FEATURES, 3), np.random.default_rng(5))
    unit.unshard()
    np.testing.assert_allclose(adapter.numpy(adapter.call(unit, x)), adapter.numpy(adapter.call(wanted, x)), rtol=1e-4)
    assert len(kept) == (mesh.get_local_rank(0) > 0)


@spmd.on_mesh()
def some_of_a_unit(mesh: Any) -> None:
    """Check that each rank may run a different layer of a unit.

    One layer has another dtype and thus a separate buffer. Another layer is frozen.
    """
    adapter, size, rank = get_adapter(), mesh.size(), mesh.get_local_rank(0)
    xs = np.random.default_rng(3).standard_normal((size, 2, FEATURES)).astype(np.float32)

    def built(order: list[int]) -> Any:
        root = adapter.load(build(mesh), np.random.default_rng(5))
        adapter.load(root.expert1, np.random.default_rng(6), np.float64)
        for name in ("expert2.weight", "expert2.bias"):
            adapter.freeze(root, name)

        def forward(self: Any, x: Any) -> Any:
            for i in self.order[0]:
                layer = getattr(self, f"expert{i}")
                x = mesh.platform.to_dtype(x, layer.weight.dtype)
                x = x + layer(x)
            return x, x * 2.0, len(self.order[0])

        mesh.platform.replace_forward(root, lambda _: forward)
        root.order[0] = order
        return root

    def grads_of(root: Any, x: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
        def loss(x: Any) -> Any:
            y, z, _ = adapter.call(root, x)
            return adapter.weighted_sum(y * z, adapter.tensor(np.ones(y.shape, np.float32))), y

        y, _, grads = adapter.model_value_and_grads(root, loss, x)
        return adapter.numpy(y), grads

    for orders in ([[0], [1], [2]], [[2], [0, 1], [1]], [[2, 1], [2], [0]], [[1], [2], [2]]):
        results = [grads_of(built(order), x) for order, x in zip(orders, xs, strict=False)]
        y, got = grads_of(fully_shard(built(orders[rank]), mesh=mesh), xs[rank])
        np.testing.assert_allclose(y, results[rank][0], rtol=1e-4)
        for name, g in got.items():
            each = [adapter.numpy(grads[name]) for _, grads in results if grads.get(name) is not None]
            if each or g is not None:
                assert isinstance(g, DTensor), (orders, name)
                whole = adapter.numpy(g)
                np.testing.assert_allclose(whole, sum(each) / size, rtol=1e-4, atol=1e-5, err_msg=name)


@on_ranks(2, 3)
def test_ranks_that_run_some_of_a_unit(pool: Any, world_size: int) -> None:
    pool.run(world_size, some_of_a_unit)


@on_ranks(2, 3)
def test_models_that_some_ranks_let_go(pool: Any, world_size: int) -> None:
    pool.run(world_size, gone)


@on_ranks(1, 2, 3)
def test_ranks_that_change_together(pool: Any, world_size: int) -> None:
    pool.run(world_size, together, list(range(20 if everything() else 2)))


@on_ranks(2, 3, 4)
def test_ranks_that_run_different_units(pool: Any, world_size: int) -> None:
    pool.run(world_size, by_choice, list(range(60 if everything() else 6)))


@on_ranks(2, 3, gate=(2,))
def test_ranks_that_leave_what_they_ran(pool: Any, world_size: int) -> None:
    for how in ("different", "no answer", "no exchange"):
        pool.run(world_size, later, how)
