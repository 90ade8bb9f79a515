"""Dropout inside of modules of a plan that get this rank's part of a distributed batch, and checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import NoParallel, Shard, distribute_tensor, fully_shard, parallelize_module
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import device

FEATURES = 5


class Dropping(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(FEATURES, FEATURES), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "kernel":
            return F.rrelu(self.linear(x), training=True)
        if self.how == "checkpointed inside":
            return checkpoint(lambda x: F.dropout(self.linear(x), 0.5), x, use_reentrant=False)
        return F.dropout(self.linear(x), 0.5)


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.dropping, self.how = Dropping(how), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "checkpointed":
            return checkpoint(self.dropping, x, use_reentrant=False)
        return self.dropping(x)


def near(mesh: Any, how: str, distributed: bool) -> list[bool]:
    """Return for each parameter whether its gradient is that of the single model."""
    with device():
        return near_on_device(mesh, how, distributed)


def near_on_device(mesh: Any, how: str, distributed: bool) -> list[bool]:
    torch.manual_seed(3)
    single, model = Model(how), Model(how)
    model.load_state_dict(single.state_dict())
    parallelize_module(model, mesh["tp"], {"dropping": NoParallel()})
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(3, 4, FEATURES)
    torch.manual_seed(4)
    single(x).square().sum().backward()
    torch.manual_seed(4)
    model(distribute_tensor(x, mesh["dp"], [Shard(0)]) if distributed else x).square().sum().backward()
    pairs = zip(model.parameters(), single.parameters(), strict=True)
    return [torch.allclose(p.grad.full_tensor(), wanted.grad, atol=1e-5) for p, wanted in pairs]


@on_mesh(2, 2, names=("dp", "tp"))
def gradients(mesh: Any, how: str) -> list[bool]:
    return near(mesh, how, distributed=True)


def test_the_module_is_computed_again(pool: Any) -> None:
    for how in ("plain", "checkpointed"):
        assert pool.run(4, gradients, how) == [[True, True]] * 4


@on_mesh(2, 2, names=("dp", "tp"))
def refused(mesh: Any, how: str) -> str:
    with pytest.raises(ValueError) as caught:
        near(mesh, how, distributed=True)
    return str(caught.value)


def test_a_part_of_the_module_is_computed_again(pool: Any) -> None:
    """Recomputing a part of the module would drop other elements than forward: its samples are no longer known."""
    for error in pool.run(4, refused, "checkpointed inside"):
        assert error.startswith("dropout of a shard of a batch is recomputed in backward"), error


@on_mesh(2, 2, names=("dp", "tp"))
def plain_afterwards(mesh: Any) -> list[bool]:
    with pytest.raises(ValueError):
        near(mesh, "checkpointed inside", distributed=True)
    return near(mesh, "checkpointed inside", distributed=False)


def test_a_plain_batch_afterwards(pool: Any) -> None:
    assert pool.run(4, plain_afterwards) == [[True, True]] * 4


def test_a_kernel_that_draws(pool: Any) -> None:
    for error in pool.run(4, refused, "kernel"):
        assert "a part of the samples, which draws inside its kernel" in error, error
