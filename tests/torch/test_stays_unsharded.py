"""Unsharded parameters that stay for a while under `fully_shard`: inference first, and other memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel import fully_shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import on_ranks


class Replacing(nn.Module):
    """A linear layer with a running mean, whose memory each forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(6, 6), nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.linear(x) * (1 + self.mean)).square()
        self.mean.data = (0.5 * self.mean + 1.0).detach()
        return y


def both(make: Callable[[], nn.Module], mesh: Any) -> tuple[Any, Any]:
    """Return a module, and a copy of it under `fully_shard`."""
    torch.manual_seed(0)
    module = make().double()
    return module, fully_shard(copy.deepcopy(module), mesh=mesh)


def check_step(single: Any, sharded: Any, what: str) -> None:
    """Check the outputs of a forward, the gradients of a backward, and the parameters."""
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)
    found = []
    for m in (single, sharded):
        m.zero_grad()
        y = m(x)
        y.sum().backward()
        found.append(y)
    assert torch.allclose(found[0], found[1], rtol=1e-9), what
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        assert torch.allclose(q.full_tensor(), p, rtol=1e-9), (what, name)
        if p.grad is not None:
            assert torch.allclose(q.grad.full_tensor(), p.grad, rtol=1e-9), (what, name)


@spmd.on_mesh()
def stays(mesh: Any) -> None:
    single, sharded = both(Replacing, mesh)
    sharded.set_reshard_after_backward(False)
    for step in range(4):
        check_step(single, sharded, f"other memory, not resharded, step {step}")
    single, sharded = both(Replacing, mesh)
    for step in range(4):
        sharded.unshard()
        check_step(single, sharded, f"other memory after unshard, step {step}")
    single, sharded = both(lambda: nn.Linear(6, 6), mesh)
    with torch.inference_mode():
        sharded.unshard()
        sharded(torch.ones(2, 6, dtype=torch.float64))
    for step in range(2):
        check_step(single, sharded, f"unshard in inference, step {step}")
        with torch.inference_mode():
            sharded(torch.ones(2, 6, dtype=torch.float64))


@on_ranks(1, 2, 4)
def test_parameters_that_stay_unsharded(pool: Any, world_size: int) -> None:
    pool.run(world_size, stays)
