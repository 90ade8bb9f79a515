"""Optimizers on distributed parameters: the same bits as on plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from hyper_parallel import DTensor, distribute_tensor
from tests.mindspore.nets import error_of, loss_of, make_net, rows_of, whole
from tests.support.spmd import on_mesh

OPTIMIZERS: dict[str, Callable[[list], Any]] = {
    "SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
    "Adam": lambda p: nn.Adam(p, 0.01),
    "groups": lambda p: nn.Adam([{"params": p[:3], "weight_decay": 0.01}, {"params": p[3:], "lr": 0.02}], 0.01),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01),
    "Adagrad": lambda p: nn.Adagrad(p, 0.1),
    "RMSProp": lambda p: nn.RMSProp(p, 0.01),
    "experimental AdamW": lambda p: ms.experimental.optim.AdamW(p, 0.01),
    "experimental SGD": lambda p: ms.experimental.optim.SGD(p, 0.1, momentum=0.9),
    "experimental Adam": lambda p: ms.experimental.optim.Adam(p, 0.01),
}


@on_mesh()
def steps(mesh: Any, name: str, plain_gradients: bool) -> list[bool]:
    reference, net = make_net(), make_net(mesh)
    started = [whole(p).copy() for p in reference.get_parameters()]
    params, wanted_params = list(net.trainable_params()), list(reference.trainable_params())
    optimizer, wanted_optimizer = OPTIMIZERS[name](params), OPTIMIZERS[name](wanted_params)
    for _ in range(3):
        gradients = ms.grad(loss_of(reference), None, reference.trainable_params())()
        parts = []
        for p, g in zip(params, gradients, strict=True):
            if not isinstance(p, DTensor):
                parts.append(g)
            elif plain_gradients:
                parts.append(rows_of(g.asnumpy(), p._layout))
            else:
                parts.append(distribute_tensor(g, mesh, p.placements))
        wanted_optimizer(gradients)
        optimizer(tuple(parts))
    moments = [p for p in optimizer.get_parameters() if p.name.endswith("up.weight")]
    return [
        all(np.array_equal(whole(p), whole(q)) for p, q in zip(params, wanted_params, strict=True)),
        any(not np.array_equal(whole(p), old) for p, old in zip(reference.get_parameters(), started, strict=True)),
        all(isinstance(m, DTensor) and m.shape == (16, 8) for m in moments),
    ]


@pytest.mark.parametrize("plain_gradients", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(pool: Any, name: str, plain_gradients: bool) -> None:
    assert pool.run(2, steps, name, plain_gradients) == [[True] * 3] * 2


@on_mesh()
def needs_whole_parameters(mesh: Any) -> str:
    net = make_net(mesh)
    optimizer = nn.AdaFactor(net.trainable_params(), 0.01, scale_parameter=False, relative_step=False)
    return error_of(optimizer, ms.grad(loss_of(net), None, net.trainable_params())())


def test_optimizers_with_norms_are_refused(pool: Any) -> None:
    for error in pool.run(2, needs_whole_parameters):
        assert error.startswith("TypeError: AdaFactor needs whole parameters")
