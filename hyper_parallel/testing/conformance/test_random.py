"""Random numbers: a sharded tensor gets the numbers that a single device draws for it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard, distribute_tensor, manual_seed
from hyper_parallel.core.communication.collectives import all_gather_object
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.rules import random
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, local_parts, same
from hyper_parallel.testing.extent import in_gate, on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


def run_dropout(mesh_shape: tuple[int, ...], rows: int) -> None:
    """Check two dropout layers in sequence, for every placement."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter, whole, weights = get_adapter(), floats(rows, 6) + 3, floats(rows, 6)

    def twice(x: Any) -> Any:
        return adapter.dropout(adapter.dropout(x, 0.5) * 2.0, 0.25)

    def reference(x: Any) -> Any:
        adapter.seed(11)
        y = twice(x)
        return adapter.weighted_sum(y, adapter.tensor(weights)), y

    wanted, (wanted_grad,) = adapter.value_and_grads(reference, [whole])
    kept = np.count_nonzero(adapter.numpy(wanted))
    assert 0 < kept < whole.size
    for placements in itertools.product((R, S0, S1, P), repeat=len(mesh_shape)):
        layout = get_layout(mesh, placements, whole.shape)

        def sharded(x: Any, placements: Any = placements) -> Any:
            x = DTensor.from_local(x, mesh, placements, shape=whole.shape)
            manual_seed(11, mesh)
            y = twice(x)
            assert y.placements == placements
            given = DTensor.from_local(adapter.tensor(weights), mesh)
            return adapter.weighted_sum(y, given).full_tensor(), y

        mine = local_parts(whole, layout, np.random.default_rng(1))
        with CommDebugMode() as comm:
            got, (grad,) = adapter.value_and_grads(sharded, [mine])
        same(adapter.numpy(got), adapter.numpy(wanted), f"dropout of {placements}", 1e-4)
        same(grad, wanted_grad[layout.cotangent.local_index()], f"gradient for {placements}")
        loss_only = sum(mesh.shape[d] > 1 for d, p in enumerate(placements) if p is not R)
        held_alike = sum(mesh.shape[d] > 1 for d, p in enumerate(placements) if p in (R, P))
        broadcasts = 2 * held_alike
        counts = comm.get_comm_counts()
        assert counts.get("broadcast", 0) == broadcasts, placements
        assert comm.get_total_counts() == loss_only + broadcasts, placements


@pytest.mark.parametrize("rows", in_gate([12, 5], [5]))
@pytest.mark.parametrize("mesh", in_gate(MESHES, [(3,), (2, 2)]), ids=str)
def test_dropout(pool: Any, mesh: tuple[int, ...], rows: int) -> None:
    pool.run(int(np.prod(mesh)), run_dropout, mesh, rows)


def run_factories(mesh_shape: tuple[int, ...], rows: int) -> None:
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter, shape = get_adapter(), (rows, 6)
    for placements in itertools.product((R, S0, S1), repeat=len(mesh_shape)):
        options = {"device_mesh": mesh, "placements": placements}
        for name in ("rand", "randn"):
            adapter.seed(5)
            wanted = [adapter.numpy(adapter.draw(name, shape)) for _ in range(2)]
            assert np.abs(wanted[0] - wanted[1]).max() > 0.01
            manual_seed(5, mesh)
            draw = getattr(hyper_parallel, name)
            with CommDebugMode() as comm:
                drawn = [draw(*shape, **options), draw(shape, **options)]
            alike = sum(mesh.shape[d] > 1 for d, p in enumerate(placements) if p is R)
            assert comm.get_comm_counts() == ({"broadcast": 2 * alike} if alike else {})
            for got, numbers in zip(drawn, wanted, strict=True):
                assert got.placements == placements
                same(adapter.numpy(got), numbers, f"{name} of {placements}", 0.0)
        layout = get_layout(mesh, placements, shape)
        for made, numbers in [
            (hyper_parallel.zeros(*shape, **options), np.zeros(shape)),
            (hyper_parallel.ones(shape, **options), np.ones(shape)),
            (hyper_parallel.full(shape, 2.5, **options), np.full(shape, 2.5)),
            (hyper_parallel.empty(*shape, **options), None),
        ]:
            assert (tuple(made.shape), made.placements) == (shape, placements)
            assert tuple(made.to_local().shape) == tuple(layout.local_shape)
            if numbers is not None:
                same(adapter.numpy(made), numbers, f"factory on {placements}", 0.0)
        if all(p is not S1 for p in placements):
            numbers = hyper_parallel.linspace(0.5, 2, rows, **options)
            same(adapter.numpy(numbers), np.linspace(0.5, 2, rows), "linspace", 1e-6)
            assert tuple(numbers.to_local().shape) == tuple(get_layout(mesh, placements, (rows,)).local_shape)
            powers = hyper_parallel.logspace(-1, 1, rows, base=3.0, **options)
            same(adapter.numpy(powers), np.logspace(-1, 1, rows, base=3.0), "logspace", 1e-5)
        device = mesh.device_type
        given = hyper_parallel.zeros(shape, layout=mesh.platform.dense_layout, device=device, **options)
        assert given.placements == placements
        assert tuple(hyper_parallel.zeros(0, 6, **options).full_tensor().shape) == (0, 6)
    with mesh:
        whole = hyper_parallel.ones(3)
    assert whole.device_mesh is mesh
    assert whole.placements == (R,) * mesh.ndim
    with pytest.raises(ValueError, match="rand makes sharded or replicated tensors"):
        hyper_parallel.rand(2, 2, device_mesh=mesh, placements=[P] * mesh.ndim)
    with pytest.raises(ValueError, match="zeros makes strided tensors"):
        hyper_parallel.zeros(2, 2, device_mesh=mesh, layout="sparse")
    with pytest.raises(ValueError, match=r"ones: a tensor on .* got device='xpu:1'"):
        hyper_parallel.ones(2, 2, device_mesh=mesh, device="xpu:1")
    with pytest.raises(ValueError, match="zeros: sizes must not be negative"):
        hyper_parallel.zeros(-1, device_mesh=mesh)
    with pytest.raises(ValueError, match="out of range: a tensor of shape"):
        hyper_parallel.ones(2, device_mesh=mesh, placements=[S1] * mesh.ndim)


@pytest.mark.parametrize("rows", in_gate([12, 5], [5]))
@pytest.mark.parametrize("mesh", in_gate(MESHES, [(3,), (2, 2)]), ids=str)
def test_factories(pool: Any, mesh: tuple[int, ...], rows: int) -> None:
    pool.run(int(np.prod(mesh)), run_factories, mesh, rows)


def agree(mesh_shape: tuple[int, ...], first: str) -> None:
    """Check that ranks with different generators draw as the first rank, from the first random operation on the
    mesh."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter, whole = get_adapter(), floats(5, 6) + 3

    def draw(x: Any, options: dict[str, Any]) -> Any:
        if first == "dropout":
            return adapter.dropout(x, 0.5)
        return getattr(hyper_parallel, first)(5, 6, **options) if options else adapter.draw(first, (5, 6))

    adapter.seed(100)
    plain = adapter.tensor(whole)
    wanted = [adapter.numpy(draw(plain, {})) for _ in range(2)]
    placements = (S0,) * mesh.ndim
    x = distribute_tensor(adapter.tensor(whole), mesh, placements, src_data_rank=None)
    random._SYNCHRONIZED.discard(mesh)  # an earlier test may have drawn on this mesh
    adapter.seed(100 + mesh.platform.rank())
    for number in range(2):
        got = draw(x, {"device_mesh": mesh, "placements": placements})
        same(adapter.numpy(got), wanted[number], f"{first} number {number}", 1e-6)


@pytest.mark.parametrize("first", ["dropout", "rand", "randn"])
@pytest.mark.parametrize("mesh", in_gate([(2,), (3,), (2, 2)], [(2, 2)]), ids=str)
def test_ranks_that_are_seeded_differently_agree(pool: Any, mesh: tuple[int, ...], first: str) -> None:
    pool.run(int(np.prod(mesh)), agree, mesh, first)


@spmd.on_mesh()
def seeding(mesh: Any) -> None:
    adapter = get_adapter()
    with pytest.raises(TypeError, match="takes an int"):
        manual_seed("1", mesh)
    drawn = []
    for seed in (1, 1, 2):
        with mesh:
            manual_seed(seed)
        drawn.append(adapter.numpy(hyper_parallel.rand(7, device_mesh=mesh, placements=[S0])))
    same(drawn[0], drawn[1], "the same seed", 0.0)
    assert np.abs(drawn[0] - drawn[2]).max() > 0.01


@on_ranks(1, 2, 4)
def test_manual_seed(pool: Any, world_size: int) -> None:
    pool.run(world_size, seeding)


def apart(mesh_shape: tuple[int, ...]) -> None:
    """Check a rank that draws one more number than the other ranks: replicated values remain equal on all ranks."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter, last = get_adapter(), mesh.size() - 1
    whole = floats(8, 6) + 3
    for placements in itertools.product((R, S0, P), repeat=mesh.ndim):
        layout = get_layout(mesh, placements, whole.shape)
        mine = local_parts(whole, layout, np.random.default_rng(1))
        manual_seed(3, mesh)
        adapter.dropout(DTensor.from_local(adapter.tensor(mine), mesh, placements, shape=whole.shape), 0.5)
        for extra in (last, 0):
            if mesh.platform.rank() == extra:
                adapter.draw("rand", (3,))
                adapter.dropout(adapter.tensor(np.ones(5, np.float32)), 0.5)

            def weighted(x: Any, placements: Any = placements) -> Any:
                y = adapter.dropout(DTensor.from_local(x, mesh, placements, shape=whole.shape), 0.5)
                return adapter.sum(y * y).full_tensor(), y

            y, (grad,) = adapter.value_and_grads(weighted, [mine])
            value = adapter.numpy(y)  # gathered: rank by rank, where it is sharded
            kept = np.isclose(value, whole * 2, rtol=1e-4, atol=1e-4)
            assert np.all(kept | (np.abs(value) < 1e-4)), placements  # each element is kept on all ranks, or on none
            assert 0.15 < kept.mean() < 0.85
            index = layout.local_index()
            same(grad, (np.where(kept, 8 * whole, 0))[index], f"gradient for {placements}", 1e-4)
            drawn = hyper_parallel.rand(8, 6, device_mesh=mesh, placements=layout.cotangent.placements)
            like = adapter.rand_like(DTensor.from_local(adapter.tensor(mine), mesh, placements, shape=whole.shape))
            for x, what in ((y, "dropout"), (drawn, "rand"), (like, "rand_like")):
                assert spmd_equal(mesh, x), f"{what} of {placements} differs between ranks"


def spmd_equal(mesh: Any, x: Any) -> bool:
    """Return whether ranks that hold the same shard of ``x`` hold the same numbers."""
    adapter, layout = get_adapter(), x.redistribute(placements=x._layout.cotangent.placements)._layout
    local = adapter.numpy(x.redistribute(placements=layout.placements).to_local())
    for mesh_dim, placement in enumerate(layout.placements):
        if placement is R:
            everyone = all_gather_object(local, mesh, mesh_dim)
            if any(not np.array_equal(everyone[0], other) for other in everyone):
                return False
    return True


@pytest.mark.parametrize("mesh", in_gate([(2,), (3,), (2, 2)], [(3,), (2, 2)]), ids=str)
def test_ranks_that_come_apart_agree(pool: Any, mesh: tuple[int, ...]) -> None:
    pool.run(int(np.prod(mesh)), apart, mesh)


def transposed(mesh_shape: tuple[int, ...]) -> None:
    """Check that numbers are assigned to elements in memory order, as on a single device."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter, whole = get_adapter(), floats(8, 4, 12) + 3
    for a, b in ((0, 1), (1, 2), (0, 2)):
        for placements in itertools.product((R, S0, Shard(2)), repeat=mesh.ndim):
            layout = get_layout(mesh, placements, whole.shape)
            mine = np.ascontiguousarray(whole[layout.local_index()])
            for name, draw in {"dropout": lambda x: adapter.dropout(x, 0.5), "rand_like": adapter.rand_like}.items():
                adapter.seed(7)
                wanted = adapter.numpy(draw(adapter.transpose(adapter.tensor(whole), a, b)))
                manual_seed(7, mesh)
                x = adapter.transpose(
                    DTensor.from_local(adapter.tensor(mine), mesh, placements, shape=whole.shape), a, b
                )
                same(adapter.numpy(draw(x)), wanted, f"{name} of {placements} transposed {a}, {b}", 1e-6)


@pytest.mark.parametrize("mesh", in_gate([(1,), (2,), (4,), (2, 2)], [(4,), (2, 2)]), ids=str)
def test_transposed(pool: Any, mesh: tuple[int, ...]) -> None:
    pool.run(int(np.prod(mesh)), transposed, mesh)
