"""Gradients of gradients by distributed leaves and intermediate results that are partial sums, in torch's own ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hyper_parallel import DTensor, Partial, Replicate
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters.torch_adapter import numpy, tensor
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.extent import on_ranks


class Square(torch.autograd.Function):
    """A function of the user whose gradient depends on its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * g


def gradient(loss: Any, leaf: Any, way: str) -> Any:
    """The gradient of ``loss(leaf)`` by the leaf, recorded."""
    if way == "grad":
        return torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0]
    if way == "intermediate":
        y = leaf * 1.0
        return torch.autograd.grad(loss(y), y, create_graph=True)[0]
    if way == "hook":
        y = leaf * 1.0
        y.register_hook(lambda g: g * g)
        return torch.autograd.grad(loss(y), leaf, create_graph=True)[0]
    if way == "function":
        return torch.autograd.grad(loss(Square.apply(leaf)), leaf, create_graph=True)[0]
    for _ in range(2 if way == "backward twice" else 1):
        loss(leaf).backward(create_graph=True)
        g = leaf.grad
        assert leaf.grad is g
    leaf.grad = None  # torch warns of the cycle otherwise
    return g


@spmd.on_mesh()
def leaves(mesh: Any, way: str, op: str) -> None:
    size, rank, c = mesh.size(), mesh.get_local_rank(), floats(3, 4)
    values = [floats(3, 4) + i for i in range(size)]
    parts = [tensor(v).requires_grad_() for v in values]

    def whole(part: Any) -> Any:
        total = part
        for i, other in enumerate(parts):
            total = total if i == rank else total + other
        return total / size if op == "avg" else total

    g = gradient(lambda part: (torch.tanh(whole(part)) * tensor(c)).sum(), parts[rank], way)
    (wanted,) = torch.autograd.grad((g * g).sum(), parts[rank])
    leaf = DTensor.from_local(tensor(values[rank]), mesh, [Partial(op)]).requires_grad_()
    weights = DTensor.from_local(tensor(c), mesh)
    g = gradient(lambda x: (torch.tanh(x) * weights).sum(), leaf, way)
    assert g.placements == (Replicate(),)
    (got,) = torch.autograd.grad((g * g).sum(), leaf)
    assert got.placements == (Replicate(),)
    same(numpy(got), wanted.cpu().numpy(), f"{way} through Partial({op})", tolerance=1e-4)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("way", ["grad", "intermediate", "hook", "function", "backward", "backward twice"])
@on_ranks(1, 2, 3)
def test_partial_leaf(pool: Any, world_size: int, way: str, op: str) -> None:
    pool.run(world_size, leaves, way, op)
