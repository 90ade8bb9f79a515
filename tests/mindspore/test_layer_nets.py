"""Small nets of `nn` train on shards without gathering: conv nets, recurrent nets, a transformer, layers side by side.
Losses, gradients and running statistics are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    PackedShard,
    Replicate,
    Shard,
    distribute_module,
    distribute_parameter,
    distribute_tensor,
    strict,
)
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.spmd import device_mesh, on_mesh
from tests.mindspore.nets import whole

_FEATURES, _HEADS = 8, 4


def _given(*shape: int) -> Tensor:
    return Tensor(np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32))


class ConvNet(nn.SequentialCell):
    """A network for pictures (batch, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 8, 3, pad_mode="pad", padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2, 2)),
            *(nn.Conv2d(8, 8, 3, pad_mode="pad", padding=1, group=4, has_bias=True), nn.GroupNorm(4, 8), nn.GELU()),
            *(nn.Conv2d(8, 16, 1, has_bias=True), nn.BatchNorm2d(16), nn.AvgPool2d(2, 2), nn.PReLU(16)),
            *(nn.Conv2dTranspose(16, 4, 3, has_bias=True), nn.AdaptiveAvgPool2d((2, 2)), nn.Flatten(), nn.Dense(16, 4)),
        )


class Recurrent(nn.Cell):
    """A network for sequences (batch, 6, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_FEATURES, 5, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(10, 6, batch_first=True)
        self.rnn = nn.RNN(6, 4, batch_first=True)
        self.cell = nn.LSTMCell(4, 3)

    def construct(self, x: Any) -> Any:
        x, (_, last) = self.lstm(x)
        y = self.rnn(self.gru(x)[0])[0]
        return self.cell(y[:, -1], (y[:, 0, :3], y[:, 1, :3]))[0].sum() + last.sum()


class Transformer(nn.Cell):
    """A network for sequences (batch, 6, features)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_FEATURES, _HEADS, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(_FEATURES, _HEADS, batch_first=True)

    def construct(self, x: Any) -> Any:
        y = self.encoder(x)
        return self.attention(y, x, x)[0]


def by_channels(path: str, cell: Any, mesh: Any) -> None:
    """Convolutions by the channels that they give."""
    if isinstance(cell, nn.Conv2d) and cell.group == 1:
        distribute_parameter(cell, "weight", mesh, [Shard(0)])


class Layers(nn.Cell):
    """Layers side by side: each sees the input of its number of dimensions."""

    def __init__(self, *layers: nn.Cell) -> None:
        super().__init__()
        self.layers = nn.CellList(list(layers))

    def construct(self, x: Any) -> Any:
        total = x.sum()
        for layer in self.layers:
            y = layer(x)
            total = total + (y * y).sum() * 0.1
        return total


def _of_pictures() -> Layers:
    return Layers(
        *(nn.MaxPool2d(2, 2, pad_mode="pad", padding=1), nn.AdaptiveMaxPool2d((2, 2)), nn.LRN(), nn.PixelShuffle(2)),
        *(
            nn.Pad(((0, 0), (0, 0), (1, 1), (1, 1))),
            nn.ReflectionPad2d(1),
            nn.ReplicationPad2d(1),
            nn.ConstantPad2d(1, 2.0),
        ),
        *(nn.Upsample(size=(6, 6), mode=mode, align_corners=align) for mode, align in _UPSAMPLING),
    )


_UPSAMPLING = (("nearest", None), ("bilinear", True), ("bicubic", True), ("area", None))


def _of_sequences() -> Layers:
    return Layers(
        *(nn.Conv1d(4, 6, 3, has_bias=True), nn.Conv1dTranspose(4, 6, 3), nn.MaxPool1d(2, 2), nn.AvgPool1d(2, 2)),
        nn.Upsample(size=(6,), mode="linear", align_corners=True),
    )


def _of_volumes() -> Layers:
    return Layers(
        *(nn.Conv3d(4, 6, 2, has_bias=True), nn.Conv3dTranspose(4, 6, 2), nn.MaxPool3d(2, 2), nn.AvgPool3d(2, 2)),
        nn.BatchNorm3d(4),
    )


#: name -> (the net, its input, shape of the mesh, placements of the input, how parameters are distributed)
NETS: dict[str, tuple[Callable[[], nn.Cell], tuple[int, ...], tuple[int, ...], list[Any], Any]] = {
    "conv net, by batch": (ConvNet, (4, 3, 8, 8), (4,), [Shard(0)], None),
    "conv net, uneven": (ConvNet, (5, 3, 8, 8), (2,), [Shard(0)], None),
    "conv net, by channels": (ConvNet, (4, 3, 8, 8), (4,), [Replicate()], by_channels),
    "recurrent net, by batch": (Recurrent, (4, 6, _FEATURES), (4,), [Shard(0)], None),
    "transformer, by batch": (Transformer, (4, 6, _FEATURES), (2,), [Shard(0)], None),
    "pictures, by batch and channels": (_of_pictures, (4, 4, 6, 6), (2, 2), [Shard(0), Shard(1)], None),
    "pictures, with an empty shard": (_of_pictures, (5, 4, 6, 6), (4,), [Shard(0)], None),
    "sequences, by channels": (_of_sequences, (4, 4, 8), (2,), [Shard(1)], None),
    "volumes, by batch and channels": (_of_volumes, (4, 4, 4, 4, 4), (2, 2), [Shard(0), Shard(1)], None),
}


def _made(kind: Callable[[], nn.Cell]) -> nn.Cell:
    net, rng = kind(), np.random.default_rng(0)
    for p in net.get_parameters():
        if "moving" not in p.name:
            p.set_data(Tensor(rng.standard_normal(p.shape).astype(np.float32) * 0.3))
    return net.set_train()


def _trained(net: nn.Cell, x: Any) -> tuple[Any, dict[str, Any]]:
    weights = list(net.trainable_params())

    def loss(x: Any) -> Any:
        y = net(x)
        return (y * y).sum()

    value, (of_x, of_weights) = value_and_grad(loss, 0, weights or None)(x) if weights else _of_input(loss, x)
    return value, {"x": of_x, **{p.name: g for p, g in zip(weights, of_weights, strict=True)}}


def _of_input(loss: Callable, x: Any) -> tuple:
    value, of_x = value_and_grad(loss, 0)(x)
    return value, (of_x, ())


def _close(got: Any, wanted: Any, what: str) -> None:
    got, wanted = whole(got), whole(wanted)
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    assert got.shape == wanted.shape and np.allclose(got, wanted, atol=2e-4 * scale, rtol=1e-3), (
        f"{what}: {got.ravel()[:4]}, wanted {wanted.ravel()[:4]}"
    )


def nets(name: str) -> None:
    kind, shape, sizes, placements, partition = NETS[name]
    mesh = device_mesh(*sizes)
    if mesh is None:
        return
    alone, net = _made(kind), _made(kind)
    wanted, wanted_gradients = _trained(alone, _given(*shape))
    distribute_module(net, mesh, partition)
    with strict():
        loss, gradients = _trained(net, distribute_tensor(_given(*shape), mesh, placements))
    _close(loss, wanted, "loss")
    for path, gradient in wanted_gradients.items():
        assert isinstance(gradients[path], DTensor), path
        _close(gradients[path], gradient, f"gradient by {path}")
    running = {p.name: p for p in alone.get_parameters() if "moving" in p.name}
    for p in net.get_parameters():
        if p.name in running:
            _close(p, running[p.name], p.name)
    alone.set_train(False), net.set_train(False)
    with strict():
        _close(net(distribute_tensor(_given(*shape), mesh, placements)), alone(_given(*shape)), "in evaluation")


@pytest.mark.parametrize("name", NETS)
def test_nets(pool: Any, name: str) -> None:
    pool.run(4, nets, name)


def _attention(**options: Any) -> nn.Cell:
    ms.set_seed(1)
    return nn.MultiheadAttention(_FEATURES, _HEADS, batch_first=True, **options)


def attention_by_heads(path: str, cell: Any, mesh: Any) -> None:
    """Projections in by heads, the one out by its input."""
    if isinstance(cell, nn.MultiheadAttention):
        for name in ("in_proj_weight", "in_proj_bias"):
            if getattr(cell, name) is not None:
                distribute_parameter(cell, name, mesh, [PackedShard(0, (_FEATURES,) * 3)])
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if getattr(cell, name) is not None:
                distribute_parameter(cell, name, mesh, [Shard(0)])
        distribute_parameter(cell.out_proj, "weight", mesh, [Shard(1)])


@on_mesh()
def heads(mesh: Any) -> set[str]:
    """Values, weights and gradients of attention by heads; which calls gather."""
    x, other = _given(4, 6, _FEATURES), _given(4, 5, _FEATURES)
    padding = np.zeros((4, 5), bool)
    padding[:, 4:] = True
    calls: dict[str, tuple[dict, Callable]] = {
        "of itself": ({}, lambda cell, x, other, mask: cell(x, x, x)),
        "of another": ({}, lambda cell, x, other, mask: cell(x, other, other * 2, average_attn_weights=False)),
        "padded": ({"has_bias": False}, lambda cell, x, other, mask: cell(x, other, other, key_padding_mask=mask)),
        "of other sizes": (
            {"kdim": 4, "vdim": 4},
            lambda cell, x, other, mask: cell(x, other[..., :4], other[..., 4:]),
        ),
        "masked": ({}, lambda cell, x, other, mask: cell(x, other, other, attn_mask=x[0, :, :5] * 2)),
        "one more": (
            {"add_zero_attn": True},
            lambda cell, x, other, mask: cell(x, other, other, key_padding_mask=mask),
        ),
        "biased": ({"add_bias_kv": True}, lambda cell, x, other, mask: cell(x, x, x)),
    }
    gathering = set()
    for name, (options, call) in calls.items():
        alone, cell = _attention(**options), distribute_module(_attention(**options), mesh, attention_by_heads)
        plain = (x, other, Tensor(padding))
        given = tuple(distribute_tensor(t, mesh) for t in plain)

        def loss(net: Any, tensors: tuple, call: Callable = call) -> Any:
            y, weights = call(net, *tensors)
            return (y * y).sum() + (weights * weights).sum()

        with CommDebugMode() as mode:
            got = call(cell, *given)
        if mode.get_comm_counts().get("all_gather"):
            gathering.add(name)
        for mine, theirs in zip(got, call(alone, *plain), strict=True):
            _close(mine, theirs, name)
        _, wanted = ms.value_and_grad(loss, None, tuple(alone.trainable_params()))(alone, plain)
        _, found = value_and_grad(loss, None, tuple(cell.trainable_params()))(cell, given)
        for mine, theirs, p in zip(found, wanted, alone.trainable_params(), strict=True):
            _close(mine, theirs, f"{name}: {p.name}")
    return gathering


def test_attention_by_heads(pool: Any) -> None:
    """MindSpore's own attention function, with heads and samples in one dimension, gathers."""
    assert pool.run(2, heads) == [{"biased"}] * 2


@on_mesh()
def convolutions_cost_nothing(mesh: Any) -> dict[str, dict]:
    """Collectives of a layer and its gradients. Sharded by batch, only the weight's gradient is summed, and the means
    of a batch norm in both passes. Sharded by input channels, the result is a partial sum."""
    counts = {}
    x, w = _given(4, 4, 6, 6), Tensor(np.ones((8, 4, 3, 3), np.float32))

    def put(x: Tensor, placement: Any) -> Any:
        return distribute_tensor(x, mesh, [placement])

    norm = [put(Tensor(np.full(4, v, np.float32)), Replicate()) for v in (1, 0, 0, 1)]
    cases: dict[str, tuple[Callable, tuple]] = {
        "conv by batch": (ops.conv2d, (put(x, Shard(0)), put(w, Replicate()))),
        "conv by channels out": (ops.conv2d, (put(x, Replicate()), put(w, Shard(0)))),
        "conv by channels in": (ops.conv2d, (put(x, Shard(1)), put(w, Shard(1)))),
        "pool by channels": (lambda x: ops.max_pool2d(x, 2, 2), (put(x, Shard(1)),)),
        "batch norm by batch": (
            lambda x, weight, bias: ops.batch_norm(x, *norm[2:], weight, bias, True),
            (put(x, Shard(0)), *norm[:2]),
        ),
    }
    for name, (function, operands) in cases.items():
        with strict(), CommDebugMode() as mode:
            _, pull = _pulled(function, operands)
            forward = dict(mode.get_comm_counts())
        with CommDebugMode() as mode:
            pull()
        counts[name] = {"forward": forward, "both": dict(mode.get_comm_counts())}
    return counts


def _pulled(function: Callable, operands: tuple) -> tuple[Any, Callable]:
    """The result, and a function that computes it again with all gradients, by a cotangent of ones."""

    def run() -> Any:
        return ms.value_and_grad(lambda *xs: function(*xs).to_local().sum(), tuple(range(len(operands))))(*operands)

    return function(*operands), run


def test_convolutions_cost_nothing(pool: Any) -> None:
    for counts in pool.run(4, convolutions_cost_nothing):
        assert counts == {
            "conv by batch": {"forward": {}, "both": {"all_reduce": 1}},
            "conv by channels out": {"forward": {}, "both": {"all_reduce": 1}},
            "conv by channels in": {"forward": {}, "both": {}},
            "pool by channels": {"forward": {}, "both": {}},
            "batch norm by batch": {"forward": {"all_reduce": 2}, "both": {"all_reduce": 6}},
        }
