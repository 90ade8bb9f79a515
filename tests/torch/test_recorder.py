"""Records of collectives where torch computes a forward again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import ColwiseParallel, CommDebugMode, RowwiseParallel, Shard, fully_shard, parallelize_module
from hyper_parallel.debug import ProfilerRanges
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


@on_mesh(names=("tp",))
def names_in_graph_and_profile(mesh: Any) -> tuple[set[str], set[str]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "1": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh, plan)
    x = randn(2, 3, 4).requires_grad_()
    y: Any = model(x)
    nodes, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            left += [following for following, _ in node.next_functions]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, ProfilerRanges(model):
        model(x).sum().backward()
    return {node.name() for node in nodes}, {event.key for event in profile.key_averages()}


@on_mesh(names=("dp",))
def names_of_units(mesh: Any) -> set[str]:
    y: Any = fully_shard(nn.Linear(4, 4), mesh=mesh)(randn(2, 4))
    return {y.grad_fn.name()}


def test_nodes_and_ranges_say_which_collective_of_which_module(pool: Any) -> None:
    for nodes, ranges in pool.run(2, names_in_graph_and_profile):
        # Nodes are of a kind of collective on a mesh dimension; the module is in the ranges.
        assert {"AllGather_tpBackward", "ReduceScatter_tpBackward"} <= nodes
        assert not {name for name in nodes if name.startswith(("Step", "Pair"))}
        assert {
            *("Sequential", "0", "1", "AllGather_tpBackward", "ReduceScatter_tpBackward"),
            *("all_gather over tp, 0, forward", "reduce_scatter over tp, 1, forward"),
            *("all_gather over tp, 1, backward", "reduce_scatter over tp, 0, backward"),
        } <= ranges
    assert pool.run(2, names_of_units) == [{"DataParallelOutputBackward"}] * 2
