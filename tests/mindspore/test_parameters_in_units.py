"""Cells that walk their parameters in ``construct``, under `fully_shard` and `replicate`: as the single cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    Shard,
    distribute_tensor,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import whole

FEATURES = 6


class Recurrent(nn.Cell):
    def __init__(self, kind: Callable[..., nn.Cell], **options: Any) -> None:
        super().__init__()
        self.layer = kind(FEATURES, 5, batch_first=True, **options)

    def construct(self, x: Any) -> Any:
        return self.layer(x)[0]


class Stepped(nn.Cell):
    """A cell of a recurrent layer, step by step."""

    def __init__(self, kind: Callable[..., nn.Cell]) -> None:
        super().__init__()
        self.layer = kind(FEATURES, 5)

    def construct(self, x: Any) -> Any:
        state = ops.zeros((x.shape[0], 5), x.dtype)
        for i in range(x.shape[1]):
            state = self.layer(x[:, i], state)
        return state


class Walking(nn.Cell):
    """A penalty of the results of ``walk`` on the cell, on top of a layer."""

    def __init__(self, walk: Callable[[nn.Cell], Any]) -> None:
        super().__init__()
        self.first, self.second, self.walk = nn.Dense(FEATURES, 5), nn.Dense(5, 3), walk
        self.frozen = nn.Dense(3, 3)
        for p in self.frozen.get_parameters():
            p.requires_grad = False

    def construct(self, x: Any) -> Any:
        return self.frozen(self.second(ops.tanh(self.first(x)))) + sum(ops.square(p).sum() for p in self.walk(self))


CELLS: dict[str, Callable[[], nn.Cell]] = {
    "GRU alone": lambda: nn.GRU(FEATURES, 5, batch_first=True),
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "RNN": lambda: Recurrent(nn.RNN),
    "GRU, both ways": lambda: Recurrent(nn.GRU, bidirectional=True),
    "LSTM, two layers": lambda: Recurrent(nn.LSTM, num_layers=2),
    "RNN without bias": lambda: Recurrent(nn.RNN, has_bias=False),
    "GRUCell": lambda: Stepped(nn.GRUCell),
    "RNNCell": lambda: Stepped(nn.RNNCell),
    "trainable_params": lambda: Walking(lambda cell: cell.trainable_params()),
    "untrainable_params": lambda: Walking(lambda cell: cell.untrainable_params()),
    "get_parameters": lambda: Walking(lambda cell: cell.get_parameters()),
    "parameters_and_names": lambda: Walking(lambda cell: [p for n, p in cell.parameters_and_names() if "weight" in n]),
    "names": lambda: Walking(lambda cell: [p for p in cell.get_parameters() if p.name.endswith("bias")]),
    "parameters_dict": lambda: Walking(lambda cell: cell.parameters_dict().values()),
    "requires_grad": lambda: Walking(lambda cell: [p for p in cell.get_parameters() if p.requires_grad]),
}
AROUND: dict[str, Callable[[nn.Cell, Any], Any]] = {
    "fully_shard": lambda cell, mesh: fully_shard(cell, mesh=mesh),
    "replicate": lambda cell, mesh: replicate(cell, mesh),
}


def results(make: Callable[[], nn.Cell], around: Callable[[nn.Cell], Any], x: Any) -> list[np.ndarray]:
    """Output, gradients, and parameters after three steps."""
    cell = make()
    rng = np.random.default_rng(0)
    for p in cell.get_parameters():
        p.set_data(Tensor((rng.standard_normal(p.shape) * 0.3).astype(np.float32)))
    around(cell)
    run: Callable[[Any], Any] = (lambda x: cell(x)[0]) if isinstance(cell, nn.GRU) else cell
    found = [whole(run(x))]
    optimizer = nn.SGD(cell.trainable_params(), 0.05)
    for _ in range(3):
        loss, gradients = value_and_grad(lambda x: ops.square(run(x)).sum(), None, cell.trainable_params())(x)
        found += [whole(loss), *map(whole, gradients)]
        optimizer(gradients)
    return [*found, *(whole(p) for p in cell.get_parameters())]


@on_mesh()
def problems(mesh: Any, name: str) -> list[str]:
    found = []
    x = np.random.default_rng(1).standard_normal((5, 3, FEATURES)).astype(np.float32)
    wanted = results(CELLS[name], lambda cell: cell, Tensor(x))
    for around, wrap in AROUND.items():
        for is_distributed in (False, True):
            given = distribute_tensor(Tensor(x), mesh, [Shard(0)]) if is_distributed else Tensor(x)
            got = results(CELLS[name], lambda cell, wrap=wrap: wrap(cell, mesh), given)
            near = [
                a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(got, wanted, strict=True)
            ]
            if not all(near):
                found.append(f"{around}, distributed {is_distributed}: {near}")
    return found


IN_GATE = ("GRU alone", "LSTM", "trainable_params", "names")


@pytest.mark.parametrize("name", in_gate(CELLS, IN_GATE))
def test_cells(pool: Any, name: str) -> None:
    for world in (2, 3):
        assert pool.run(world, problems, name) == [[]] * world


@on_mesh(2, 2, names=("dp", "tp"))
def on_two_dimensions(mesh: Any) -> list[bool]:
    """Parameters that are tensor parallel too: modules find DTensors."""
    x = Tensor(np.random.default_rng(1).standard_normal((4, FEATURES)).astype(np.float32))

    def around(cell: nn.Cell) -> None:
        parallelize_module(cell, mesh["tp"], {"first": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(cell, mesh=mesh["dp"])

    def make() -> nn.Cell:
        return Walking(lambda cell: [p for p in cell.trainable_params() if p.name.startswith("second")])

    pairs = zip(results(make, lambda cell: cell, x), results(make, around, x), strict=True)
    return [bool(np.allclose(a, b, rtol=1e-3, atol=1e-4)) for a, b in pairs]


def test_on_two_dimensions(pool: Any) -> None:
    for near in pool.run(4, on_two_dimensions):
        assert all(near), near
