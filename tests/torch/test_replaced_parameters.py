"""Torch's ways to put other parameters, data and shapes into a parallelised model: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, full, randn, shard

PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.to(device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def both(mesh: Any) -> tuple[Mlp, Mlp]:
    return Mlp(), parallelize_module(Mlp(), mesh, PLAN)


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


@on_mesh()
def exchanged(mesh: Any) -> None:
    plain = {name: p + 0.1 for name, p in Mlp().state_dict().items()}
    x = randn(3, 6)

    _, sharded = both(mesh)
    sharded.up.weight = nn.Parameter(plain["up.weight"])
    refused(lambda: sharded(x), "'weight'", "'up'", "plain tensor", "load_state_dict", "distribute_tensor")
    _, sharded = both(mesh)
    torch.utils.swap_tensors(sharded.up.weight, nn.Parameter(randn(12, 6)))
    refused(lambda: sharded(x), "'weight'", "'up'", "plain tensor")
    _, sharded = both(mesh)
    refused(lambda: torch.func.functional_call(sharded, plain, (x,)), "'weight'", "'up'", "plain tensor")

    # Without a bias that was there.
    single, sharded = both(mesh)
    for model in (single, sharded):
        model.up.bias = model.down.bias = None
    close(sharded(x), single(x), "without biases")

    # A state dict that is copied, or assigned, is right.
    single, sharded = both(mesh)
    single.load_state_dict(plain)
    sharded.load_state_dict(plain)
    close(sharded(x), single(x), "copied")
    _, other = both(mesh)
    other.load_state_dict(sharded.state_dict(), assign=True)
    close(other(x), single(x), "assigned")
    other.load_state_dict(plain, assign=True)
    close(other(x), single(x), "whole ones assigned")

    # Vectors of plain values are refused by name of the operation; placed as the parameters they are right.
    vector = nn.utils.parameters_to_vector(single.parameters())
    refused(lambda: nn.utils.vector_to_parameters(vector, sharded.parameters()), "plain tensor", "distribute_tensor")
    nn.utils.vector_to_parameters(shard(vector.detach(), mesh, Replicate()), other.parameters())
    if other.up.weight.placements == (Shard(0),):
        close(other(x), single(x), "from a vector")
    else:
        refused(lambda: other(x), "'weight'", "'up'", "redistribute")


def test_exchanged(pool: Any) -> None:
    """State dicts, swapped tensors, functional calls, vectors."""
    for world_size in (2, 3):
        pool.run(world_size, exchanged)


@on_mesh()
def exchanged_in_forward(mesh: Any) -> None:
    """Exchange a parameter in forward, as `fully_shard` does: gather it, and put a plain one into the module's
    table."""
    _, sharded = both(mesh)

    def unshard(module: nn.Module, args: Any) -> None:
        module._parameters["weight"] = nn.Parameter(module.weight.full_tensor().detach())

    sharded.down.register_forward_pre_hook(unshard)
    refused(
        lambda: sharded(randn(3, 6)),
        "'weight'",
        "'down'",
        "fully_shard",
        "call the unit",
    )


def test_exchanged_in_forward(pool: Any) -> None:
    """Refused, with the path."""
    pool.run(2, exchanged_in_forward)


@on_mesh()
def fully_sharded(mesh: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _, sharded = both(mesh)
    group = init_device_mesh(device().type, (mesh.size(),))
    with CommDebugMode() as comm:
        refused(lambda: fully_shard(sharded, mesh=group), "'up.weight'", "mesh=mesh['dp'].to_torch()")
    assert comm.get_total_counts() == 0
    plain = fully_shard(Mlp(), mesh=group)
    close(plain(randn(3, 6)), Mlp()(randn(3, 6)))


def test_fully_shard(pool: Any) -> None:
    """Refused over the same ranks, before it communicates; plain models are its own affair. Over others:
    test_torch_fully_shard.py."""
    pool.run(4, fully_sharded)


class Counted(nn.Module):
    calls = 0

    def forward(self, weight: Any) -> Any:
        Counted.calls += 1
        return weight * 2


COMPUTE: dict[str, Callable[[nn.Module], Any]] = {
    "parametrization": lambda module: parametrize.register_parametrization(module, "weight", Counted()),
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "spectral norm by hooks": nn.utils.spectral_norm,
    "weight norm by hooks": nn.utils.weight_norm,
}


@on_mesh()
def computed_weights(mesh: Any, how: str) -> None:
    single, sharded = both(mesh)
    for model in (single, sharded):
        for module in (model.up, model.down):
            torch.manual_seed(1)
            COMPUTE[how](module)
    x = randn(3, 6)
    for step in range(3):
        Counted.calls = 0
        wanted = single(x)
        times = Counted.calls
        found = sharded(x)
        assert Counted.calls == 2 * times, "computed once for each call"
        close(found, wanted, f"step {step}")
        for y in (found, wanted):
            y.square().sum().backward()
    for (name, p), q in zip(sharded.named_parameters(), single.parameters(), strict=True):
        close(p.grad, q.grad, name, 1e-4)
    for module in ("up", "down"):
        model = Mlp()
        COMPUTE[how](getattr(model, module))
        refused(lambda model=model: parallelize_module(model, mesh, PLAN), f"'{module}'", "after parallelize_module")


@pytest.mark.parametrize("how", COMPUTE)
def test_computed_weights(pool: Any, how: str) -> None:
    """Computed weights registered after parallelize_module are right, and computed once a call. Before it the message
    tells the order."""
    pool.run(2, computed_weights, how)


@on_mesh()
def computed_norm(mesh: Any) -> None:
    """The weight of a norm under SequenceParallel: its gradient is reduced all the same."""
    single, sharded = nn.LayerNorm(6).to(device()), nn.LayerNorm(6).to(device())
    parallelize_module(sharded, mesh, SequenceParallel())
    for module in (single, sharded):
        parametrize.register_parametrization(module, "weight", Counted())
    x = randn(2, 4, 6)
    y = sharded(shard(x, mesh, Shard(1)))
    for each in (y.full_tensor(), single(x)):
        (each * randn(2, 4, 6, seed=1)).sum().backward()
    close(y, single(x))
    for (name, p), q in zip(sharded.named_parameters(), single.parameters(), strict=True):
        close(p.grad, q.grad, name)


def test_computed_norm(pool: Any) -> None:
    """Parametrised norms."""
    pool.run(2, computed_norm)


@on_mesh()
def new_data_of_an_input(mesh: Any) -> None:
    """``x.data = y`` while an earlier graph lives: caches about the data of before are not used."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.norm = nn.Linear(6, 12), nn.Linear(6, 12), nn.LayerNorm(6)
            self.to(device())

        def forward(self, x: Any) -> Any:
            return self.a(x) + self.b(x)

    single, sharded = Twice(), Twice()
    gathered = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(sharded, mesh, {"a": gathered, "b": gathered})
    prepared = parallelize_module(
        Twice(),
        mesh,
        {"": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()), "[ab]": gathered},
    )
    local = parallelize_module(Twice(), mesh, {"[ab]": ColwiseParallel()})
    buffer = randn(5, 3, 6, seed=3)
    news: list[Callable[[Any], Any]] = [
        lambda x: randn(3, 6, seed=1),
        lambda x: buffer[1],
        lambda x: buffer[2],  # another offset in the same storage
        lambda x: buffer[2][:2],  # another shape at the same address
        lambda x: buffer[2][:2].t().contiguous().t(),
        lambda x: buffer[2].t()[:3, :3].repeat(1, 2),
    ]
    for model in (sharded, prepared, local):
        for grad in (True, False):
            x = randn(3, 6).requires_grad_(grad)
            alive = [model(x)]
            for new in news:
                x.data = new(x)
                for _ in range(2):
                    y, wanted = model(x), single(x)
                    alive.append(y)
                    if model is local:
                        wanted = wanted.chunk(mesh.size(), -1)[mesh.get_local_rank()]
                    close(y, wanted, f"{type(model).__name__} {tuple(x.shape)}")
            # Strides alone: the same address, the same shape.
            square = torch.arange(36.0, device=device()).reshape(6, 6) / 36
            x.data = square
            alive.append(model(x))
            x.data = square.t()
            if model is not local:
                close(model(x), single(x), "transposed")
    # And its gradient is the gradient of the new data's use.
    x, z = (randn(3, 6).requires_grad_() for _ in range(2))
    kept = [sharded(x), single(z)]
    for leaf, model in ((x, sharded), (z, single)):
        leaf.data = randn(3, 6, seed=7)
        model(leaf).square().sum().backward()
    close(x.grad, z.grad, "gradient", 1e-4)
    assert len(kept) == 2


def test_new_data_of_an_input(pool: Any) -> None:
    """Plain inputs with a graph of before that is still alive."""
    pool.run(2, new_data_of_an_input)


@on_mesh()
def new_data_of_a_dtensor(mesh: Any) -> None:
    """Gathered values, and views of them, are replaced with the data."""
    leaf = shard(randn(4, 6), mesh, Shard(0)).requires_grad_()
    weight = shard(randn(5, 6, seed=2), mesh, Shard(0)).requires_grad_()
    x = leaf.redistribute(placements=[Replicate()])
    before = torch.nn.functional.linear(x, weight)
    x.data = shard(randn(4, 6, seed=1), mesh, Replicate())
    close(torch.nn.functional.linear(x, weight), randn(4, 6, seed=1) @ randn(5, 6, seed=2).t(), "new data")
    close(before, randn(4, 6) @ randn(5, 6, seed=2).t(), "data of before")
    # In place on a tensor that was made from a plain one that autograd computed.
    plain = randn(4, 6).requires_grad_()
    twin = randn(4, 6).requires_grad_()
    y = DTensor.from_local(plain * 1, mesh, [Replicate()])
    alive = torch.nn.functional.linear(y, weight)
    y.mul_(3)
    torch.nn.functional.linear(y, weight).sum().backward()
    (3 * twin @ full(weight).t()).sum().backward()
    close(plain.grad, twin.grad, "gradient through mul_")
    assert alive.requires_grad
    refused(
        lambda: DTensor.from_local(plain, mesh, [Replicate()]).add_(1),
        "view of a leaf",  # torch's words: it is an error of a single device too
        kind=RuntimeError,
    )
    with torch.no_grad():
        DTensor.from_local(plain, mesh, [Replicate()]).add_(1)
    close(plain, randn(4, 6) + 1, "written through")


def test_new_data_of_a_dtensor(pool: Any) -> None:
    """``.data`` and in-place operations on DTensors."""
    pool.run(2, new_data_of_a_dtensor)


@on_mesh()
def other_sizes_in_place(mesh: Any) -> None:
    for call in (
        lambda x: x.resize_(2, 2),
        lambda x: x.resize_as_(torch.ones(2, 2)),
        lambda x: x.set_(torch.ones(2, 2)),
        lambda x: x.as_strided_((2, 2), (2, 1)),
    ):
        for placement in (Shard(0), Replicate()):
            x = shard(randn(4, 6), mesh, placement)
            refused(lambda call=call, x=x: call(x), "this rank's shard", "make a new", kind=TypeError)
            close(x, randn(4, 6))
    x = shard(randn(4, 6), mesh, Shard(0))
    assert x.set_(shard(randn(3, 6, seed=1), mesh, Replicate())) is x
    close(x, randn(3, 6, seed=1))
    # A call that only renames dimensions is right, also for gathered tensors.
    leaf = shard(randn(4, 1, 6), mesh, Shard(0)).requires_grad_()
    twin = randn(4, 1, 6).requires_grad_()
    for change in ("squeeze_", "t_"):
        x, y = (leaf.redistribute(placements=[Replicate()]), twin * 1)
        weight = shard(randn(5, 6, seed=2), mesh, Shard(0))
        kept = torch.nn.functional.linear(x, weight)
        for each in (x, y):
            each.squeeze_()
            if change == "t_":
                each.t_().transpose_(0, 1).unsqueeze_(0).swapaxes_(0, 1).squeeze_(1)
        found = torch.nn.functional.linear(x, weight)
        wanted = torch.nn.functional.linear(y, randn(5, 6, seed=2))
        close(found, wanted, change)
        leaf.grad = twin.grad = None
        for each in (found, wanted):
            each.square().sum().backward()
        close(leaf.grad, twin.grad, f"gradient after {change}", 1e-4)
        assert kept.shape == (4, 1, 5)


def test_other_sizes_in_place(pool: Any) -> None:
    """``resize_``, ``set_`` are refused, ``squeeze_`` and its like are right."""
    pool.run(2, other_sizes_in_place)


@on_mesh()
def parallel_state_into_plain(mesh: Any) -> None:
    single, sharded = both(mesh)
    refused(
        lambda: single.load_state_dict(sharded.state_dict()),
        "up.weight",
        "full_tensor()",
        "state_dict",
        kind=RuntimeError,
    )
    single.load_state_dict({name: value.full_tensor() for name, value in sharded.state_dict().items()})
    close(single(randn(3, 6)), sharded(randn(3, 6)))


def test_parallel_state_into_plain(pool: Any) -> None:
    """The message says `full_tensor()`."""
    pool.run(2, parallel_state_into_plain)


@on_mesh()
def optimizer_from_before(mesh: Any, name: str, options: dict[str, Any]) -> None:
    single, sharded = Mlp(), Mlp()
    optimizers = [getattr(torch.optim, name)(model.parameters(), **options) for model in (single, sharded)]

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(randn(3, 6)).square().sum().backward()
        optimizer.step()

    for model, optimizer in zip((single, sharded), optimizers, strict=True):
        step(model, optimizer)
    parallelize_module(sharded, mesh, PLAN)
    refused(lambda: step(sharded, optimizers[1]), name, "after parallelize_module", "distribute_tensor")
    # The remedy.
    for p, state in optimizers[1].state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape:
                state[key] = shard(value, mesh, *p.placements)
    for model, optimizer in zip((single, sharded), optimizers, strict=True):
        step(model, optimizer)
        step(model, optimizer)
    for (path, p), q in zip(sharded.named_parameters(), single.parameters(), strict=True):
        close(p, q, path, 1e-4)


@pytest.mark.parametrize(
    ("name", "options"), [("AdamW", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {"lr": 0.1})]
)
def test_optimizer_from_before(pool: Any, name: str, options: dict[str, Any]) -> None:
    """State that was made before parameters were sharded."""
    pool.run(2, optimizer_from_before, name, options)
