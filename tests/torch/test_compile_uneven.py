"""Plain shards of unequal sizes in compiled code: refused on all ranks, as in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    NoParallel,
    PrepareModuleInput,
    RankMismatchError,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel.program.uneven_shards import HANDED_OUT
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.compiled import fresh
from tests.torch.support import close, device, randn


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.layer, x * 2, use_reentrant=False)


class Outer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x * 2 if x.is_floating_point() else x)


PARTS = Shard(1)
WHOLE = Replicate()


@on_mesh()
def refused(mesh: Any) -> None:
    rank = mesh.get_local_rank()
    x, ids = randn(2, 2 + rank, 6), torch.ones(2, 2 + rank, dtype=torch.long, device=device())
    into = PrepareModuleInput(input_layouts=PARTS, desired_input_layouts=WHOLE)
    cases: list[tuple[nn.Module, Any, Any]] = [
        (Outer(nn.Linear(6, 6)), {"layer": ColwiseParallel(input_layouts=PARTS)}, x),
        (Checkpointed(nn.Linear(6, 6)), {"layer": ColwiseParallel(input_layouts=PARTS)}, x),
        (Outer(nn.Embedding(6, 6)), {"layer": RowwiseParallel(input_layouts=PARTS)}, ids),
        (Outer(nn.LayerNorm(6)), {"layer": SequenceParallel()}, x),
        (Outer(nn.LayerNorm(6)), {"layer": NoParallel(input_layout=PARTS)}, x),
        (Outer(nn.Sequential(nn.Linear(6, 6))), {"layer": into, "layer.0": ColwiseParallel()}, x),
    ]
    for i, (module, plan, given) in enumerate(cases):
        if i % 2 and not everything():
            continue
        fresh(mesh)
        model: Any = parallelize_module(module.to(device()), mesh, plan)
        call: Any = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=bool(i % 2))
        with pytest.raises(
            RankMismatchError, match=r"the shape of .*input.* of 'layer'\. .*is plain and assumed to be"
        ):
            call(given)
        call(given[:, :2])  # of equal size


@on_mesh()
def handed_out(mesh: Any) -> None:
    """Once a layer gives plain uneven shards, sizes are compared in every call: outside of compiled code."""
    fresh(mesh)
    HANDED_OUT.clear()
    plan = {"0": RowwiseParallel(input_layouts=WHOLE, output_layouts=PARTS), "1": ColwiseParallel(input_layouts=PARTS)}
    model = parallelize_module(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device()), mesh, plan)
    last: Any = torch.compile(model[1], backend="aot_eager", fullgraph=True)
    even = randn(2, 2, 6)
    wanted = last(even)
    try:
        with pytest.raises(RankMismatchError, match=r"the shape of the input of Linear '1'"):
            model(randn(2, 5, 6))
        with pytest.raises(Exception, match="cannot trace with these inputs"):
            last(even)  # the graph from before is not used
        fresh()
        with pytest.warns(UserWarning, match="'1' runs outside of compiled code, .* plain shards of unequal sizes"):
            close(torch.compile(model[1], backend="aot_eager")(even), wanted)
        with pytest.raises(RankMismatchError, match=r"the shape of the input of Linear '1'"):
            torch.compile(model, backend="aot_eager")(randn(2, 5, 6))
    finally:
        fresh(mesh)


def test_unequal_plain_shards(pool: Any) -> None:
    pool.run(2, refused)


def test_after_uneven_shards_were_handed_out(pool: Any) -> None:
    pool.run(2, handed_out)
