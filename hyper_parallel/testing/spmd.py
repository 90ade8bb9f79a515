"""Helpers for jobs: functions that the test pool runs on every rank.

    @on_mesh()
    def scaled_sum(mesh, factor):
        ...

    def test_scaled_sum(pool):
        assert pool.run(2, scaled_sum, 3) == [6, 6]

The job and the test may stand in one file. `on_mesh` makes the mesh on all ranks of the pool, as making a process group
demands, and calls the function on the ranks in the mesh only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

#: This process's rank in the pool, and how many ranks take part in the current job; set by the worker.
rank = 0
world_size = 1


def device_mesh(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    """Mesh over the first ranks of the pool, or None on a rank outside it. To be called on all ranks of the pool.

    Args:
        shape: of the mesh; none means one dimension over all ranks that take part.
        names: of its dimensions.
    """
    shape = shape or (world_size,)
    if math.prod(shape) > world_size:
        raise ValueError(f"a mesh of shape {shape} needs {math.prod(shape)} ranks, the job was given {world_size}")
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

    ranks = np.arange(math.prod(shape)).reshape(shape)
    mesh = DeviceMesh(None, ranks, mesh_dim_names=names)  # interned: asking again makes no further process groups
    return mesh if rank < ranks.size else None


def on_mesh(*shape: int, names: tuple[str, ...] | None = None) -> Callable[[Callable], Callable]:
    """Decorator: give a job a mesh as its first argument, and let ranks outside it return None.

    Args:
        shape: as for `device_mesh`.
        names: as for `device_mesh`.
    """

    def decorate(job: Callable) -> Callable:
        @functools.wraps(job)
        def run(*args: Any) -> Any:
            mesh = device_mesh(*shape, names=names)
            return None if mesh is None else job(mesh, *args)

        return run

    return decorate
