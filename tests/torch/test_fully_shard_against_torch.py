"""Arguments and methods of `fully_shard` against those of torch: the same calls, the same gradients."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import hyper_parallel as hp
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, full

#: Before, torch had fewer names and keywords.
MADE_WITH = "2.15"

FEATURES = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh()) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, FEATURES)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + self.head(self.norm(layer(x)))
        return x


class Chain(Model):
    """Each module once."""

    def forward(self, x: Any) -> Any:
        return self.head(self.norm(self.layers[0](x)))


class Gather:
    """A gather as a user of torch writes it: one of torch's own, counted."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel()))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Gather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel()))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


def units(model: Any, shard: Callable[..., Any], mesh: Any, **options: Any) -> None:
    for layer in model.layers:
        shard(layer, mesh=mesh, **options)
    shard([model.norm, model.head], mesh=mesh, **options)
    shard(model, mesh=mesh, **options)


def collectives(model: Any, shard: Callable[..., Any], mesh: Any) -> Any:
    """Own collectives of the first layer, and a hook that doubles its gradients."""
    units(model, shard, mesh)
    gather, scatter = Gather(), Scatter()
    model.layers[0].set_custom_all_gather(gather)
    model.layers[0].set_custom_reduce_scatter(scatter)
    model.layers[0].set_all_reduce_hook(lambda row: row.mul_(2.0))
    return lambda: (len(gather.calls), [given for _, given in gather.calls], len(scatter.calls))


def of_number(number: int) -> Callable[..., Any]:
    return lambda model, shard, mesh: units(model, shard, mesh, reshard_after_forward=number)


#: name -> (class of the model, the calls on it).
USES: dict[str, tuple[type[nn.Module], Callable[..., Any]]] = {
    "modules that are one unit": (Chain, units),
    "one unit called often": (Model, units),
    "two ranks after forward": (Chain, of_number(2)),
    "one rank after forward": (Chain, of_number(1)),
    "own collectives": (Chain, collectives),
}


@on_mesh()
def alike(mesh: Any, use: str) -> None:
    cls, apply = USES[use]
    torch.manual_seed(3)
    single = cls().to(device())
    ours, theirs = copy.deepcopy(single), copy.deepcopy(single)
    counts = [apply(ours, hp.fully_shard, mesh), apply(theirs, fsdp.fully_shard, mesh.to_torch())]
    size, rank = mesh.size(), mesh.get_local_rank()
    for step in range(2):
        x = torch.randn(size, 2, FEATURES, generator=torch.Generator().manual_seed(step)).to(device())
        for model in (ours, theirs):
            for p in model.parameters():
                p.grad = None
            model(x[rank]).square().sum().backward()
        single.zero_grad()
        (single(x).square().sum() / size).backward()
        for (name, p), q, r in zip(ours.named_parameters(), theirs.parameters(), single.parameters(), strict=True):
            if r.grad is None:
                assert p.grad is None and q.grad is None, name
                continue
            doubled = 2.0 if use == "own collectives" and name.startswith("layers.0") else 1.0
            close(p.grad, r.grad * doubled, f"{name}, {use}")
            close(full(p.grad), q.grad.full_tensor(), f"{name}, {use}, against torch's")
    if counts[0] is not None:
        assert counts[0]() == counts[1]()


@pytest.mark.parametrize("use", list(USES))
def test_alike(pool: Any, use: str) -> None:
    pool.run(4, alike, use)


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each; policies compare by their text."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, str(p.default) if p.name.endswith("policy") else p.default) for p in found]


@pytest.mark.skipif(not torch.__version__.startswith(MADE_WITH), reason=f"the names are those of torch {MADE_WITH}")
def test_every_public_name() -> None:
    """Each public name of the module of ``fully_shard``, each method of its modules, with keywords and defaults."""
    # Torch's first kind of fully sharded data parallelism is in the same package.
    names = importlib.import_module("torch.distributed.fsdp._fully_shard").__all__
    assert {"fully_shard", "FSDPModule", "MixedPrecisionPolicy"} <= set(names), names
    for name in names:
        theirs, ours = getattr(fsdp, name), getattr(hp, name)
        if not inspect.isclass(theirs) or "Policy" in name or name == "DataParallelMeshDims":
            assert parameters_of(theirs) == parameters_of(ours), name
    methods = [name for name in vars(fsdp.FSDPModule) if not name.startswith("_")]
    assert len(methods) > 20
    for name in methods:
        theirs, ours = getattr(fsdp.FSDPModule, name), getattr(hp.FSDPModule, name)
        assert parameters_of(theirs) == parameters_of(ours), name
    for name in ("UnshardHandle", "GradientReductionHandle"):
        if hasattr(fsdp, name):
            assert callable(getattr(hp, name).wait)


def test_names_keywords_and_defaults() -> None:
    """The names are those of torch, as far as the installed one has them; policies compare by their values."""
    wanted, got = (inspect.signature(f).parameters for f in (fsdp.fully_shard, hp.fully_shard))
    newer = {"dp_mesh_dims"} - set(wanted)
    assert [(p.name, p.kind) for p in wanted.values()] == [
        (p.name, p.kind) for p in got.values() if p.name not in newer
    ]
    for name, p in wanted.items():
        if not name.endswith("policy"):
            assert got[name].default == p.default, name
    for name in ("DataParallelMeshDims", "CPUOffloadPolicy"):
        if hasattr(fsdp, name):
            fields = (set(inspect.signature(getattr(place, name)).parameters) for place in (fsdp, hp))
            assert len(set(map(frozenset, fields))) == 1, name
