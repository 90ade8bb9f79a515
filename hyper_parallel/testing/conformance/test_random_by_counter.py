"""Counter-based random numbers: each rank draws only its shard, for any placements and number of ranks."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import CommDebugMode, DTensor, PackedShard, Partial, Replicate, Shard, manual_seed, strict
from hyper_parallel.checkpoint import RandomState
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.rules import counter as requests
from hyper_parallel.core.rules import random
from hyper_parallel.platform.contract import counter
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, local_parts, same
from hyper_parallel.testing.extent import in_gate, on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
SHAPES = [(12, 6), (5, 6), (1, 6)]


def seed(value: int, mesh: Any) -> None:
    manual_seed(value, mesh, parallel_rng="counter")


def job(*shape: int, names: tuple[str, ...] | None = None) -> Callable[[Callable], Callable]:
    """Run a function on a mesh, as `spmd.on_mesh` does, and switch drawing by counter off afterwards."""

    def decorate(run: Callable) -> Callable:
        @functools.wraps(run)
        def clean(mesh: Any, *args: Any) -> Any:
            manual_seed(0, mesh)  # whatever ran before, these ranks draw the same numbers
            try:
                return run(mesh, *args)
            finally:
                manual_seed(0, mesh)

        return spmd.on_mesh(*shape, names=names)(clean)

    return decorate


def drawn_in_numpy(platform: Any, kind: str, shape: tuple[int, ...], draws: int) -> list[np.ndarray]:
    """Return the next full tensors of float32, computed by NumPy from keys of the default generator."""
    found = []
    for _ in range(draws):
        key = np.frombuffer(platform.bytes_of(platform.counter_key()), np.float32)
        ranges = [((0, n),) for n in shape]
        found.append(counter.numbers(kind, counter.words_of(key), shape, ranges, "float32"))
    return found


def run_draws(mesh_shape: tuple[int, ...]) -> None:
    """Check that factories, `rand_like` and dropout equal NumPy's results for the same keys, for every placement."""
    job(*mesh_shape)(draw_all)()


def draw_all(mesh: Any) -> None:
    for shape in SHAPES:
        check_factories(mesh, shape)
        check_dropout(mesh, shape)


def check_factories(mesh: Any, shape: tuple[int, ...]) -> None:
    adapter, platform = get_adapter(), mesh.platform
    wanted = {}
    for name, kind in (("rand", "uniform"), ("randn", "normal")):
        platform.manual_seed(5)
        wanted[name] = drawn_in_numpy(platform, kind, shape, 2)
        assert np.abs(wanted[name][0] - wanted[name][1]).max() > 0.01
    packed = (PackedShard(1, (4, 2)),) if mesh.ndim == 1 else ()
    sharded = hyper_parallel.zeros(shape, device_mesh=mesh, placements=[S0] * mesh.ndim)
    likes = mesh.size() > 1 and runs_on_shards(adapter.rand_like, sharded)
    for placements in [*itertools.product((R, S0, S1), repeat=mesh.ndim), *([packed] if packed else [])]:
        options = {"device_mesh": mesh, "placements": placements}
        for name, numbers in wanted.items():
            seed(5, mesh)
            drawn = [getattr(hyper_parallel, name)(shape, **options) for _ in range(2)]
            for got, whole in zip(drawn, numbers, strict=True):
                same(adapter.numpy(got), whole, f"{name} of {placements}, {shape}", 1e-5)
        if likes:
            seed(5, mesh)
            same(adapter.numpy(adapter.rand_like(drawn[0])), wanted["rand"][0], f"rand_like of {placements}", 0.0)


def runs_on_shards(function: Any, x: Any) -> bool:
    """Return whether a function has a sharding rule. Functions without one are drawn on gathered operands."""
    try:
        with strict():
            function(x)
    except ValueError:
        return False
    return True


def check_dropout(mesh: Any, shape: tuple[int, ...]) -> None:
    """Check two dropout layers: values, gradients, and communication, which sends only keys."""
    adapter, whole, weights = get_adapter(), floats(*shape) + 3, floats(*shape)
    mesh.platform.manual_seed(11)
    first, second = drawn_in_numpy(mesh.platform, "uniform", shape, 2)
    noise = (first >= 0.5) / 0.5 * 2.0 * (second >= 0.25) / 0.75
    for placements in itertools.product((R, S0, S1, P), repeat=mesh.ndim):
        layout = get_layout(mesh, placements, shape)

        def sharded(x: Any, placements: Any = placements) -> Any:
            x = DTensor.from_local(x, mesh, placements, shape=shape)
            seed(11, mesh)
            y = adapter.dropout(adapter.dropout(x, 0.5) * 2.0, 0.25)
            assert y.placements == placements
            given = DTensor.from_local(adapter.tensor(weights), mesh)
            return adapter.weighted_sum(y, given).full_tensor(), y

        mine = local_parts(whole, layout, np.random.default_rng(1))
        with CommDebugMode() as comm:
            got, (grad,) = adapter.value_and_grads(sharded, [mine])
        same(adapter.numpy(got), whole * noise, f"dropout of {placements}, {shape}", 1e-4)
        same(grad, (weights * noise)[layout.cotangent.local_index()], f"gradient for {placements}", 1e-4)
        sent = [event.bytes for event in comm.events if event.kind == "broadcast"]
        assert sent == [16] * (2 * sum(n > 1 for n, p in zip(mesh.shape, placements, strict=True) if p in (R, P)))


@pytest.mark.parametrize("mesh", in_gate(MESHES, [(3,), (2, 2)]), ids=str)
def test_numbers_depend_on_no_layout(pool: Any, mesh: tuple[int, ...]) -> None:
    pool.run(int(np.prod(mesh)), run_draws, mesh)


@job()
def requested(mesh: Any) -> None:
    """Check that `manual_seed` switches counter-based drawing on and off."""
    adapter, options = get_adapter(), {"device_mesh": mesh, "placements": [S0]}

    def drawn(how: Callable[[int, Any], None]) -> np.ndarray:
        how(3, mesh)
        return adapter.numpy(hyper_parallel.rand(8, 2, **options))

    usual = drawn(manual_seed)
    assert not requests.draws_by_counter(mesh)
    by_counter = drawn(seed)
    assert requests.draws_by_counter(mesh) and requests.is_requested()
    assert np.abs(usual - by_counter).max() > 0.01
    same(drawn(seed), by_counter, "the same seed", 0.0)
    same(drawn(manual_seed), usual, "by default again", 0.0)
    with pytest.raises(ValueError, match="is 'single_device' or 'counter', got 'philox'"):
        manual_seed(3, mesh, parallel_rng="philox")
    dtypes = mesh.platform.dtypes
    platform = mesh.platform
    wanted = platform.to_dtype(platform.counter_key(), dtypes["float64"]).dtype  # a device may have no float64
    seed(3, mesh)
    double = hyper_parallel.rand(8, 2, dtype=dtypes["float64"], **options)
    assert double.dtype == wanted
    assert 0 <= adapter.numpy(double).min() < adapter.numpy(double).max() < 1
    with pytest.raises(TypeError, match="draws no numbers of"):
        hyper_parallel.rand(8, 2, dtype=dtypes["int64"], **options)


@job(2, 2, names=("dp", "tp"))
def requested_on_slices(mesh: Any) -> None:
    """Check that a request applies to the mesh and its slices, and that a request for a slice has priority."""
    dp, tp = mesh["dp"], mesh["tp"]

    def by_counter() -> list[bool]:
        return [requests.draws_by_counter(m) for m in (mesh, dp, tp)]

    seed(1, mesh)
    assert by_counter() == [True] * 3
    manual_seed(1 + dp.get_local_rank(), tp)
    assert by_counter() == [True, True, False]
    manual_seed(1, mesh)
    assert by_counter() == [False] * 3
    seed(1 + dp.get_local_rank(), tp)
    assert by_counter() == [False, False, True]
    x = hyper_parallel.rand(6, device_mesh=tp, placements=[S0]).full_tensor()
    seed(1, tp)
    y = hyper_parallel.rand(6, device_mesh=tp, placements=[R]).full_tensor()
    adapter = get_adapter()
    assert np.array_equal(adapter.numpy(x), adapter.numpy(y)) == (dp.get_local_rank() == 0)


@job()
def come_apart(mesh: Any) -> None:
    """Check a rank that draws one more number than the other ranks: replicated values remain equal on all ranks."""
    adapter, platform = get_adapter(), mesh.platform
    x = DTensor.from_local(adapter.tensor(floats(8, 6) + 3), mesh, [R])
    seed(3, mesh)
    adapter.dropout(x, 0.5)
    if platform.rank() == mesh.size() - 1:
        adapter.draw("rand", (3,))
    mine = adapter.numpy(adapter.dropout(x, 0.5).to_local())
    others = DTensor.from_local(adapter.tensor(mine), mesh, [S0]).full_tensor()
    same(adapter.numpy(others), np.concatenate([mine] * mesh.size()), "values of all ranks", 0.0)


@on_ranks(1, 2, 4)
def test_on_request(pool: Any, world_size: int) -> None:
    pool.run(world_size, requested)
    pool.run(world_size, come_apart)
    if world_size == 4:
        pool.run(world_size, requested_on_slices)


@job()
def saved(mesh: Any) -> tuple[dict[str, Any], np.ndarray]:
    """Check the saved generator state between two draws, and the numbers after loading it."""
    seed(9, mesh)
    options = {"device_mesh": mesh, "placements": [S0]}
    hyper_parallel.rand(5, 3, **options)
    state = RandomState().state_dict()
    return state, get_adapter().numpy(hyper_parallel.randn(5, 3, **options))


@job()
def resumed(mesh: Any, state: dict[str, Any], wanted: np.ndarray) -> None:
    seed(1, mesh)
    alike = set(random._SYNCHRONIZED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RandomState().load_state_of_ranks([state, state], mesh.get_rank(), mesh.size())
    assert set(random._SYNCHRONIZED) == alike  # ranks outside of these, on larger meshes, would not know of it
    got = hyper_parallel.randn(5, 3, device_mesh=mesh, placements=[Shard(1)])
    same(get_adapter().numpy(got), wanted, "after resuming", 1e-6)
    manual_seed(1, mesh)
    if not requests.is_requested():
        with pytest.warns(UserWarning, match="saved with parallel_rng='counter'"):
            RandomState().load_state_dict(state)


def on_which_nothing_is_drawn() -> None:
    spmd.device_mesh(4, names=("never_drawn",))  # the first random operation on it would give all ranks one state


def test_resume_with_other_ranks(pool: Any) -> None:
    pool.run(4, on_which_nothing_is_drawn)
    state, wanted = pool.run(2, saved)[0]
    for world_size in (2, 3):
        pool.run(world_size, resumed, state, wanted)


@job()
def distribution(mesh: Any) -> None:
    """Check mean, variance and frequency of bits, and that neighbouring numbers and successive draws are
    uncorrelated."""
    adapter, n = get_adapter(), 1 << 18
    seed(1, mesh)
    options = {"device_mesh": mesh, "placements": [S0]}
    drawn = [adapter.numpy(hyper_parallel.rand(n, **options)).astype(np.float64) for _ in range(2)]
    bound = 5 / np.sqrt(n)  # five standard deviations
    for x in drawn:
        assert 0 <= x.min() < x.max() < 1
        assert abs(x.mean() - 0.5) < bound / np.sqrt(12) and abs(x.var() - 1 / 12) < bound / np.sqrt(180)
        for bit in range(1, 17):
            assert abs(((x * 2.0**bit) % 2 >= 1).mean() - 0.5) < bound / 2, bit
        for lag in (1, 2, 1 << 9):
            assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < bound, lag
        counts = np.histogram(x, 64, (0, 1))[0]
        assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * np.sqrt(126)  # chi-squared of 63 degrees
    assert abs(np.corrcoef(*drawn)[0, 1]) < bound
    z = adapter.numpy(hyper_parallel.randn(n, **options)).astype(np.float64)
    assert abs(z.mean()) < bound and abs(z.var() - 1) < bound * np.sqrt(2) and abs((z**3).mean()) < bound * np.sqrt(15)
    assert abs((z**4).mean() - 3) < bound * np.sqrt(96)


def test_statistics(pool: Any) -> None:
    pool.run(2, distribution)
