"""Torch's functions that write into arguments and have no rule, and caches on tensors that are written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    PackedShard,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters.torch_adapter import numpy, tensor
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.extent import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)

#: name -> (function, shapes of its operands); which operands it writes is found out on plain tensors.
WRITERS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "batch_norm": (lambda x, m, v: F.batch_norm(x, m, v, training=True), [(6, 4), (4,), (4,)]),
    "batch_norm of images": (
        lambda x, m, v, w: torch.batch_norm(x, w, w, m, v, True, 0.2, 1e-5, False),
        [(2, 4, 3), (4,), (4,), (4,)],
    ),
    "evaluation": (lambda x, m, v: F.batch_norm(x, m, v, training=False), [(6, 4), (4,), (4,)]),
    "instance_norm": (lambda x, m, v: F.instance_norm(x, m, v, use_input_stats=True), [(2, 4, 3), (4,), (4,)]),
    "native": (
        lambda x, w, m, v: torch.native_batch_norm(x, w, w, m, v, True, 0.1, 1e-5)[0],
        [(6, 4), (4,), (4,), (4,)],
    ),
    "renorm_": (lambda x: x.renorm_(2, 0, 1.0), [(5, 4)]),
    "out": (lambda x, y: torch.cumsum(x, 0, out=y), [(5, 4), (5, 4)]),
}


@spmd.on_mesh()
def writers(mesh: Any, name: str, mode: str) -> None:
    function, shapes = WRITERS[name]
    arrays = [np.abs(floats(*shape)) + 0.5 for shape in shapes]
    context = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    with context():
        plain = [tensor(a) for a in arrays]
        wanted = function(*plain)
        for placement in (R, S0):
            xs = []
            for a in arrays:
                layout = get_layout(mesh, (placement,), a.shape)
                xs.append(DTensor.from_local(tensor(a[layout.local_index()].copy()), mesh, [placement], shape=a.shape))
            y = function(*xs)
            same(numpy(y), numpy(wanted), f"{name} of {placement}", 1e-4)
            for i, (x, now) in enumerate(zip(xs, plain, strict=True)):
                assert x.placements == (placement,)
                same(numpy(x), numpy(now), f"operand {i} of {name}, placed {placement}", 1e-4)
    assert name == "evaluation" or any((numpy(p) != a).any() for p, a in zip(plain, arrays, strict=True)), name


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("name", WRITERS)
@on_ranks(1, 2)
def test_what_is_written_arrives(pool: Any, world_size: int, name: str, mode: str) -> None:
    pool.run(world_size, writers, name, mode)


@spmd.on_mesh()
def recorded(mesh: Any) -> None:
    """A write that gradients pass through cannot be put back into a shard: refused, on all ranks."""
    x = DTensor.from_local(tensor(floats(4, 4)).requires_grad_(), mesh, [S0]) * 1.0
    with pytest.raises(ValueError, match=r"writes in place into an operand|draws random numbers in place"):
        F.rrelu(x, inplace=True)
    if x.device.type == "npu":
        return  # its kernel advances the generator whether it draws or not, so that the second part is refused too
    with torch.no_grad():
        x = x.detach()
        wanted = F.rrelu(tensor(numpy(x)), inplace=True)
        assert F.rrelu(x, inplace=True) is x
        same(numpy(x), numpy(wanted), "written where nothing is recorded")


#: Functions with ``inplace``.
IN_PLACE: dict[str, Callable[..., Any]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": lambda x, inplace: nn.SiLU(inplace)(x),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x, inplace: F.hardtanh(x, -0.5, 0.5, inplace),
    "selu": F.selu,
    "elu": lambda x, inplace: F.elu(x, 0.5, inplace),
    "celu": lambda x, inplace: F.celu(x, inplace=inplace),
    "leaky_relu": lambda x, inplace: nn.LeakyReLU(0.1, inplace)(x),
    "threshold": lambda x, inplace: F.threshold(x, 0.25, 7.0, inplace),
}


@spmd.on_mesh()
def activated(mesh: Any, name: str) -> None:
    """The tensor itself is written, with gradients; a partial sum cannot be, and stays as it is."""
    function, array = IN_PLACE[name], floats(5, 4)
    leaf = tensor(array).requires_grad_()
    wanted = function(leaf * 1.0, inplace=True)
    (wanted * wanted).sum().backward()
    for placement in (R, S0, S1):
        index = get_layout(mesh, (placement,), (5, 4)).local_index()
        mine = tensor(array[index].copy()).requires_grad_()
        x = DTensor.from_local(mine, mesh, [placement], shape=(5, 4)) * 1.0
        view = x[:]
        y = function(x, inplace=True)
        assert y is x and x.placements == (placement,)
        same(numpy(view), numpy(wanted), f"a view of the result of {name}, placed {placement}", 1e-5)
        (y * y).sum().full_tensor().backward()
        same(numpy(mine.grad), numpy(leaf.grad)[index], f"gradient of {name}, placed {placement}", 1e-5)
    part = DTensor.from_local(tensor(array), mesh, [Partial()])
    if mesh.size() > 1:
        with pytest.raises(ValueError, match=r"cannot write into a tensor placed .*Partial"):
            function(part, inplace=True)
    same(numpy(part.to_local()), array, f"a partial sum that {name} did not write")


@pytest.mark.parametrize("name", IN_PLACE)
@on_ranks(1, 4)
def test_activations_in_place(pool: Any, world_size: int, name: str) -> None:
    pool.run(world_size, activated, name)


@spmd.on_mesh()
def source_written(mesh: Any) -> None:
    """The shard that a tensor was gathered from is written before an operation asks for a reducing view."""
    x, b = floats(4, 6), floats(4, 6)
    leaf = tensor(x).requires_grad_()
    y = leaf * 1.0
    (y * 1.0 + tensor(b)).square().sum().backward()
    packed = PackedShard(0, (2, 2))  # of which no reducing view is made when it is gathered
    index = get_layout(mesh, (packed,), (4, 6)).local_index()
    mine = DTensor.from_local(tensor(x[index].copy()), mesh, [packed], shape=(4, 6)).requires_grad_()
    source = mine * 1.0
    gathered = source.redistribute(placements=[R])
    source.mul_(3.0)  # has no part in the earlier gather
    columns = get_layout(mesh, (S1,), (4, 6)).local_index()
    other = DTensor.from_local(tensor(b[columns].copy()), mesh, [S1], shape=(4, 6))
    total = (gathered + other).square().sum().full_tensor()
    total.backward()
    same(numpy(mine.grad), numpy(leaf.grad), "gradient of the tensor gathered before the write", 1e-4)


def _detached(x: Any) -> Any:
    return x.detach_().requires_grad_()


#: Writes that do not run as operations with a rule. The gradient after them is that of the new value.
OTHER_WRITES: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(),
    "copy_": lambda x: x.copy_(tensor(floats(4, 6) + 1.0)),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "detach_": _detached,
}


@spmd.on_mesh()
def result_written(mesh: Any) -> None:
    """A gathered tensor is written, or a tensor whose gradient stays partial. Operations that compute a part of the
    gradient read it before and after."""
    x, w = floats(4, 6), floats(6, 4)
    made = {
        "gathered": lambda leaf: leaf.redistribute(placements=[R]),
        "partial": lambda leaf: DTensor.from_local(
            leaf.full_tensor(grad_placements=[Partial()]) * 1.0, mesh, [R], grad_placements=[Partial()]
        ),
    }
    for name, write in OTHER_WRITES.items():
        plain = tensor(x).requires_grad_()
        torch.manual_seed(3)
        y = plain * 1.0
        first = (y @ tensor(w)).sum()
        write(y)
        (first + (y @ tensor(w)).square().sum()).backward()
        for kind, make in made.items():
            leaf = distribute_tensor(tensor(x), mesh, [S0]).requires_grad_()
            weight = distribute_tensor(tensor(w), mesh, [S1])
            torch.manual_seed(3)
            z = make(leaf)
            first = (z @ weight).sum()
            write(z)
            (first + (z @ weight).square().sum()).backward()
            same(numpy(leaf.grad), numpy(plain.grad), f"gradient after {name} of a {kind} tensor", 1e-4)
            if name == "detach_":
                same(numpy(z.grad), numpy(y.grad), f"gradient of a detached {kind} tensor", 1e-4)


@spmd.on_mesh()
def reader_written(mesh: Any, plain: bool) -> None:
    """Values that layers read of their input are cached on it until it is written. The second layer then reads the new
    value, and its gradient takes the new way."""
    x, w = floats(3, 6), floats(8, 6)
    leaf = tensor(x).requires_grad_()
    F.linear(leaf * 3.0, tensor(w)).square().sum().backward()

    def layer() -> Any:
        module = nn.Linear(6, 8, bias=False)
        with torch.no_grad():
            module.weight.copy_(tensor(w))
        return parallelize_module(module, mesh, {"": ColwiseParallel(use_local_output=False)})

    first, second = layer(), layer()
    mine = tensor(x).requires_grad_()
    y = (mine if plain else DTensor.from_local(mine, mesh)) * 1.0
    kept = first(y)
    y.mul_(3.0)
    second(y).square().sum().full_tensor().backward()
    assert kept is not None
    same(numpy(mine.grad), numpy(leaf.grad), "gradient after the write", 1e-4)


@on_ranks(2, 3)
def test_recorded_writes_are_refused(pool: Any, world_size: int) -> None:
    pool.run(world_size, recorded)


@pytest.mark.parametrize("job", [source_written, result_written], ids=lambda job: job.__name__)
@pytest.mark.parametrize("world_size", [2])
def test_gathered_tensor_is_written(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)


@pytest.mark.parametrize("plain", [True, False])
@on_ranks(1, 2)
def test_input_of_layers_is_written(pool: Any, world_size: int, plain: bool) -> None:
    pool.run(world_size, reader_written, plain)
