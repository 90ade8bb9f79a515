"""Torch's functions that draw, where a program has asked for numbers by counter; recomputation, compilation, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import hyper_parallel
from hyper_parallel import (
    DTensor,
    Replicate,
    SequenceParallel,
    Shard,
    distribute_tensor,
    manual_seed,
    parallelize_module,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.torch.basics import counter
from hyper_parallel.platform.torch.compiler.dynamo import not_compiled
from hyper_parallel.testing import spmd
from tests.torch.compiled import fresh

R, S0, S1 = Replicate(), Shard(0), Shard(1)

#: Functions of a DTensor that are drawn by counter.
DRAWN: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.25),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand_like": torch.rand_like,
    "randn_like of float64": lambda x: torch.randn_like(x, dtype=torch.float64),
    "uniform_": lambda x: x.uniform_(-2, 3),
    "uniform_ by name": lambda x: x.uniform_(**{"from": 1.0, "to": 2.0}),
    "normal_": lambda x: x.normal_(1.0, std=2.0),
    "bernoulli_": lambda x: x.bernoulli_(0.25),
    "init.uniform_": lambda x: nn.init.uniform_(x, 1, 3),
    "init.normal_": lambda x: nn.init.normal_(x, std=3.0),
    "init.trunc_normal_": nn.init.trunc_normal_,
}
#: name -> (mean, variance) of the values, as far as 480 of them tell.
MOMENTS = {
    "uniform_": (0.5, 25 / 12),
    "uniform_ by name": (1.5, 1 / 12),
    "normal_": (1.0, 4.0),
    "bernoulli_": (0.25, 3 / 16),
}
#: Those that draw as by default: the numbers of a single device.
AS_EVER: dict[str, Callable[[Any], Any]] = {
    "dropout2d": lambda x: F.dropout2d(x, 0.5, training=True),
    "exponential_": lambda x: x.exponential_(),
    "init.kaiming_uniform_": nn.init.kaiming_uniform_,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "generator": lambda x: x.uniform_(generator=torch.Generator(x.device).manual_seed(1)),
}


def given(mesh: Any, placement: Any) -> DTensor:
    whole = torch.linspace(1, 2, 480).reshape(4, 5, 6, 4).to(mesh.platform.device())
    return distribute_tensor(whole, mesh, [placement])


@spmd.on_mesh()
def draw_all(mesh: Any) -> dict[str, torch.Tensor]:
    found = {}
    try:
        for name, draw in DRAWN.items():
            drawn = []
            for placement in (R, S0, S1):
                manual_seed(5, mesh, parallel_rng="counter")
                drawn.append(draw(given(mesh, placement)).full_tensor().cpu())
                torch.testing.assert_close(drawn[-1], drawn[0])
            found[name] = drawn[0]
        for name, draw in AS_EVER.items():
            for placement in (R, S0, S1):
                manual_seed(5, mesh)
                wanted = draw(given(mesh, placement)).full_tensor()
                manual_seed(5, mesh, parallel_rng="counter")
                torch.testing.assert_close(draw(given(mesh, placement)).full_tensor(), wanted, msg=name)
        wanted = mesh.platform.counter_key().to(torch.float64).dtype  # an NPU has no float64
        assert found["randn_like of float64"].dtype == wanted
        manual_seed(5, mesh, parallel_rng="counter")
        with pytest.raises(TypeError, match="draws no numbers of"):
            torch.randn_like(given(mesh, S0), dtype=torch.complex64)
    finally:
        manual_seed(0, mesh)
    return found


def test_functions(pool: Any) -> None:
    (found,) = pool.run(1, draw_all)
    for other in (*pool.run(2, draw_all), *pool.run(3, draw_all)):
        for name, numbers in found.items():
            torch.testing.assert_close(other[name], numbers, msg=name)
    assert set(found["dropout"].unique().tolist()) >= {0.0} and 0.15 < (found["dropout"] == 0).float().mean() < 0.35
    for name, (mean, variance) in MOMENTS.items():
        x = found[name]
        assert abs(x.mean() - mean) < 4 * math.sqrt(variance / 480) and 0.7 < x.var() / variance < 1.4, name


class Block(nn.Module):
    """Norm, dropout and a product, all on a part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(6), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.dropout(self.norm(x))


@spmd.on_mesh()
def recomputed_and_compiled(mesh: Any) -> None:
    """Activation checkpointing draws the same again, and compiled code draws the numbers of eager mode."""
    device = mesh.platform.device()
    x = torch.linspace(-1, 1, 2 * 12 * 6, device=device).reshape(2, 12, 6).sin()
    plan = {"norm": SequenceParallel(), "dropout": SequenceParallel(use_local_output=True)}
    block = parallelize_module(Block().to(device), mesh, plan)
    weights = distribute_tensor(x.cos(), mesh, [S1]).to_local()
    compiled = torch.compile(block, backend="aot_eager")

    def step(call: Callable[[Any], Any]) -> list[torch.Tensor]:
        block.zero_grad()
        part = distribute_tensor(x, mesh, [S1]).to_local().detach().requires_grad_()
        manual_seed(5, mesh, parallel_rng="counter")
        call(part)  # so that the state differs from that after seeding
        y = call(part)
        (y * weights).sum().backward()
        return [y.detach(), part.grad, *(p.grad.full_tensor() for p in block.parameters())]

    try:
        wanted = step(block)
        noise = wanted[0] == 0
        assert 0.2 < noise.float().mean() < 0.8
        for reentrant in (True, False):
            again = step(partial(checkpoint, block, use_reentrant=reentrant))
            for got, value in zip(again, wanted, strict=True):
                torch.testing.assert_close(got, value, msg=f"reentrant: {reentrant}")
        for got, value in zip(step(compiled), wanted, strict=True):
            torch.testing.assert_close(got, value)
    finally:
        manual_seed(0, mesh)
        fresh(mesh)


def test_recomputed_and_compiled(pool: Any) -> None:
    pool.run(2, recomputed_and_compiled)


class Largest(TorchDispatchMode):
    """The largest number of elements that an operation gives."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.count = max(self.count, *made, 0)
        return result


@spmd.on_mesh()
def largest(mesh: Any) -> None:
    """Draws allocate no tensor of the whole size; by default they do."""
    shape, part = (mesh.size() * 40, 5000), 40 * 5000
    x = DTensor.from_local(torch.ones(40, 5000, device=mesh.platform.device()), mesh, [S0])
    options = {"device_mesh": mesh, "placements": [S0]}
    draws = [lambda: F.dropout(x, 0.5), lambda: hyper_parallel.randn(shape, **options), lambda: torch.rand_like(x)]
    try:
        for draw in draws:
            counts = []
            for how in ("counter", "single_device"):
                manual_seed(1, mesh, parallel_rng=how)
                with Largest() as seen:
                    draw()
                counts.append(seen.count)
            assert counts == [part, part * mesh.size()]
    finally:
        manual_seed(0, mesh)


def test_memory(pool: Any) -> None:
    pool.run(2, largest)


def test_the_generator_is_traced_whole() -> None:
    """A compiler gets one graph, of the same numbers, however many there are."""

    def draw(key: torch.Tensor) -> list[torch.Tensor]:
        ranges = (((0, 2), (3, 1)), ((10, counter.CHUNK),))
        return [counter.numbers(kind, key, (4, 1 << 40), ranges, torch.float32) for kind in ("uniform", "normal")]

    assert counter.__file__ not in not_compiled(None)  # skipped once there are DTensors, which other tests may make
    key = torch.tensor([0.1, 0.2, 0.3, 0.4], device=get_platform().device())
    compiled = torch.compile(draw, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(compiled(key), draw(key), strict=True):
        torch.testing.assert_close(got, wanted)
    torch._dynamo.reset()
