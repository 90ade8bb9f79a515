"""Checkpoints of features that only torch has: schedulers, loaders, wrappers and optimizers; lost ranks; failures
outside of saving."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hyper_parallel import DTensor, NoParallel, PackedShard, Shard, distribute_tensor, fully_shard, parallelize_module
from hyper_parallel.checkpoint import (
    StatefulDistributedSampler,
    latest,
    load,
    save,
)
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh
from tests.support.programs import run_ranks


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> list[float]:
    losses = []
    for i in range(steps):
        loss = model(torch.full((3, 4), 0.5 + i)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss))
    return losses


SCHEDULERS: dict[str, Any] = {
    "steps": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(
        o, 0.2, total_steps=20, cycle_momentum="momentum" in o.defaults
    ),
    "two": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "tensor rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.1), foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "groups": lambda p: torch.optim.RMSprop([{"params": [q], "lr": 0.01 * (i + 1)} for i, q in enumerate(p)]),
}


@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_schedulers_and_optimizers(tmp_path: Path, name: str, scheduler: str) -> None:
    def job() -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, SCHEDULERS[scheduler](optimizer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        first = job()
        stepped(first[0], first[1], 2, first[2])
        path = save(list(first), tmp_path / "job")
        wanted = stepped(first[0], first[1], 4, first[2])
        for before in (0, 1):
            other = job()
            stepped(other[0], other[1], before, other[2])
            assert load(list(other), path) == list(other)
            assert stepped(other[0], other[1], 4, other[2]) == wanted


@on_mesh()
def own_shapes(mesh: Any, directory: str) -> None:
    """An optimizer whose state does not have the shape of its parameter."""
    x = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    p = nn.Parameter(x)
    optimizer = torch.optim.AdamW([p], 0.1)
    optimizer.state[p] = {"step": torch.tensor(1.0), "factor": torch.ones(5), "one": torch.ones(()), "exp_avg": x * 2}
    path = save({"optimizer": optimizer}, f"{directory}/own", mesh=mesh)
    with pytest.raises(
        ValueError, match=r"optimizer\.0\.factor has shape \(5,\), and its parameter has shape \(4, 3\).*take one step"
    ):
        load({"optimizer": torch.optim.AdamW([p], 0.1)}, path, mesh=mesh)
    other = torch.optim.AdamW([p], 0.1)
    other.state[p] = {"step": torch.tensor(0.0), "factor": torch.zeros(5), "one": torch.zeros(()), "exp_avg": x * 0}
    load({"optimizer": other}, path, mesh=mesh)
    assert (other.state[p]["factor"] == 1).all() and float(other.state[p]["step"]) == 1
    assert other.state[p]["exp_avg"].full_tensor().equal(torch.arange(12.0).reshape(4, 3) * 2)


@on_mesh()
def memory_orders(mesh: Any, directory: str) -> None:
    """Parameters that lie in memory in another order, and parts of packed shards."""
    whole = torch.arange(24.0).reshape(4, 6)
    x = DTensor.from_local(distribute_tensor(whole, mesh, [Shard(1)]).to_local().t().contiguous().t(), mesh, [Shard(1)])
    assert not x.to_local().is_contiguous() or x.to_local().shape[1] == 1
    path = save({"x": x}, f"{directory}/x", mesh=mesh)
    for placement in (Shard(0), PackedShard(1, (2, 4))):
        y = distribute_tensor(whole * 0, mesh, [placement])
        load({"x": y}, path, mesh=mesh)
        assert y.full_tensor().equal(whole)
    with torch.no_grad():
        x.zero_()
    stride = x.to_local().stride()
    load({"x": x}, path, mesh=mesh)
    assert x.full_tensor().equal(whole) and x.to_local().stride() == stride


class Scaled(nn.Module):
    """A parameter without dimensions."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))

    def forward(self, x: Any) -> Any:
        return x * self.scale


#: How a module with such a parameter is parallelised.
WAYS: dict[str, Any] = {
    "plain": lambda model, mesh: model,
    "tensor parallel": lambda model, mesh: parallelize_module(model, mesh, NoParallel()),
    "data parallel": lambda model, mesh: fully_shard(model, mesh=mesh),
}
#: Optimizers with moments, and with numbers that are none, of every parameter.
OF_NUMBERS: dict[str, Any] = {
    **{name: OPTIMIZERS[name] for name in ("adamw", "fused", "sgd")},
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "adamax": lambda p: torch.optim.Adamax(p, 0.1, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
}


def facts(state: dict[str, Any]) -> dict[str, Any]:
    """The properties of each entry of an optimizer's state, but for its value."""
    return {
        k: (type(x), getattr(x, "dtype", None), getattr(x, "placements", None), getattr(x, "device", None))
        for k, x in state.items()
    }


@on_mesh()
def moments_of_numbers(mesh: Any, directory: str) -> None:
    """Moments of a parameter without dimensions are loaded as they were: of its dtype, distributed in the same way, on
    its device. The next steps are those of the job that saved."""
    for name, make in OF_NUMBERS.items() if everything() else [*OF_NUMBERS.items()][::3]:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for way, other in zip(WAYS, [*WAYS][1:] + [*WAYS][:1], strict=True):

                def job(how: str, dtype: Any = dtype, make: Any = make) -> tuple[nn.Module, torch.optim.Optimizer]:
                    model = WAYS[how](Scaled(dtype), mesh)
                    return model, make(model.parameters())

                model, optimizer = job(way)
                stepped(model, optimizer, 2)
                before = facts(optimizer.state[next(model.parameters())])
                path = save({"model": model, "optimizer": optimizer}, f"{directory}/{name}", mesh=mesh, overwrite=True)
                wanted = stepped(model, optimizer, 3)
                for how in (way, other):
                    model, optimizer = job(how)
                    load({"model": model, "optimizer": optimizer}, path, mesh=mesh)
                    if how == way:
                        after = facts(optimizer.state[next(model.parameters())])
                        assert after == before, (name, dtype, way, after, before)
                    assert stepped(model, optimizer, 3) == wanted, (name, dtype, way, how)


@pytest.mark.parametrize("job", [own_shapes, memory_orders, moments_of_numbers], ids=lambda job: job.__name__)
def test_on_two_ranks(pool: Any, tmp_path: Path, job: Any) -> None:
    pool.run(2, job, str(tmp_path))


def test_autograd_knows_that_values_are_others(tmp_path: Path) -> None:
    """Autograd refuses a graph that was recorded before loading, as after any other write."""
    weight = nn.Parameter(torch.ones(3))
    path = save({"weight": weight}, tmp_path / "w")
    loss = (weight.exp() * weight).sum()
    load({"weight": weight}, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_wrappers_have_no_names(tmp_path: Path) -> None:
    """Wrappers of torch.compile and checkpoint_wrapper around a module; buffers that are not to be saved."""
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    plain.register_buffer("mask", torch.ones(2), persistent=False)
    path = save({"model": plain}, tmp_path / "plain")
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 3)), nn.BatchNorm1d(3))
    load({"model": torch.compile(wrapped)}, path)
    assert wrapped[0]._checkpoint_wrapped_module.weight.equal(plain[0].weight)
    names = {name for file in path.glob("*.safetensors") for name in load_file(file)}
    assert names == {f"model.{name}" for name in plain.state_dict()}


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    for state, kind, words in (
        ({"x": torch.ones(2, dtype=torch.complex128)}, TypeError, "complex128 cannot be saved"),
        ({"x": torch.ones(2, device="meta")}, ValueError, "'x' is on the meta device and has no values"),
        ({"x": torch.eye(2).to_sparse()}, TypeError, "x is "),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ValueError, "the same path 'a.b'"),
        ({"x": object()}, TypeError, "x is a object. A checkpoint takes"),
    ):
        with pytest.raises(kind, match=words):
            save(state, tmp_path / "x")
    assert [*tmp_path.iterdir()] == []
    path = save({"x": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(ValueError, match=r"x is on the meta device and has no memory.*to_empty\(\)"):
        load({"x": torch.ones(2, device="meta")}, path)


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> int:
        return i


def test_a_loader_with_workers(tmp_path: Path) -> None:
    """Two replicas use three batches; three replicas continue with the rest."""
    order = [*StatefulDistributedSampler(20, 1, 0)]
    for rank in range(2):
        sampler = StatefulDistributedSampler(Numbers(), 2, rank)
        loader = torch.utils.data.DataLoader(Numbers(), 2, sampler=sampler, num_workers=1)
        seen = []
        for i, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if i == 3:
                sampler.set_used(6)
                state = sampler.state_dict()
                break
        assert seen == order[rank:12:2]
    path = save({"sampler": sampler, "state": state}, tmp_path / "s")
    left = []
    for rank in range(3):
        sampler = StatefulDistributedSampler(Numbers(), 3, rank, seed=5)
        load({"sampler": sampler}, path)
        left.append([*sampler])
    assert [x for row in zip(*left, strict=True) for x in row] == [*order[12:], order[0]]


# ---------------------------------------------------------------------- a lost rank
PROGRAM = """
import os, signal, sys
import torch
import hyper_parallel as hp
from hyper_parallel.checkpoint import CheckpointError, disk, save

hp.get_platform().init_process_group()
rank, directory = hp.get_platform().rank(), sys.argv[1]
mesh = hp.init_device_mesh("cpu")
state = {"x": hp.distribute_tensor(torch.arange(8.0), mesh, [hp.Shard(0)])}
save(state, f"{directory}/step-1")

def die(kind, path):
    if rank == 1 and kind == "write":
        os.kill(os.getpid(), signal.SIGKILL)

disk.watcher = die
try:
    save(state, f"{directory}/step-2")
except hp.CollectiveError as error:
    print("lost|", error, flush=True)
os._exit(0)
"""


def test_a_rank_is_lost(tmp_path: Path) -> None:
    """The others wait for it less than the time-out of half an hour, and the earlier checkpoint is there."""
    first, second = run_ranks(["-c", PROGRAM, tmp_path / "run"], 2)
    assert second.status == -signal.SIGKILL and first.status == 0, (first, second)
    assert "lost|" in first.out
    assert latest(tmp_path / "run") == tmp_path / "run" / "step-1"
    assert load({"x": torch.zeros(8)}, tmp_path / "run" / "step-1")["x"].equal(torch.arange(8.0))
