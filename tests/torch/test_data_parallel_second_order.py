"""Gradients of gradients through `fully_shard` and `replicate`: those of inputs are right, as a gradient penalty has
them; those of parameters are refused on all ranks."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    RowwiseParallel,
    Shard,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device


class Model(nn.Module):
    """A model of two units, one of which is called twice, and its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return self.head(x)


def penalty(model: Any, x: Any, squared: bool) -> Any:
    """The gradient penalty of WGAN-GP, with the loss itself."""
    x = x.clone().requires_grad_()
    y = model(x)
    loss = (y.square() if squared else y).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def shard(model: Any, mesh: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replica(model: Any, mesh: Any) -> Any:
    return replicate(model, mesh)


@on_mesh(2, 2, names=("dp", "tp"))
def second_order(mesh: Any) -> None:
    rank = mesh["dp"].get_local_rank()
    plan = {"layers.*.0": ColwiseParallel(), "layers.*.2": RowwiseParallel()}
    torch.manual_seed(0)
    single = Model().to(device(), torch.float64)
    parts = [torch.randn(3, 4, dtype=torch.float64).to(device()) for _ in range(2)]
    for apply in (shard, replica):
        for tensor_parallel in (False, True):
            for frozen in (False, True):
                one, model = copy.deepcopy(single), copy.deepcopy(single)
                for m in (one, model):
                    m.layers[0][0].requires_grad_(not frozen)
                    m.layers[1].requires_grad_(not frozen)
                if tensor_parallel:
                    parallelize_module(model, mesh["tp"], plan)
                apply(model, mesh["dp"])
                for squared in (False, True):
                    (sum(penalty(one, x, squared) for x in parts) / 2).backward()
                    penalty(model, parts[rank], squared).backward()
                    for (name, p), q in zip(one.named_parameters(), model.parameters(), strict=True):
                        assert (p.grad is None) is (q.grad is None), name
                        if p.grad is not None:
                            close(q.grad, p.grad, f"{name}, {apply.__name__}, {tensor_parallel}, {frozen}", 1e-9)
                loss = model(parts[rank]).square().sum()
                wanted = [p for p in model.parameters() if p.requires_grad]
                with pytest.raises(RuntimeError, match="create_graph, compute gradients with respect to inputs alone"):
                    torch.autograd.grad(loss, wanted, create_graph=True)


@on_mesh(2, names=("dp",))
def of_one_batch(mesh: Any) -> None:
    torch.manual_seed(0)
    single = Model().to(device(), torch.float64)
    batch = torch.randn(5, 4, dtype=torch.float64).to(device())
    penalty(single, batch, True).backward()
    rank = mesh.get_local_rank()
    for apply in (shard, replica):
        model = apply(copy.deepcopy(single), mesh)
        model.zero_grad()
        part = DTensor.from_local(batch.tensor_split([3])[rank], mesh, [Shard(0)])
        penalty(model, part, True).backward()
        for (name, p), q in zip(single.named_parameters(), model.parameters(), strict=True):
            close(q.grad, p.grad, f"{name}, {apply.__name__}", 1e-9)


@on_mesh(2, names=("dp",))
def kept_graphs(mesh: Any) -> None:
    """WGAN-GP: the loss with the penalty lives while the other network trains."""
    torch.manual_seed(0)
    single = nn.ModuleList([Model(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), Model())]).to(device(), torch.float64)
    sharded = copy.deepcopy(single)
    for module in (sharded[1][2].layers[0], sharded[1][2].layers[1], sharded[1][2], sharded[1], *sharded[0].layers):
        fully_shard(module, mesh=mesh)
    fully_shard(sharded[0], mesh=mesh)
    x = torch.randn(3, 4, dtype=torch.float64).to(device())
    kept = []
    for _ in range(3):
        for networks in (single, sharded):
            generator, critic = networks
            optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in networks]
            loss = penalty(critic, generator(x).detach(), True)
            loss.backward()
            optimizers[1].step()
            kept.append(loss)
            networks.zero_grad()
            critic(generator(x)).sum().backward()
            optimizers[0].step()
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        close(q.grad, p.grad, name, 1e-9)
        close(q, p, name, 1e-9)


@on_mesh(2, names=("dp",))
def around_results(mesh: Any) -> None:
    """Backwards of recorded gradients that reach a unit neither at its results nor at its parameters."""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 1))
    single = single.to(device(), torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64).to(device())
    for frozen in (False, True):
        for first in (0, 1):  # the unit begins at the input of the model, or behind a trained layer
            one, model = copy.deepcopy(single), copy.deepcopy(single)
            for m in (one, model):
                m[1].requires_grad_(not frozen)
                m[3].requires_grad_(not frozen)
            for module in (*model[first:4], model):
                if any(True for _ in module.parameters()):
                    fully_shard(module, mesh=mesh)
            for wanted in (0, 4, "input"):
                found = []
                for m in (one, model):
                    leaf = x.clone().requires_grad_()
                    (gradient,) = torch.autograd.grad(m(leaf).sum(), leaf, create_graph=True)
                    squares = gradient.square().sum()
                    if wanted == "input":
                        found.append(torch.autograd.grad(squares, leaf)[0])
                        continue
                    m.zero_grad()
                    squares.backward(inputs=[m[wanted].weight])
                    found.append(m[wanted].weight.grad)
                close(found[1], found[0], f"{frozen}, {first}, {wanted}", 1e-9)


@on_mesh(2, names=("dp",))
def kept_on_one_rank(mesh: Any) -> None:
    """One rank keeps the graph of a penalty: later backwards of other losses gather as on the other rank."""
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(device(), torch.float64)
    x = torch.randn(3, 4, dtype=torch.float64).to(device())
    for frozen in (False, True):
        one, model = (copy.deepcopy(single).requires_grad_(not frozen) for _ in range(2))
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        leaf = x.clone().requires_grad_()
        found = [penalty(m, leaf, False) for m in (one, model)]
        for loss in tuple(found):
            leaf.grad = None
            loss.backward(retain_graph=True)
            found.append(leaf.grad)
        close(found[3], found[2], f"frozen={frozen}", 1e-9)
        kept = found[1] if mesh.get_local_rank() == 0 else None
        del found, loss
        gc.collect()
        counts = []
        for other in (copy.deepcopy(single), fully_shard(copy.deepcopy(single), mesh=mesh)):
            with CommDebugMode() as comm:
                other(x).sum().backward()
            counts.append(comm.get_comm_counts())
        assert counts == [{}, {"all_gather": 1, "reduce_scatter": 1}], (frozen, counts)
        assert kept is None or mesh.get_local_rank() == 0
        for expected in ({}, {"all_gather": 2}) if frozen else ({"all_gather": 2, "reduce_scatter": 1},):
            with CommDebugMode() as comm:
                model(leaf).sum().backward()
            assert comm.get_comm_counts() == expected, (frozen, comm.get_comm_counts())
            model.reshard()  # a frozen unit stays unsharded until then


JOBS = (second_order, of_one_batch, kept_graphs, around_results, kept_on_one_rank)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_second_order(pool: Any, job: Any) -> None:
    pool.run(4 if job is second_order else 2, job)
