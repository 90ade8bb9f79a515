"""Helpers for jobs: functions that the test pool runs on every rank.

    @on_mesh()
    def scaled_sum(mesh, factor):
        ...

    def test_scaled_sum(pool):
        assert pool.run(2, scaled_sum, 3) == [6, 6]

The job and the test may be in one file. `on_mesh` makes the mesh on all ranks of the pool, because all ranks must take
part in creating a process group. It calls the function only on the ranks in the mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

#: This process's rank in the pool, and the number of ranks in the current job; set by the worker.
rank = 0
world_size = 1


def device_mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """Return a mesh over the first ranks of the pool, or None on a rank outside it. Call it on all ranks of the pool.

    Args:
        shape: shape of the mesh; no sizes mean one dimension over all ranks of the job.
        names: names of its dimensions.
    """
    shape = shape or (world_size,)
    if math.prod(shape) > world_size:
        raise ValueError(f"a mesh of shape {shape} needs {math.prod(shape)} ranks, the job was given {world_size}")
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

    ranks = np.arange(math.prod(shape)).reshape(shape)
    mesh = DeviceMesh(None, ranks, mesh_dim_names=names)  # interned: a repeated call creates no further process groups
    return mesh if rank < ranks.size else None


def on_mesh(*shape: int, names: tuple[str, ...] | None = None) -> Callable[[Callable], Callable]:
    """Decorate a job: it gets a mesh as its first argument. Ranks outside the mesh return None.

    Args:
        shape: see `device_mesh`.
        names: see `device_mesh`.
    """

    def decorate(job: Callable) -> Callable:
        @functools.wraps(job)
        def run(*args: Any) -> Any:
            mesh = device_mesh(*shape, names=names)
            return None if mesh is None else job(mesh, *args)

        return run

    return decorate
