"""Writes of a forward to parameters under `fully_shard` and `replicate` arrive: averages, running means, codebooks,
counters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    MixedPrecisionPolicy,
    RankMismatchError,
    Shard,
    check_ranks,
    distribute_tensor,
    fully_shard,
    replicate,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import everything, on_ranks


def replace_data(p: Tensor, value: Tensor) -> None:
    p.data = value.detach() * 1


#: How a program writes a value to a parameter.
WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda p, value: p.copy_(value),
    "mul_ and add_": lambda p, value: p.mul_(0).add_(value),
    "lerp_": lambda p, value: p.lerp_(value, 1.0) if p.is_floating_point() else p.add_(1),
    "data": lambda p, value: p.data.copy_(value),
    "other data": replace_data,
    "set_": lambda p, value: p.set_(value.detach() * 1),
    "items": lambda p, value: p.__setitem__(slice(None) if p.ndim else ..., value),
}


class Writing(nn.Module):
    """A layer with a teacher that follows it, a running mean, a counter, and a codebook that is trained too."""

    def __init__(self, way: str, late: bool) -> None:
        super().__init__()
        self.q = nn.Linear(5, 7)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.mean = nn.Parameter(torch.zeros(7), requires_grad=False)
        self.steps = nn.Parameter(torch.zeros((), dtype=torch.int64), requires_grad=False)
        self.total = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.codes = nn.Parameter(torch.linspace(0, 1, 21).view(3, 7))
        self.way, self.late = way, late

    def update(self) -> None:
        write = WAYS[self.way]
        with torch.no_grad():
            for p, q in zip(self.k.parameters(), self.q.parameters(), strict=True):
                write(p, 0.5 * p + 0.5 * q)
            write(self.mean, 0.9 * self.mean + self.q.weight.sum(1))
            write(self.steps, self.steps + 1)
            write(self.total, self.total + 0.5)
            if not self.late:
                write(self.codes, self.codes * 0.9)

    def forward(self, x: Tensor) -> Tensor:
        if not self.late:
            self.update()
        y = self.q(x)
        y = (y - self.k(x) + self.mean * self.total).square() + (y @ self.codes.T).sum(-1, keepdim=True)
        if self.late:
            self.update()
        return y / (1 + self.steps)


class Model(nn.Module):
    def __init__(self, way: str, late: bool) -> None:
        super().__init__()
        self.inner, self.outer = Writing(way, late), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


#: How a model is sharded.
UNITS: dict[str, Callable[[Model, Any], Any]] = {
    "one": lambda m, mesh: fully_shard(m, mesh=mesh),
    "two": lambda m, mesh: (fully_shard(m.inner, mesh=mesh), fully_shard(m, mesh=mesh)),
    "kept whole": lambda m, mesh: fully_shard(m, mesh=mesh, reshard_after_forward=False),
    "columns": lambda m, mesh: fully_shard(
        m, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim else None
    ),
    "replicas": replicate,
}


@spmd.on_mesh()
def follows(mesh: Any, cases: list[tuple[str, str, bool]]) -> None:
    for way, units, late in cases:
        torch.manual_seed(0)
        single = Model(way, late).double()
        model = copy.deepcopy(single)
        UNITS[units](model, mesh)
        taken = model.state_dict()
        steps = [torch.optim.SGD(m.parameters(), 0.05) for m in (single, model)]
        for step in range(5):
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            if step == 3:
                with torch.no_grad(), check_ranks(mesh):
                    assert torch.allclose(model(x), single(x), rtol=1e-9), (way, units, late)
            losses = []
            for m, optimizer in zip((single, model), steps, strict=True):
                loss = m(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert abs(losses[0] - losses[1]) < 1e-9 * abs(losses[0]), (way, units, late, step, losses)
        for (name, p), q in zip(single.named_parameters(), model.parameters(), strict=True):
            for what, found in (("now", q), ("taken", taken[name])):
                error = (found.full_tensor() - p).abs().max() / p.abs().max()  # type: ignore[operator, union-attr]
                assert error.item() < 1e-9, (error, what, name, way, units, late)


@on_ranks(1, 2, 3)
def test_writes_arrive(pool: Any, world_size: int) -> None:
    cases = [(way, units, late) for way in WAYS for units in UNITS for late in (False, True)]
    in_gate = [*cases[::5], *((way, "replicas", way == "set_") for way in ("other data", "set_"))]
    pool.run(world_size, follows, cases if everything() else in_gate)


class Counting(nn.Module):
    """Adds to a parameter the number that it gets, from the first call on that brings one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 12).view(4, 3))
        self.held = nn.Parameter(torch.linspace(0, 1, 12).view(4, 3), requires_grad=False)
        self.more: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        if self.more is not None:
            self.more(self)
        return y


class Twice(nn.Module):
    """Calls a module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x)


@spmd.on_mesh()
def corners(mesh: Any) -> None:
    rank, x = mesh.get_local_rank(0), torch.ones(2, 3)
    # Later than the first forwards, and after another parameter of the unit was read: autograd counts them apart.
    m = fully_shard(Counting(), mesh=mesh)
    for _ in range(3):
        m(x).sum().backward()
    m.more = lambda self: self.held.add_(1.0)
    m(x).sum().backward()
    assert torch.equal(m.held.full_tensor(), Counting().held + 1)
    # A write to a tensor that autograd needs is torch's error, as on a single device.
    m.more = lambda self: torch.no_grad()(self.weight.add_)(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
        m(x.clone().requires_grad_()).sum().backward()
    # Gathered in another dtype: unwritten elements keep their precision.
    m = fully_shard(Counting(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    m.more = lambda self: self.held[1].fill_(3.0)
    m(x)
    wanted = Counting().held.detach().clone()
    wanted[1] = 3.0
    assert torch.equal(m.held.full_tensor(), wanted) and torch.equal(m.weight.full_tensor(), Counting().weight)
    # Each rank keeps its part of its own write; `check_ranks` reports that they differ.
    m = fully_shard(Counting(), mesh=mesh)
    m.more = lambda self: self.held.fill_(float(rank))
    m(x)
    part = m.held.to_local()
    assert part.numel() == 0 or (part == rank).all()
    if mesh.size() > 1:
        says = r"the values written to 'held'.*write the same values on all ranks"
        with pytest.raises(RankMismatchError, match=says), check_ranks(mesh):
            m(x)
    # Without gradients a unit is gathered for each call: the next one reads the writes of this one.
    twice, seen = Twice(), []
    fully_shard(twice.inner, mesh=mesh)
    fully_shard(twice, mesh=mesh)

    def count(module: Counting) -> None:
        module.held.add_(1.0)
        seen.append(module.held.sum().item())

    twice.inner.more = count
    for _ in range(2):
        with torch.no_grad():
            twice(x)
    assert seen == pytest.approx([Counting().held.sum().item() + 12 * n for n in (1, 2, 3, 4)])
    # Something else in the place of a parameter cannot arrive.
    m = fully_shard(Counting(), mesh=mesh)
    m.more = lambda self: setattr(self, "held", nn.Parameter(torch.zeros(4, 3)))
    with pytest.raises(ValueError, match="the parameter 'held' was replaced"):
        m(x)
    m.more = None
    assert m(x).shape == (2, 4)


class Recomputed(nn.Module):
    """A checkpointed part that writes to its parameters, in a unit with another layer."""

    def __init__(self, way: str, reentrant: bool) -> None:
        super().__init__()
        self.part, self.out, self.reentrant = Writing(way, False), nn.Linear(7, 7), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.part, x, use_reentrant=self.reentrant))


@spmd.on_mesh()
def recomputed(mesh: Any) -> None:
    """Backward writes a second time where it computes a part again, as on a single device."""
    for way, reentrant, options in (
        ("mul_ and add_", True, {}),
        ("mul_ and add_", False, {}),
        ("other data", True, {"reshard_after_forward": True}),
        ("data", False, {}),
    ):
        torch.manual_seed(0)
        single = Recomputed(way, reentrant).double()
        single.part.codes.requires_grad_(False)
        model = fully_shard(copy.deepcopy(single), mesh=mesh, **options)
        for step in range(4):
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            for m in (single, model):
                m.zero_grad()
                m(x.clone().requires_grad_()).square().mean().backward()
            for (name, p), q in zip(single.named_parameters(), model.parameters(), strict=True):
                what = (way, reentrant, step, name)
                assert torch.allclose(q.full_tensor(), p, rtol=1e-9), what
                assert p.grad is None or torch.allclose(q.grad.full_tensor(), p.grad, rtol=1e-9), what


@spmd.on_mesh()
def corners_of_replicas(mesh: Any) -> None:
    """Other memory in a distributed batch, several calls before a backward, and writes that cannot be kept."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    for shared in (False, True):
        single, model = Counting(), replicate(Counting(), mesh)
        for m in (single, model):
            m.more = lambda self: (
                replace_data(self.held, self.held * 2.0),
                replace_data(self.weight, self.weight * 0.5),
            )
        for _ in range(2):
            ys = [single(x) for _ in range(2)]
            sum(y.square().sum() for y in ys).backward()  # type: ignore[union-attr]
            found = [model(distribute_tensor(x, mesh, [Shard(0)]) if shared else x) for _ in range(2)]
            sum(y.square().sum() for y in found).backward()  # type: ignore[union-attr]
            for y, z in zip(ys, found, strict=True):
                assert torch.allclose(z.full_tensor() if shared else z, y), shared
            for p, q in zip(single.parameters(), model.parameters(), strict=True):
                assert torch.allclose(q.full_tensor(), p), shared
            assert torch.allclose(model.weight.grad.full_tensor(), single.weight.grad), shared  # type: ignore[union-attr]
    m = replicate(Counting(), mesh)
    m.more = lambda self: setattr(self, "held", nn.Parameter(torch.zeros(4, 3)))
    with pytest.raises(ValueError, match="the parameter 'held' was replaced"):
        m(x)
    m.more = lambda self: replace_data(self.held, torch.zeros(3))
    with pytest.raises(
        ValueError, match=r"changed the shape, dtype or placement of the parameter 'held'.* shape \(4, 3\)"
    ):
        m(x)
    m.more = lambda self: replace_data(self.held, self.held.redistribute(placements=[Shard(0)]))  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=r"changed the shape, dtype or placement of the parameter 'held'.* shape \(4, 3\)"
    ):
        m(distribute_tensor(x, mesh, [Shard(0)]))
    m.more = None
    assert m(x).shape == (4, 4) and torch.equal(m.held.full_tensor(), Counting().held)


@pytest.mark.parametrize("job", [corners, recomputed, corners_of_replicas], ids=lambda job: job.__name__)
@on_ranks(1, 2, 3)
def test_corners_of_writes(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)
