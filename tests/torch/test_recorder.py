"""What the recorder says of collectives where torch computes a forward again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import ColwiseParallel, CommDebugMode, RowwiseParallel, parallelize_module
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import randn


@on_mesh()
def checkpointed(mesh: Any) -> list[tuple[str, str, str]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Tanh())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = randn(2, 4).requires_grad_()
    with CommDebugMode() as comm:
        y: Any = checkpoint(model, x, use_reentrant=False)
        torch.sum(y).backward()
    return [(event.module, event.direction, event.kind) for event in comm.events]


def test_a_forward_that_is_computed_again(pool: Any) -> None:
    passes = [("1", "forward"), ("1", "backward"), ("", "backward")]  # the last is the gradient of the input
    assert pool.run(2, checkpointed) == [[(*where, "all_reduce") for where in passes]] * 2
