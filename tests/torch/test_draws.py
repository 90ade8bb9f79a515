"""Torch's functions that draw random numbers and are no rule, on ranks whose generators have come apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import DTensor, Replicate, Shard, manual_seed
from hyper_parallel.core.communication.collectives import all_gather_object
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters.torch_adapter import device, numpy, seed, tensor
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.extent import on_ranks

#: name -> function of a tensor of shape (2, 4, 6, 5)
DRAWING: dict[str, Callable[[Any], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    "dropout2d": lambda x: F.dropout2d(x, 0.5, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) * x,
    "multinomial": lambda x: torch.multinomial(torch.sigmoid(x[0, 0]), 2).float(),
}
#: Those that draw for each shard: where ranks hold different parts, their generators have to be in one state.
BY_SHARDS = {"alpha_dropout", "dropout2d", "gumbel_softmax"}


@spmd.on_mesh()
def draws(mesh: Any, name: str) -> None:
    function, x = DRAWING[name], floats(2, 4, 6, 5)
    for placement in (Replicate(), Shard(1)):
        layout = get_layout(mesh, (placement,), x.shape)
        leaf = tensor(x).requires_grad_()
        seed(5)
        torch.rand(1, device=device())
        wanted = function(leaf)
        if wanted.requires_grad:
            wanted.square().sum().backward()
        manual_seed(5, mesh)
        alike = mesh.get_local_rank() == 0 or (name in BY_SHARDS and placement == Shard(1))
        torch.rand(1 if alike else 7, device=device())
        mine = tensor(x[layout.local_index()].copy()).requires_grad_()
        y = function(DTensor.from_local(mine, mesh, [placement], shape=x.shape))
        same(numpy(y), wanted.detach().cpu().numpy(), f"{name} of {placement}", 1e-4)
        local = numpy(y.to_local())
        if placement == Replicate():
            for other in all_gather_object(local, mesh, 0):
                np.testing.assert_array_equal(other, local, name)
        if wanted.requires_grad:
            y.square().sum().full_tensor().backward()
            same(mine.grad.cpu().numpy(), leaf.grad.cpu().numpy()[layout.local_index()], f"gradient of {name}", 1e-4)


@pytest.mark.parametrize("name", DRAWING)
@on_ranks(1, 2, 3)
def test_draws_of_the_first_rank_count(pool: Any, world_size: int, name: str) -> None:
    pool.run(world_size, draws, name)


@spmd.on_mesh()
def drawn_in_place(mesh: Any) -> None:
    x = DTensor.from_local(tensor(floats(4, 4)), mesh)
    with pytest.raises(ValueError, match="draws random numbers in place"):
        F.rrelu(x, training=True, inplace=True)


def test_draws_in_place_are_refused(pool: Any) -> None:
    pool.run(2, drawn_in_place)


@spmd.on_mesh()
def filled(mesh: Any) -> None:
    """Initialisers, and their results for a transposed parameter."""
    for placement in (Replicate(), Shard(0), Shard(1)):
        for transposed in (False, True):
            layout = get_layout(mesh, (placement,), (6, 8))
            plain = torch.zeros(6, 8, device=device())
            x = DTensor.from_local(torch.zeros(layout.local_shape, device=device()), mesh, [placement], shape=(6, 8))
            for name in ("normal_", "uniform_"):
                seed(3)
                getattr(plain.t() if transposed else plain, name)()
                manual_seed(3, mesh)
                if placement == Replicate():  # ranks whose generators have come apart
                    seed(3 if mesh.get_local_rank() == 0 else 4)
                getattr(x.t() if transposed else x, name)()
                same(numpy(x), plain.cpu().numpy(), f"{name} of {placement}, transposed: {transposed}", 0.0)


@on_ranks(1, 2)
def test_filled_in_place(pool: Any, world_size: int) -> None:
    pool.run(world_size, filled)
