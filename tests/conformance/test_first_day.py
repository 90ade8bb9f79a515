"""The test that CONTRIBUTING.md shows: one operation on shards, and the collectives that it takes."""

from __future__ import annotations

from typing import Any

from hyper_parallel import CommDebugMode, Shard, distribute_tensor
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.spmd import on_mesh


@on_mesh()
def sum_of_rows(mesh: Any) -> tuple[float, int]:
    x = distribute_tensor(get_adapter().tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), mesh, [Shard(0)])
    with CommDebugMode() as comm:
        y = x.sum().full_tensor()
    return float(y), comm.get_total_counts()


def test_sum_of_rows(pool: Any) -> None:
    assert pool.run(2, sum_of_rows) == [(21.0, 1), (21.0, 1)]
