"""Hooks on the gradients of distributed parameters: the same calls and values as on a single device."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn

from hyper_parallel import ColwiseParallel, RowwiseParallel, fully_shard, init_device_mesh, parallelize_module
from hyper_parallel.mindspore import value_and_grad


def model_of() -> nn.Cell:
    model = nn.SequentialCell(nn.Dense(4, 6), nn.Tanh(), nn.Dense(6, 4))
    for i, p in enumerate(model.get_parameters()):
        p.set_data(Tensor(np.random.default_rng(i).standard_normal(p.shape).astype(np.float32)))
    return model


def whole(x: Any) -> np.ndarray:
    """The values of a gradient."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).asnumpy()


def train(mesh: Any, at: int) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
    """Return gradients, and shapes of the gradients that hooks saw.

    Args:
        mesh: divides the model by tensor parallelism over ``tp``, and in units over ``dp``; None leaves it whole.
        at: whether hooks are registered before (0), between (1) or after (2) both ways of dividing the model.
    """
    model, seen = model_of(), []
    for i in range(3):
        if i == at:
            for p in model.get_parameters():
                # A norm of this rank's part would be another number.
                p.register_hook(lambda g: None)  # leaves the gradient as it is
                p.register_hook(lambda g: seen.append(tuple(g.shape)) or g / (1 + g.norm()))
        if mesh is not None and i == 0:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if mesh is not None and i == 1:
            fully_shard(model, mesh=mesh["dp"])
    x = Tensor(np.random.default_rng(9).standard_normal((2, 4)).astype(np.float32))
    step = mindspore.value_and_grad if mesh is None else value_and_grad
    _, gradients = step(lambda x: model(x).square().sum(), None, model.trainable_params())(x)
    return [whole(g) for g in gradients], seen


def hooked() -> None:
    mesh = init_device_mesh(mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    wanted, shapes = train(None, 0)
    for at in range(3):
        got, seen = train(mesh, at)
        assert sorted(seen) == sorted(shapes), at
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=f"registered at {at}")


def refused() -> None:
    mesh = init_device_mesh(mesh_shape=(4,))
    for hook, kind, match in (
        (lambda g: g.full_tensor(), TypeError, "must be distributed too, with placements"),
        (lambda g: g.sum(), ValueError, "what a hook returns for the gradient has shape"),
    ):
        model = parallelize_module(model_of(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model[0].weight.register_hook(hook)
        with pytest.raises(kind, match=match):
            value_and_grad(lambda x, m=model: m(x).sum(), None, model.trainable_params())(mindspore.ops.ones((2, 4)))


@pytest.mark.parametrize("job", [hooked, refused], ids=lambda job: job.__name__)
def test_hooks(pool: Any, job: Any) -> None:
    pool.run(4, job)
