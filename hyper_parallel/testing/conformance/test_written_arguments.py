"""Operations that run on gathered operands and write to them: the writes are copied to the shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import DTensor, Partial, Replicate, Shard
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.extent import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@spmd.on_mesh()
def running_statistics(mesh: Any, channels: int) -> None:
    adapter = get_adapter()
    x = floats(6, channels) + 2
    plain = [adapter.tensor(a) for a in (np.zeros(channels, np.float32), np.ones(channels, np.float32))]
    statistics = {}
    for placement in (R, S0):
        layout = get_layout(mesh, (placement,), (channels,))
        parts = [adapter.tensor(adapter.numpy(a)[layout.local_index()]) for a in plain]
        statistics[placement] = [DTensor.from_local(a, mesh, [placement], shape=(channels,)) for a in parts]
    for number, of_x in enumerate((R, S0, S1)):  # each begins with the values that the one before wrote
        wanted = adapter.numpy(adapter.batch_norm(adapter.tensor(x), *plain))
        layout = get_layout(mesh, (of_x,), x.shape)
        for placement, mine in statistics.items():
            given = DTensor.from_local(adapter.tensor(x[layout.local_index()]), mesh, [of_x], shape=x.shape)
            same(adapter.numpy(adapter.batch_norm(given, *mine)), wanted, f"call {number}, x placed {of_x}", 1e-4)
            for a, b, begin in zip(mine, plain, (0, 1), strict=True):
                assert a.placements == (placement,)
                assert np.abs(adapter.numpy(b) - begin).max() > 0.01
                same(adapter.numpy(a), adapter.numpy(b), f"statistics placed {placement} after call {number}, {of_x}")


@pytest.mark.parametrize("channels", [4, 5, 2])
@on_ranks(1, 2, 3)
def test_running_statistics(pool: Any, world_size: int, channels: int) -> None:
    pool.run(world_size, running_statistics, channels)


@spmd.on_mesh()
def partial_statistics(mesh: Any) -> None:
    """Check that a write to a partial sum is refused on all ranks, and changes nothing."""
    adapter = get_adapter()
    x = DTensor.from_local(adapter.tensor(floats(6, 4)), mesh)
    values = np.ones(4, np.float32)
    mean, variance = (DTensor.from_local(adapter.tensor(values), mesh, [Partial()]) for _ in range(2))
    with pytest.raises(ValueError, match=r"writes in place into running_mean, .*Partial\(sum\)"):
        adapter.batch_norm(x, mean, variance)
    for statistic in (mean, variance):
        np.testing.assert_array_equal(adapter.numpy(statistic.to_local()), values)


@on_ranks(1, 2)
def test_partial_statistics_are_refused(pool: Any, world_size: int) -> None:
    pool.run(world_size, partial_statistics)
