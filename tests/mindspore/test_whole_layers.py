"""Recurrent layers and `MultiheadAttention` in plans: what cannot be cut is refused, and whole it is right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import (
    ColwiseParallel,
    ContextParallel,
    ExpertParallel,
    NoParallel,
    ParameterParallel,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    parallelize_module,
)
from hyper_parallel.testing.comparisons import compare, floats
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import on_mesh

FEATURES, HIDDEN = 6, 4


class Around(nn.Cell):
    """A layer between two linear ones: (batch, sequence, features) -> the same."""

    def __init__(self, layer: nn.Cell, out: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.layer, self.down = nn.Dense(FEATURES, HIDDEN), layer, nn.Dense(out, FEATURES)

    def construct(self, x: Any) -> Any:
        return self.down(self.run(self.up(x)))

    def run(self, y: Any) -> Any:
        y, (_, c) = self.layer(y)
        return y * c[0, 0, 0]


class AroundGru(Around):
    def run(self, y: Any) -> Any:
        first, h = self.layer(y[:, :2])
        return mint.cat([first, self.layer(y[:, 2:], h)[0]], 1)  # states that the layer gave before


class AroundCell(Around):
    def run(self, y: Any) -> Any:
        state, steps = None, []
        for i in range(y.shape[1]):
            zeros = mint.zeros((y.shape[0], HIDDEN))
            state = self.layer(y[:, i], (zeros, zeros) if state is None else state)
            steps.append(state[0])
        return ops.stack(steps, 1)


class AroundAttention(Around):
    def run(self, y: Any) -> Any:
        y, weights = self.layer(y, y, y)
        return self.layer(y, mint.matmul(weights, y), y)[0]


LAYERS: dict[str, Any] = {
    "lstm": lambda: Around(nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True, bidirectional=True), 2 * HIDDEN),
    "gru": lambda: AroundGru(nn.GRU(HIDDEN, HIDDEN, batch_first=True)),
    "lstm cell": lambda: AroundCell(nn.LSTMCell(HIDDEN, HIDDEN)),
    "attention": lambda: AroundAttention(nn.MultiheadAttention(HIDDEN, 2, batch_first=True)),
}
WHOLE = ColwiseParallel(output_layouts=Replicate())


@on_mesh(names=("tp",))
def whole(mesh: Any, name: str) -> list[int]:
    """Compare values and gradients, and return the numbers of collectives: without a style, and with one."""
    counts = []
    for plan in ({"up": WHOLE}, {"up": WHOLE, "layer": NoParallel(), "down": WHOLE}):
        found = compare(lambda adapter: LAYERS[name](), plan, floats(2, 5, FEATURES), mesh)
        counts.append(sum(found["forward"].values()))
    if name == "lstm":  # the remedy for SequenceParallel: y is cut along the sequence again
        cut = NoParallel(input_layout=Shard(1), output_layout=Shard(1))
        layer = parallelize_module(nn.LSTM(HIDDEN, HIDDEN, batch_first=True), mesh, cut)
        y, (h, c) = layer(Tensor(np.ones((2, 2, HIDDEN), np.float32)))
        assert y.shape == (2, 2, HIDDEN) and h.shape == c.shape == (1, 2, HIDDEN)
    return counts


@pytest.mark.parametrize("name", in_gate(LAYERS, ("lstm", "attention")))
def test_layers_are_whole(name: str, pool: Any) -> None:
    for counts in pool.run(2, whole, name):
        assert counts == [1, 2], "the features of `up`, and those of `down`"


@on_mesh(names=("tp",))
def refused(mesh: Any) -> list[str]:
    found = []
    for name, path, style in (
        ("lstm", "layer", SequenceParallel()),
        ("lstm", "layer", ContextParallel()),
        ("lstm", "layer", RowwiseParallel()),
        ("lstm", "layer.rnn", ColwiseParallel()),
        ("gru", "layer", ParameterParallel({"weight_hh_l0": Shard(0)})),
        ("lstm cell", "layer", ColwiseParallel()),
        ("attention", "layer", SequenceParallel()),
        ("attention", "layer", ExpertParallel()),
    ):
        words = r"'layer.*: ((give|use) (\S+ )?)?NoParallel\(.*in full on every rank"
        with pytest.raises(ValueError, match=words) as error:
            parallelize_module(LAYERS[name](), mesh, {path: style})
        found.append(str(error.value))
    model = parallelize_module(LAYERS["lstm"](), mesh, {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"LSTM 'layer' takes 4 features .* features from 'up'"):
        model(Tensor(floats(2, 5, FEATURES)))
    return found


def test_parts_are_refused(pool: Any) -> None:
    first, second = pool.run(2, refused)
    assert first == second
    assert "NoParallel(input_layout=Shard(1), output_layout=Shard(1))" in first[0]
