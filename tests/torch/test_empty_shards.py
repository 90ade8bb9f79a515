"""Operations of which some ranks have nothing, forward, backward and the gradients of gradients; and kin: efficient
zeros, reentrant checkpointing, dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    check_ranks,
    get_platform,
    parallelize_module,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn, shard

#: Functions of a (2, 6, 4) tensor whose rows, of dimension 1 or 2, some ranks lack.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "replicate": lambda x: F.pad(x, (1, 1), mode="replicate"),
    "reflect": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "circular": lambda x: F.pad(x, (1, 1), mode="circular"),
    "constant": lambda x: F.pad(x, (1, 1)),
    "cumprod": lambda x: x.cumprod(-1),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "prod": lambda x: x.prod(1),
    "amax": lambda x: x.amax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "var": lambda x: x.var(-1),
    "chain": lambda x: (x.tanh() @ x.mT) @ x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x * x, x.shape[-1:]),
}


@on_mesh(4)
def compare(mesh: Any, name: str, size: int) -> None:
    f = FUNCTIONS[name]
    plain = randn(2, size, 4).double().requires_grad_()
    x = shard(plain.detach(), mesh, Shard(1)).requires_grad_()
    with check_ranks():
        y, wanted = f(x), f(plain)
        close(y, wanted, name)
        first = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
        close(first, torch.autograd.grad(wanted.square().sum(), plain, create_graph=True)[0], name)
        second = torch.autograd.grad(first.square().sum(), x)[0]
        wanted = torch.autograd.grad(f(plain).square().sum(), plain, create_graph=True)[0]
        close(second, torch.autograd.grad(wanted.square().sum(), plain)[0], name)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_order_of_empty_shards(pool: Any, name: str, size: int) -> None:
    pool.run(4, compare, name, size)


#: Functions whose backward asks for a cotangent that is dense.
DENSE: dict[str, Callable[[Any], Any]] = {
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x.tanh(), x.sin())),
    "view_as_complex": lambda x: torch.view_as_complex(torch.stack([x.tanh(), x.sin()], -1)).abs(),
    "transposed": lambda x: torch.view_as_real(torch.complex(x.tanh(), x.sin())).transpose(0, -1),
    **FUNCTIONS,
}


@on_mesh(4)
def stretched(mesh: Any) -> None:
    for name, f in DENSE.items():
        plain = randn(2, 2, 4).double().requires_grad_()
        x = shard(plain.detach(), mesh, Shard(1)).requires_grad_()
        f(x).mean().full_tensor().backward()
        f(plain).mean().backward()
        close(x.grad.full_tensor(), plain.grad, name)


def test_stretched_cotangents_of_empty_shards(pool: Any) -> None:
    """A mean gives each element one number, as a view of stride 0. Of nothing too, and that counts as dense."""
    pool.run(4, stretched)


@on_mesh(2)
def reduce_scalar(mesh: Any) -> None:
    plain = torch.tensor(1.5, device=device()).requires_grad_()
    x = shard(plain.detach(), mesh, Replicate()).requires_grad_()
    for dim in (0, -1, (0,)):
        y, wanted = x.logsumexp(dim), plain.logsumexp(dim)
        close(y, wanted)
        close(torch.autograd.grad(y, x)[0], torch.autograd.grad(wanted, plain)[0])


def test_logsumexp_of_a_scalar(pool: Any) -> None:
    pool.run(2, reduce_scalar)


@on_mesh(2)
def communicate_zeros(mesh: Any) -> None:
    """An efficient zero tensor of torch on one rank meets numbers on others."""
    mine = mesh.get_local_rank() == 0
    zeros = torch._efficientzerotensor((4, 2), device=device())
    local = zeros if mine else torch.ones(4, 2, device=device())
    with torch.no_grad():
        close(DTensor.from_local(local, mesh, [Partial()]).full_tensor(), torch.ones(4, 2))
        close(DTensor.from_local(local, mesh, [Shard(0)]).full_tensor().sum(), torch.tensor(8.0))
        close(DTensor.from_local(local, mesh, [Partial()]).redistribute(placements=[Shard(0)]), torch.ones(4, 2))
        close(DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Shard(1)]).sum(), torch.tensor(8.0))
    model = parallelize_module(nn.Linear(2, 4).to(device()), mesh, ColwiseParallel())
    x = randn(3, 2).requires_grad_()
    model(x).backward(torch._efficientzerotensor((3, 2), device=device()))
    close(x.grad, torch.zeros(3, 2))


def test_efficient_zeros_are_communicated(pool: Any) -> None:
    pool.run(2, communicate_zeros)


def block(mesh: Any = None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(device())
    if mesh is not None:
        plan = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
    return model


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@on_mesh()
def recompute(mesh: Any, rows: int, reentrant: bool) -> None:
    """Checkpointing of functions of DTensors, and of a module that makes DTensors of plain tensors."""
    model, reference = block(mesh), block()
    plain = randn(2, rows, 4).requires_grad_()
    for watch in (Watching, lambda: FlopCounterMode(display=False)):
        x = shard(plain.detach(), mesh, Shard(1)).requires_grad_()
        model.zero_grad()
        with watch():
            y = checkpoint(model, x, use_reentrant=reentrant)
            y.square().sum().backward()
        plain.grad = None
        reference.zero_grad()
        reference(plain).square().sum().backward()
        close(x.grad, plain.grad, "input")
        for name, p in reference.named_parameters():
            close(dict(model.named_parameters())[name].grad, p.grad, name)
    layer = parallelize_module(nn.Linear(4, 6).to(device()), mesh, ColwiseParallel(use_local_output=False))
    weight, bias = layer.weight.full_tensor().detach(), layer.bias.full_tensor().detach()
    x = plain.detach().clone().requires_grad_()
    y = checkpoint(layer, x, use_reentrant=reentrant)
    assert isinstance(y, DTensor)
    y.square().sum().backward()
    plain.grad = None
    F.linear(plain, weight, bias).square().sum().backward()
    close(x.grad, plain.grad, "plain input")


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 4), (2, 3), (4, 1), (4, 2)])
def test_checkpointing(pool: Any, ranks: int, rows: int, reentrant: bool) -> None:
    pool.run(ranks, recompute, rows, reentrant)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_bytes_of_nothing(dtype: Any) -> None:
    """An expanded tensor without elements is contiguous, whatever its strides."""
    assert get_platform().bytes_of(torch.ones((), dtype=dtype).expand(0)) == b""
    assert (
        get_platform().bytes_of(torch.ones((), dtype=dtype).expand(3)) == torch.ones(3, dtype=dtype).numpy().tobytes()
    )
