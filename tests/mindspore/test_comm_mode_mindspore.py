"""CommDebugMode counts the collectives that a program of MindSpore itself issues."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor
from mindspore.mint import distributed as dist

from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate
from hyper_parallel.testing.spmd import on_mesh


@on_mesh()
def counted(mesh: Any) -> None:
    x = DTensor.from_local(Tensor(np.ones((2, 2), np.float32)), mesh, [Partial()])
    plain, group = Tensor(np.ones(4, np.float32)), mesh.get_group()
    with CommDebugMode() as comm:
        dist.all_reduce(plain, group=group)
        dist.all_gather([Tensor(np.ones(4, np.float32)) for _ in range(mesh.size())], plain, group=group)
        x.redistribute(placements=[Replicate()])  # not twice
    assert comm.get_comm_counts() == {"all_reduce": 2, "all_gather": 1}
    assert comm.get_comm_counts()[dist.all_reduce] == 2 and comm.get_comm_counts()[ms.mint.add] == 0
    assert [event.bytes for event in comm.events] == [16] * 3
    assert [event.mesh for event in comm.events] == [None, None, mesh]
    with CommDebugMode() as outer, CommDebugMode() as inner:
        dist.all_reduce(plain, group=group)
    assert outer.get_total_counts() == inner.get_total_counts() == 1
    dist.all_reduce(plain, group=group)
    assert outer.get_total_counts() == 1


def test_counted(pool: Any) -> None:
    pool.run(2, counted)
