"""Placements of torch's own DTensors in place of this library's: taken everywhere, equal both ways, kept nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    ModuleStyle,
    PackedShard,
    ParameterParallel,
    Partial,
    PrepareModuleInput,
    Replicate,
    Shard,
    StridedShard,
    distribute_parameter,
    distribute_tensor,
    fully_shard,
    parallelize_module,
    zeros,
)
from hyper_parallel.core import caches
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn

PAIRS = [
    (Shard(0), theirs.Shard(0)),
    (Shard(-1), theirs.Shard(-1)),
    (Replicate(), theirs.Replicate()),
    (Partial(), theirs.Partial()),
    (Partial("avg"), theirs.Partial("avg")),
    (StridedShard(0, 2), _StridedShard(0, split_factor=2)),
]


def test_equal_in_both_directions() -> None:
    for i, (ours, _) in enumerate(PAIRS):
        for j, (_, other) in enumerate(PAIRS):
            assert (ours == other) is (i == j) and (ours != other) is (i != j)
            if not isinstance(other, _StridedShard):  # which compares itself with its own kind alone
                assert (other == ours) is (i == j) and (other != ours) is (i != j)
    assert (Shard(0), Replicate()) == (theirs.Shard(0), theirs.Replicate())
    assert PackedShard(0, 2) != theirs.Shard(0) and Partial() != theirs.Partial("band")
    assert Replicate() != 0 and Shard(0) != type("Shard", (), {"dim": 0})()
    assert Partial() != _MaskPartial(offset_shape=torch.Size([2]), offset_dim=0)


def test_constants_are_torchs() -> None:
    assert Partial.ALL_REDUCE_OPS == theirs.Partial.ALL_REDUCE_OPS
    assert Partial.LINEAR_REDUCE_OPS == theirs.Partial.LINEAR_REDUCE_OPS


@pytest.mark.parametrize("size", [0, 1, 5, 8, 9])
def test_sizes_and_offsets(size: int) -> None:
    for ranks in (1, 2, 3, 4):
        for rank in range(ranks):
            expected = theirs.Shard.local_shard_size_and_offset(size, ranks, rank)
            assert Shard.local_shard_size_and_offset(size, ranks, rank) == expected


class _ByRows(ModuleStyle):
    placements = {"weight": theirs.Shard(0)}  # noqa: RUF012
    output_layouts = (theirs.Shard(-1),)  # type: ignore[assignment]


@on_mesh()
def at_every_entry(mesh: Any) -> None:
    whole = randn(5, 3)
    x = distribute_tensor(whole, mesh, [theirs.Shard(0)])
    assert x.placements == (Shard(0),) and type(x.placements[0]) is Shard
    for placements in ([theirs.Shard(1)], (theirs.Replicate(),), [theirs.Shard(-1)]):
        for _ in range(2):
            y = x.redistribute(placements=placements)
            assert type(y.placements[0]) in (Shard, Replicate)
            close(y.full_tensor(), whole)
    gradients = []
    for lib in (theirs, hyper_parallel, theirs):
        local = torch.ones(2, 3, device=device(), requires_grad=True)
        z = DTensor.from_local(local, mesh, [lib.Replicate()], grad_placements=[lib.Partial()])
        (z.to_local(grad_placements=[lib.Partial()]) * (mesh.get_local_rank() + 1)).sum().backward()
        gradients.append(local.grad)
    close(gradients[0], gradients[1])
    close(gradients[2], gradients[1])
    assert zeros(4, 2, device_mesh=mesh, placements=[theirs.Shard(1)]).placements == (Shard(1),)
    linear = nn.Linear(3, 4, device=device())
    distribute_parameter(linear, "weight", mesh, [theirs.Shard(0)])
    assert linear.weight.placements[0] is Shard(0)
    assert ParameterParallel({"weight": theirs.Shard(0)}).placements["weight"] is Shard(0)
    style = PrepareModuleInput(input_kwarg_layouts={"x": theirs.Shard(0)}, desired_input_kwarg_layouts={"x": Shard(0)})
    assert style.input_kwarg_layouts["x"] is Shard(0)

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3)).to(device())
    expected = model(whole)
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=theirs.Replicate()), "1": _ByRows()})
    assert model[1].weight.placements[0] is Shard(0)
    parts = expected.tensor_split([-(-3 // mesh.size())], -1) if mesh.size() == 2 else (expected,)
    close(model(whole), parts[mesh.get_local_rank()])
    unit = nn.Linear(4, 4).to(device())
    fully_shard(unit, mesh=mesh, shard_placement_fn=lambda p: theirs.Shard(0))
    assert unit.weight.placements[0] is Shard(0)
    assert not any(_holds_theirs(key) for _, cache in caches._NAMED for key in list(cache))


def _holds_theirs(key: Any) -> bool:
    if isinstance(key, tuple):
        return any(map(_holds_theirs, key))
    return isinstance(key, theirs.Placement)


@on_ranks(1, 2)
def test_taken_at_every_entry(pool: Any, world_size: int) -> None:
    pool.run(world_size, at_every_entry)
