"""Hooks on the gradients of parameters of `fully_shard` units: the same calls and values as on a single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import ColwiseParallel, Replicate, fully_shard, init_device_mesh, parallelize_module
from tests.torch.support import device, full, randn

LAYERS = 3


class Layers(nn.Module):
    """Layers, of which a batch uses some. One may be recomputed by a reentrant checkpoint."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4).to(device()) for _ in range(LAYERS))
        self.recomputed = recomputed

    def forward(self, x: Any, used: int = LAYERS) -> Any:
        for i, layer in enumerate(self.layers[:used]):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.recomputed and i == 1 else layer(x))
        return x


def with_hooks(model: Any, calls: list[Any]) -> None:
    """Register two hooks for each parameter: one scales the gradient by its norm, one reads the accumulated sum."""
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: calls.append((name, tuple(g.shape))) or g / (1 + full(g.norm())))
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, full(p.grad).sum().item())))


def train(mesh: Any, recomputed: bool, accumulated: bool, at: int) -> tuple[list[Any], list[Any]]:
    """Return gradients after a step, and the calls of hooks.

    Args:
        mesh: divides the model by columns over ``tp``, and in units over ``dp``. None leaves it whole.
        recomputed: whether a layer is recomputed by a reentrant checkpoint.
        accumulated: whether two batches are accumulated. The second one uses the first layer alone.
        at: whether hooks are registered before (0), between (1) or after (2) both ways of dividing the model.
    """
    calls: list[Any] = []
    model = Layers(recomputed)
    for i in range(3):
        if i == at:
            with_hooks(model, calls)
        if mesh is not None and i == 0:
            parallelize_module(model, mesh["tp"], {"layers.*": ColwiseParallel(output_layouts=Replicate())})
        if mesh is not None and i == 1:
            for unit in (*model.layers, model):
                fully_shard(unit, mesh=mesh["dp"])
    x = randn(3, 4).requires_grad_()
    if accumulated:
        if mesh is not None:
            model.set_requires_gradient_sync(False)
            model(x).square().sum().backward()
            model.set_requires_gradient_sync(True)
            assert not calls
            model(x, 1).square().sum().backward()
        else:  # one backward: hooks see the sum
            (model(x).square().sum() + model(x, 1).square().sum()).backward()
    else:
        model(x).square().sum().backward()
    return [full(p.grad) for p in model.parameters()], calls


def hooked() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    for recomputed, accumulated, at in ((False, False, 1), (True, False, 0), (False, True, 2), (False, True, 0)):
        what = f"recomputed {recomputed}, accumulated {accumulated}, registered at {at}"
        wanted, single = train(None, recomputed, accumulated, at)
        got, calls = train(mesh, recomputed, accumulated, at)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=what)
        assert len(calls) == len(single) == 2 * len(wanted), what
        for kind in (tuple, float):  # shapes in the one hook, sums in the other
            ours, theirs = ({name: v for name, v in found if isinstance(v, kind)} for found in (calls, single))
            assert ours == (theirs if kind is tuple else pytest.approx(theirs, rel=1e-4, abs=1e-5)), what


def test_hooks(pool: Any) -> None:
    pool.run(4, hooked)
