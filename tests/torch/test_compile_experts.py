"""torch.compile of blocks with experts: compiled around these, with the gradients of eager mode."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import ExpertParallel, parallelize_module
from hyper_parallel.testing.adapters import torch_adapter
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.compiled import Graphs, fresh
from tests.torch.support import close

FEATURES, EXPERTS = 4, 3


class Block(nn.Module):
    """A layer, experts that a router chooses, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.router = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.experts = torch_adapter.RoutedExperts(EXPERTS, FEATURES, 6)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.up(x))
        weights, indices = self.router(x).softmax(-1).topk(2)
        return self.down(torch.tanh(x + self.experts(x, indices, weights)))


@on_mesh()
def compiled_around(mesh: Any) -> None:
    torch.manual_seed(0)
    eager = Block().to(mesh.device_type, torch.float64)
    for p in eager.experts.parameters():
        nn.init.normal_(p)
    parallelize_module(eager, mesh, {"experts": ExpertParallel()})
    compiled, graphs = copy.deepcopy(eager), Graphs()
    fresh()
    call = torch.compile(compiled, backend=graphs.backend)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for tokens in (5 + mesh.get_local_rank(), 3, 5 + mesh.get_local_rank()):
            x = torch.randn(tokens, FEATURES, dtype=torch.float64).to(mesh.device_type)
            found = []
            for one in (eager, compiled):
                one.zero_grad()
                y = call(x) if one is compiled else eager(x)
                y.square().sum().backward()
                found.append([y, *(p.grad for p in one.parameters())])
            for got, wanted in zip(*found, strict=True):
                close(got, wanted, "compiled", 1e-12)
    # One graph in front of the experts and one behind them, forward and backward; again with a size that is dynamic.
    assert graphs.graphs in (4, 8), graphs.graphs
    said = [str(w.message) for w in told if "runs outside of compiled code" in str(w.message)]
    assert len(said) == 1 and said[0].startswith("'experts'"), said
    fresh()
    with pytest.raises(Exception, match=r"HyperParallel: a module whose style torch.compile cannot"):
        torch.compile(copy.deepcopy(eager), backend=graphs.backend, fullgraph=True)(x)


@pytest.mark.skipif(os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="double precision")
def test_a_block_is_compiled_around_its_experts(pool: Any) -> None:
    pool.run(2, compiled_around)
