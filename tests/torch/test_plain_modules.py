"""Forwards: modules that the short one serves, and what other libraries see of a forward or set on an object."""

from __future__ import annotations

import copy
import inspect
from types import MethodType

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    fully_shard,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from tests.torch.support import device


class OwnLinear(nn.Linear):
    """A subclass may compute something else."""


def test_plain_linear() -> None:
    assert get_platform().fast.is_plain_linear(nn.Linear(2, 3))
    assert not get_platform().fast.is_plain_linear(OwnLinear(2, 3))


class Doubled(nn.Linear):
    """A forward with names, which other libraries read."""

    def forward(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Compute twice the usual."""
        return super().forward(values) * 2 * scale


@pytest.mark.parametrize("apply", ["fully_shard", "parallelize_module"])
def test_a_replaced_forward_has_the_names_of_its_arguments(apply: str) -> None:
    mesh, layer = init_device_mesh(None, (1,), mesh_dim_names=("tp",)), Doubled(4, 4)
    if apply == "fully_shard":
        fully_shard(layer, mesh=mesh)
    else:
        parallelize_module(layer, mesh, ColwiseParallel(use_local_output=False))
    assert list(inspect.signature(layer.forward).parameters) == ["values", "scale"]
    assert layer.forward.__doc__ == "Compute twice the usual."


def test_a_forward_that_was_set_on_the_object() -> None:
    """Libraries set forwards on objects: the unit surrounds them, and a copy has its own."""
    mesh, x = init_device_mesh(None, (1,), mesh_dim_names=("dp",)), torch.ones(2, 4, device=device())
    bound, free = Doubled(4, 4).to(device()), Doubled(4, 4).to(device())
    bound.forward = MethodType(lambda self, x: nn.Linear.forward(self, x) * 3, bound)  # type: ignore[method-assign]
    free.forward = lambda x: x + free.bias  # type: ignore[assignment, method-assign]
    wanted = [layer(x) for layer in (bound, free)]
    for layer, y in zip((bound, free), wanted, strict=True):
        fully_shard(layer, mesh=mesh)
        assert torch.equal(layer(x), y)
    other = copy.deepcopy(bound)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert torch.equal(bound(x), wanted[0])
    assert not other(x).any()
