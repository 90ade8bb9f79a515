"""CommDebugMode as programs for torch use it: torch's operations as keys, collectives of their own, torch's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functions
import torch.utils.checkpoint
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import device
from tests.torch.test_against_torch import meshes, mlp_plan

funcol, c10d = torch.ops.c10d_functional, torch.ops.c10d


@on_mesh()
def counted(mesh: Any) -> None:
    x = DTensor.from_local(torch.ones(2, 2, device=device()), mesh, [Partial()])
    with CommDebugMode() as comm:
        x.redistribute(placements=[Replicate()])
        x.redistribute(placements=[Shard(0)]).full_tensor()
    counts = comm.get_comm_counts()
    assert counts[funcol.all_reduce] == counts["all_reduce"] == 1
    assert counts[torch.ops._c10d_functional.all_reduce] == counts[c10d.allreduce_] == 1
    assert counts[funcol.reduce_scatter_tensor] == counts[funcol.all_gather_into_tensor] == 1
    assert counts[c10d.scatter_] == counts[torch.ops.aten.add] == 0 and funcol.broadcast not in counts
    assert comm.get_total_counts() == 3

    plain, group = torch.ones(4, device=device()), mesh.get_group()
    with CommDebugMode() as comm:
        dist.all_reduce(plain, group=group)
        dist.all_gather([torch.empty_like(plain) for _ in range(mesh.size())], plain, group=group)
        functions.wait_tensor(functions.all_gather_tensor(plain, 0, group))
        dist.broadcast(plain, 0, group=group)
        x.redistribute(placements=[Replicate()])  # not twice
    assert comm.get_comm_counts() == {"all_reduce": 2, "all_gather": 2, "broadcast": 1}
    assert [event.bytes for event in comm.events] == [16] * 5
    assert [event.mesh for event in comm.events] == [None] * 4 + [mesh]


def test_counted(pool: Any) -> None:
    pool.run(2, counted)


def as_torch_names() -> None:
    """Modules have the same names, and the same collectives in forward."""
    seen, both = [], meshes(2)
    if not both:
        return
    for (lib, mesh), mode in zip(both, (TorchCommDebugMode, CommDebugMode), strict=True):
        torch.manual_seed(0)
        model = nn.Sequential()
        for name, layer in (("up", nn.Linear(4, 8)), ("down", nn.Linear(8, 4))):
            model.add_module(name, layer.to(device()))
        lib.parallelize_module(model, mesh, mlp_plan(lib))
        with mode() as comm:
            model(torch.ones(2, 4, device=device(), requires_grad=True)).sum().backward()
        placements = {name: [p.is_shard() and p.dim for p in found] for name, found in comm.get_sharding_info().items()}
        forward = {
            name: {str(op).rpartition(".")[2]: n for op, n in counts["forward"].items()}
            for name, counts in comm.comm_module_counts.items()
        }
        seen.append((set(comm.get_parameter_info()), placements, {name: c for name, c in forward.items() if c}))
    assert seen[0] == seen[1], seen


def test_as_torch_names(pool: Any) -> None:
    pool.run(2, as_torch_names)


@on_mesh()
def unchanged(mesh: Any) -> None:
    """Watching changes no gradient, and recomputed modules count where they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to(device())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    gradients = []
    for watched in (False, True):
        model.zero_grad()
        x = torch.arange(8.0, device=device()).reshape(2, 4).requires_grad_()
        comm = CommDebugMode()
        if watched:
            with comm, torch.utils.checkpoint.set_checkpoint_early_stop(False):
                y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
                y.sum().backward()
        else:
            model(x).sum().backward()
        gradients.append([x.grad, *(p.grad.full_tensor() for p in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
    assert comm.comm_module_counts["Sequential"]["backward"] == {"all_reduce": 2}
    assert comm.comm_module_counts["Sequential.1"]["backward"] == {"all_reduce": 1}


def test_unchanged(pool: Any) -> None:
    pool.run(2, unchanged)
