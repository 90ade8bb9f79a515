"""Checkpoints of MindSpore's own optimizers and cells, under torch's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import get_platform
from hyper_parallel.checkpoint import load, save
from hyper_parallel.checkpoint.index import read_index
from hyper_parallel.platform.contract import OptimizerState

optim = ms.experimental.optim
#: name -> (makes it, torch's names of its state)
OPTIMIZERS: dict[str, tuple[Any, set[str]]] = {
    "SGD": (lambda p: nn.SGD(p, 0.1, momentum=0.9), {"momentum_buffer"}),
    "Momentum": (lambda p: nn.Momentum(p, 0.1, 0.9), {"momentum_buffer"}),
    "Adam": (lambda p: nn.Adam(p, 0.05), {"exp_avg", "exp_avg_sq"}),
    "Adagrad": (lambda p: nn.Adagrad(p, learning_rate=0.1), {"sum"}),
    "RMSProp": (lambda p: nn.RMSProp(p, 0.05), set()),
    "experimental SGD": (lambda p: optim.SGD(p, 0.1, momentum=0.9), set()),
    "experimental Adam": (lambda p: optim.Adam(p, 0.05), {"exp_avg", "exp_avg_sq"}),
    "groups": (
        lambda p: optim.AdamW([{"params": p[:1], "lr": 0.05}, {"params": p[1:]}], 0.1),
        {"exp_avg", "exp_avg_sq"},
    ),
}


class Net(nn.Cell):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Dense(4, 5), nn.LayerNorm((5,)), nn.Dense(5, 2)
        rng = np.random.default_rng(seed)
        for p in self.get_parameters():
            p.set_data(Tensor(rng.standard_normal(p.shape).astype(np.float32)))

    def construct(self, x: Tensor) -> Tensor:
        return self.last(ops.tanh(self.norm(self.first(x))))


def run(net: Net, optimizer: Any, steps: int) -> list[float]:
    def loss_of(x: Tensor) -> Tensor:
        return net(x).square().mean()

    step = ms.value_and_grad(loss_of, None, list(optimizer.parameters))
    losses = []
    for _ in range(steps):
        loss, grads = step(Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)))
        optimizer(grads)
        losses.append(float(loss.asnumpy()))
    return losses


def job(name: str, seed: int) -> tuple[Net, Any]:
    net = Net(seed)
    return net, OPTIMIZERS[name][0](list(net.trainable_params()))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers(tmp_path: Path, name: str) -> None:
    net, optimizer = job(name, 1)
    run(net, optimizer, 2)
    path = save({"model": net, "optimizer": optimizer}, tmp_path / "job")
    names = {entry.rpartition(".")[2] for entry in read_index(path).tensors if entry.startswith("optimizer.")}
    assert OPTIMIZERS[name][1] <= names
    wanted = run(net, optimizer, 3)
    for before in (0, 1):
        net, optimizer = job(name, 2)
        run(net, optimizer, before)
        load({"model": net, "optimizer": optimizer}, path)
        assert run(net, optimizer, 3) == wanted, before


def test_names(tmp_path: Path) -> None:
    cells = nn.CellList([nn.Embedding(3, 4), nn.LayerNorm((4,)), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Dense(4, 2)])
    index = read_index(save({"model": cells}, tmp_path / "cells"))
    names = {
        "0": ["weight"],
        **dict.fromkeys("134", ["weight", "bias"]),  # noqa: RUF024 - not changed
        "2": ["weight", "bias", "running_mean", "running_var"],
    }
    assert {*index.tensors} == {f"model.{cell}.{name}" for cell, its in names.items() for name in its}


def test_rates_are_those_that_were_saved(tmp_path: Path) -> None:
    """The rates of optimizers of the older kind, and of each group of the newer kind."""
    net = Net(1)
    path = save(nn.SGD(net.trainable_params(), 0.25), tmp_path / "old")
    other = nn.SGD(net.trainable_params(), 0.5)
    load(other, path)
    assert float(other.learning_rate.asnumpy()) == 0.25
    p = list(net.trainable_params())
    path = save(optim.SGD([{"params": p[:1], "lr": 0.25}, {"params": p[1:]}], 0.125), tmp_path / "new")
    newer = optim.SGD([{"params": p[:1]}, {"params": p[1:]}], 0.5)
    load(newer, path)
    assert [float(group["lr"].asnumpy()) for group in newer.param_groups] == [0.25, 0.125]


def test_a_count_that_begins_below_zero() -> None:
    """``mint.optim`` counts from -1: the same number of steps is the same number in a checkpoint."""
    platform, net = get_platform(), Net(1)
    optimizer = mint.optim.AdamW(list(net.trainable_params()), 0.1)
    state = platform.optimizer_state(optimizer)
    assert {row["step"] for row in state.state} == {0.0}
    rows = [{**row, "step": 3.0} for row in state.state]
    platform.set_optimizer_state(optimizer, OptimizerState(state.parameters, state.options, rows))
    assert {row["step"] for row in platform.optimizer_state(optimizer).state} == {3.0}
    old = nn.Adam(net.trainable_params(), 0.1)  # its powers of the betas follow from the step, as torch works them out
    state = platform.optimizer_state(old)
    rows = [{name: x for name, x in row.items() if not name.endswith("_power")} | {"step": 2.0} for row in state.state]
    platform.set_optimizer_state(old, OptimizerState(state.parameters, state.options, rows))
    assert abs(float(old.beta1_power.asnumpy()) - 0.9**2) < 1e-6
