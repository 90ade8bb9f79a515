"""Recurrent layers and `MultiheadAttention` in plans: what cannot be cut is refused, and whole it is right."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    ContextParallel,
    ExpertParallel,
    HeadNormParallel,
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
from tests.torch.support import device

FEATURES, HIDDEN = 6, 4


class Around(nn.Module):
    """A layer between two linear ones: (batch, sequence, features) -> the same."""

    def __init__(self, layer: nn.Module, out: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.layer, self.down = nn.Linear(FEATURES, HIDDEN), layer, nn.Linear(out, FEATURES)

    def forward(self, x: Any) -> Any:
        return self.down(self.run(self.up(x)))

    def run(self, y: Any) -> Any:
        y, (h, c) = self.layer(y)
        return y + h.sum(0)[:, None].repeat(1, 1, y.shape[-1] // h.shape[-1]) * c[0, 0, 0]


class AroundGru(Around):
    def run(self, y: Any) -> Any:
        first, h = self.layer(y[:, :2])
        return torch.cat([first, self.layer(y[:, 2:], h)[0]], 1)  # states that the layer gave before


class AroundCell(Around):
    def run(self, y: Any) -> Any:
        state, steps = None, []
        for x in y.unbind(1):
            state = self.layer(x, state)
            steps.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(steps, 1)


class AroundAttention(Around):
    def run(self, y: Any) -> Any:
        mask = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool, device=y.device).triu(1)
        y, weights = self.layer(y, y, y, attn_mask=mask)
        return self.layer(y, weights @ y, value=y)[0]


LAYERS: dict[str, Any] = {
    "lstm": lambda: Around(nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True, bidirectional=True), 2 * HIDDEN),
    "gru": lambda: AroundGru(nn.GRU(HIDDEN, HIDDEN, batch_first=True)),
    "lstm cell": lambda: AroundCell(nn.LSTMCell(HIDDEN, HIDDEN)),
    "rnn cell": lambda: AroundCell(nn.RNNCell(HIDDEN, HIDDEN, nonlinearity="relu")),
    "attention": lambda: AroundAttention(nn.MultiheadAttention(HIDDEN, 2, batch_first=True)),
}
WHOLE = ColwiseParallel(output_layouts=Replicate())


@on_mesh(names=("tp",))
def whole(mesh: Any, name: str) -> list[int]:
    """Compare values and gradients, and return the numbers of collectives: without a style, and with one."""
    counts = []
    for plan in (
        {"up": WHOLE},
        {"up": WHOLE, "layer": NoParallel(), "down": ColwiseParallel(output_layouts=Replicate())},
    ):
        found = compare(lambda adapter: LAYERS[name](), plan, floats(2, 5, FEATURES), mesh)
        counts.append(sum(found["forward"].values()))
    if name == "lstm":  # the remedy for SequenceParallel: y is cut along the sequence again
        plan = {"layer": NoParallel(use_local_output=False), "up": WHOLE}
        model = parallelize_module(LAYERS[name](), mesh, plan)
        y, (h, c) = model.layer(torch.ones(2, 5, HIDDEN, device=device()))
        assert [x.placements for x in (y, h, c)] == [(Replicate(),)] * 3
        cut = NoParallel(input_layout=Shard(1), output_layout=Shard(1))
        layer = parallelize_module(nn.LSTM(HIDDEN, HIDDEN, batch_first=True), mesh, cut)
        y, (h, c) = layer(torch.ones(2, 2, HIDDEN, device=device()))
        assert y.shape == (2, 2, HIDDEN) and h.shape == c.shape == (1, 2, HIDDEN)
        zeros = torch.zeros(1, 2, HIDDEN, device=device())
        with pytest.raises(ValueError, match=r"lstm got a plain tensor \(the second operand"):
            layer(torch.ones(2, 2, HIDDEN, device=device()), (zeros, zeros))
    return counts


@pytest.mark.parametrize("name", in_gate(LAYERS, ("lstm", "attention")))
def test_layers_are_whole(name: str, pool: Any) -> None:
    if os.environ["HYPER_PARALLEL_PLATFORM"] == "torch-npu" and name in ("lstm", "gru", "lstm cell"):
        pytest.skip("simulated NPUs have no kernel of this layer")
    for counts in pool.run(2, whole, name):
        assert counts == [1, 2], "the features of `up`, and those of `down`"


@on_mesh(names=("tp",))
def refused(mesh: Any) -> list[str]:
    found = []
    for name, styles in {
        "lstm": [SequenceParallel(), HeadNormParallel(), ExpertParallel(), ContextParallel(), RowwiseParallel()],
        "gru": [ParameterParallel({"weight_hh_l0": Shard(0)}), ColwiseParallel()],
        "lstm cell": [SequenceParallel(sequence_dim=0), ContextParallel(), ColwiseParallel()],
        "attention": [SequenceParallel(), ExpertParallel(), ColwiseParallel()],
    }.items():
        for style in styles:
            with pytest.raises(
                ValueError, match=r"'layer'(, but| is) .*: use NoParallel\(.*in full on every rank"
            ) as error:
                parallelize_module(LAYERS[name](), mesh, {"layer": style})
            found.append(str(error.value))
    model = parallelize_module(LAYERS["lstm"](), mesh, {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"LSTM 'layer' takes 4 features .* features from 'up'") as error:
        model(torch.ones(2, 5, FEATURES, device=device()))
    parallelize_module(LAYERS["lstm cell"](), mesh, {"layer": ParameterParallel({"weight_hh": Shard(0)})})
    return [*found, str(error.value)]


def test_parts_are_refused(pool: Any) -> None:
    first, second = pool.run(2, refused)
    assert first == second
    assert "NoParallel(input_layout=Shard(1), output_layout=Shard(1))" in first[0]
