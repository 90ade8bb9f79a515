"""Sizes that a program reads of parts, and the gradients of a sample's tensors in `check_plan`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import ColwiseParallel, DTensor, RowwiseParallel, Shard, check_plain_code, get_platform
from hyper_parallel.core.plain_code.sizes import PartSize
from hyper_parallel.testing.plan_check import compare_on_ranks, verdict_of
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import device


@on_mesh(names=("tp",))
def ways_to_read(mesh: Any) -> None:
    with check_plain_code(nn.Module()) as checked:
        x = DTensor.from_local(torch.ones(3, 4, device=device()), mesh, [Shard(1)]).to_local()
        sizes = [x.shape[1], x.size(1), x.size(dim=-1), x.size()[1], x.shape[-1:][0], x.numel(), torch.numel(x)]
        assert all(type(n) is PartSize for n in sizes) and type(x.shape) is torch.Size
        assert [n.whole for n in sizes] == [8] * 5 + [24] * 2
        assert type(x.size(0)) is int and x.shape == (3, 4) and len(x) == 3
        assert x.reshape(x.numel()).shape == (12,) and torch.zeros(x.shape[1]).shape == (4,)
        assert not checked.findings
        y = x / x.shape[1]
    assert [f.kind for f in checked.findings] == ["size"] and y[0, 0] == 0.25 and type(x.shape[1]) is int


@pytest.mark.nightly
def test_ways_to_read_a_size(pool: Any) -> None:
    pool.run(2, ways_to_read)


class Gated(nn.Module):
    """An MLP whose input multiplies a part: only the gradient of the input is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x) * x.sum(-1, keepdim=True))


@on_mesh(names=("tp",))  # which all ranks of the pool make: `compare_on_ranks` finds it again
def compared(mesh: Any, trains: bool, prove: bool) -> Any:
    x = torch.arange(12.0).reshape(3, 4).requires_grad_(trains)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return compare_on_ranks((mesh.size(),), ("tp",), pickle.dumps((Gated, plan, (x,), {}, None, prove)))


def test_the_gradient_of_a_sample(pool: Any) -> None:
    if get_platform().device_type != "cpu":
        pytest.skip("check_plan computes on the CPU")
    assert verdict_of(pool.run(2, compared, False, True), 1e-4)
    checked = verdict_of(pool.run(2, compared, True, False), 1e-4)
    assert list(checked.wrong) == ["gradient of input 0"] and not checked.plain_code
    assert "partial_features=" in str(verdict_of(pool.run(2, compared, True, True), 1e-4))
