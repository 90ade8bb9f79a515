"""Vocabularies: padded ones, padding ids, and ids that are none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import ColwiseParallel, DTensor, Replicate, RowwiseParallel, parallelize_module
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, full

ROWS = RowwiseParallel(input_layouts=Replicate())


@on_mesh()
def unknown_ids(mesh: Any) -> None:
    """An id outside the vocabulary is the error of a single device, on every rank and without a hang."""
    model = parallelize_module(nn.Embedding(7, 4), mesh, ROWS)
    for wrong in (7, 100, -1):
        with pytest.raises(IndexError, match="index out of range"):
            model(torch.tensor([0, wrong, 6]))


@on_mesh()
def padding_id(mesh: Any, padding: int) -> None:
    """The padding row gets no gradient, whichever rank has it."""
    torch.manual_seed(0)
    single = nn.Embedding(7, 4, padding_idx=padding)
    sharded = parallelize_module(copy.deepcopy(single), mesh, ROWS)
    ids = torch.tensor([[0, 1, 2, padding], [3, 4, 5, 6]])
    for model in (single, sharded):
        model(ids).pow(2).sum().backward()
    close(full(sharded.weight.grad), single.weight.grad)
    assert not full(sharded.weight.grad)[padding].any()


class Padded(nn.Module):
    """A tied model of 11 words whose vocabulary is padded to 16, the padding taking no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 4), nn.Linear(4, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embedding(ids)))
        return F.cross_entropy(logits[..., :11].flatten(0, 1), ids.roll(1, -1).flatten())


@on_mesh()
def padded(mesh: Any, use_local_output: bool) -> None:
    torch.manual_seed(0)
    single = Padded()
    head = ColwiseParallel(output_layouts=Replicate(), use_local_output=use_local_output)
    sharded = copy.deepcopy(single)
    sharded.head.weight = sharded.embedding.weight
    parallelize_module(sharded, mesh, {"embedding": ROWS, "head": head})
    ids = torch.tensor([[0, 1, 10, 7], [3, 3, 5, 6]])
    losses = []
    for model in (single, sharded):
        loss = model(ids if model is single or use_local_output else DTensor.from_local(ids, mesh))
        loss.backward()
        losses.append(full(loss))
    close(losses[1], losses[0])
    close(full(sharded.head.weight.grad), single.head.weight.grad)
    assert not full(sharded.head.weight.grad)[11:].any()


@on_ranks(1, 2, 3, 4)
def test_vocabulary(pool: Any, world_size: int) -> None:
    pool.run(world_size, unknown_ids)
    for padding in (0, 3, 6):
        pool.run(world_size, padding_id, padding)
    for use_local_output in (True, False):
        pool.run(world_size, padded, use_local_output)


@on_mesh()
def limited_norm(mesh: Any) -> None:
    """Options that rewrite the weight, or count ids, are refused by modules of every style."""
    for style in (ROWS, ColwiseParallel()):
        for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
            model = parallelize_module(nn.Embedding(7, 4, **options), mesh, style)
            (name,) = options
            with pytest.raises(TypeError, match=rf"embedding\({name}="):
                model(torch.tensor([0, 6]))


def test_options_that_are_refused(pool: Any) -> None:
    pool.run(2, limited_norm)
