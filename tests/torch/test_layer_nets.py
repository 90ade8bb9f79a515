"""Small nets of `torch.nn` train on shards without gathering: a conv net, a vision transformer, recurrent nets,
`nn.TransformerEncoder`. Losses, gradients and running statistics are those of one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    PackedShard,
    Replicate,
    Shard,
    distribute_module,
    distribute_parameter,
    strict,
)
from hyper_parallel.testing.spmd import device_mesh, on_mesh
from tests.torch.support import close, device, full, randn, shard
from tests.torch.test_layers import ON_NPU, without_npu

_FEATURES, _HEADS = 8, 4


class ConvNet(nn.Sequential):
    """A network for pictures (batch, 3, 8, 8)."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(4, 8), nn.GELU(), nn.Dropout2d(0.2)),
            *(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16, momentum=None), nn.SiLU(), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 4)),
        )


class VisionTransformer(nn.Module):
    """A network for pictures (batch, 3, 8, 8), in patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, _FEATURES, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, _FEATURES))
        self.positions = nn.Parameter(torch.randn(1, 5, _FEATURES))
        layer = nn.TransformerEncoderLayer(
            _FEATURES, _HEADS, 16, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(_FEATURES), enable_nested_tensor=False)
        self.head = nn.Linear(_FEATURES, 4)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Encoder(nn.Module):
    """An encoder for sequences (batch, 6, features), whose last elements are padding, each element seeing those before
    it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_FEATURES, _HEADS, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))
        self.register_buffer("padding", torch.arange(6).expand(4, -1) >= torch.tensor([[6], [4], [5], [6]]))

    def forward(self, x: Any) -> Any:
        return self.encoder(x, mask=self.mask, src_key_padding_mask=self.padding, is_causal=True)


class Recurrent(nn.Module):
    """A network for tokens (batch, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, _FEATURES)
        self.lstm = nn.LSTM(_FEATURES, 5, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(10, 6)
        self.rnn = nn.RNN(6, 4, nonlinearity="relu")
        self.head = nn.Linear(4, 4)

    def forward(self, ids: Any) -> Any:
        # Torch makes the first states of a size, without asking the input where it is.
        x = self.embedding(ids)
        x, _ = self.lstm(x, tuple(_states(x, 4, ids.shape[0], 5) for _ in range(2)))
        x, _ = self.gru(x.transpose(0, 1), _states(x, 1, ids.shape[0], 6))
        x, _ = self.rnn(x, _states(x, 1, ids.shape[0], 4))
        return self.head(x[-1])


def _states(x: Any, *sizes: int) -> Any:
    return x.new_zeros(sizes)


class Attention(nn.Module):
    """`nn.MultiheadAttention` that reads another sequence, with weights, for heads one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(_FEATURES, _HEADS, dropout=0.2, add_bias_kv=True, add_zero_attn=True)
        self.other = nn.MultiheadAttention(_FEATURES, _HEADS, kdim=8, vdim=4, bias=False, batch_first=True)
        self.mask = nn.Parameter(torch.randn(4 * _HEADS, 6, 6))

    def forward(self, x: Any) -> Any:
        y, weights = self.attention(x, x * 2, x * 2, average_attn_weights=False, attn_mask=self.mask.transpose(1, 2))
        alone, mean = self.other(x[0], x[0], x[0][:, :4])
        return y.sum(0) + weights.sum((1, 2))[..., :_FEATURES].sum() + alone.sum() + mean.sum()


def by_heads(path: str, module: Any, mesh: Any) -> None:
    """Attention by heads, and the layers between by features, over the last mesh dimension."""

    def put(module: Any, name: str, placement: Any) -> None:
        if getattr(module, name, None) is not None:
            distribute_parameter(module, name, mesh, [*[Replicate()] * (mesh.ndim - 1), placement])

    if isinstance(module, nn.MultiheadAttention):
        packed = PackedShard(0, (_FEATURES,) * 3)
        put(module, "in_proj_weight", packed)
        put(module, "in_proj_bias", packed)
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            put(module, name, Shard(0))
        put(module.out_proj, "weight", Shard(1))
    elif isinstance(module, nn.TransformerEncoderLayer):
        put(module.linear1, "weight", Shard(0))
        put(module.linear1, "bias", Shard(0))
        put(module.linear2, "weight", Shard(1))
    elif isinstance(module, nn.Conv2d) and module.groups == 1:
        put(module, "weight", Shard(0))
        put(module, "bias", Shard(0))


def _pictures() -> torch.Tensor:
    return randn(4, 3, 8, 8)


def _sequences() -> torch.Tensor:
    return randn(4, 6, _FEATURES)


def _tokens() -> torch.Tensor:
    return (torch.arange(24, device=device()).reshape(4, 6) * 7) % 10


#: name -> (the net, its input, shape of the mesh, placements of the input, how parameters are distributed)
NETS: dict[str, tuple[type[nn.Module], Callable[[], torch.Tensor], tuple[int, ...], list[Any], Any]] = {
    "conv net, by batch": (ConvNet, _pictures, (4,), [Shard(0)], None),
    "conv net, by channels": (ConvNet, _pictures, (4,), [Replicate()], by_heads),
    "vision transformer, by batch": (VisionTransformer, _pictures, (4,), [Shard(0)], None),
    "vision transformer, by batch and heads": (VisionTransformer, _pictures, (2, 2), [Shard(0), Replicate()], by_heads),
    "encoder, by batch": (Encoder, _sequences, (2,), [Shard(0)], None),
    "encoder, by heads": (Encoder, _sequences, (4,), [Replicate()], by_heads),
    "recurrent net, by batch": (Recurrent, _tokens, (4,), [Shard(0)], None),
    "attention, by batch": (Attention, lambda: randn(6, 4, _FEATURES), (2,), [Shard(1)], None),
    "attention, by heads": (Attention, lambda: randn(6, 4, _FEATURES), (4,), [Replicate()], by_heads),
}


def trained(net: nn.Module, x: Any) -> Any:
    torch.manual_seed(1)
    loss = net(x).square().mean()
    loss.backward()
    return loss


def nets(name: str) -> None:
    kind, given, shape, placements, partition = NETS[name]
    mesh = device_mesh(*shape)
    if mesh is None:
        return
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    alone = kind().to(device())
    torch.manual_seed(0)
    net = distribute_module(kind().to(device()), mesh, partition)
    wanted = trained(alone, given())
    with strict():
        loss = trained(net, shard(given(), mesh, *placements))
    close(loss, wanted, f"{name}: loss")
    gradients = {path: p.grad for path, p in net.named_parameters()}
    for path, p in alone.named_parameters():
        assert isinstance(gradients[path], DTensor), path
        close(gradients[path], p.grad, f"{name}: gradient by {path}", tolerance=1e-4)
    buffers = dict(net.named_buffers())
    for path, b in alone.named_buffers():
        close(buffers[path], b, f"{name}: {path}")
    alone.eval(), net.eval()
    with torch.no_grad(), strict():
        close(net(shard(given(), mesh, *placements)), alone(given()), f"{name} in evaluation", tolerance=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[without_npu] if "recurrent" in name else []) for name in NETS]
)
def test_nets(pool: Any, name: str) -> None:
    pool.run(4, nets, name)


@on_mesh()
def heads_cost_a_sum(mesh: Any) -> None:
    """Attention costs as much as a column-parallel and a row-parallel layer: one all-reduce forward, one backward."""
    torch.manual_seed(0)
    attention = distribute_module(nn.MultiheadAttention(_FEATURES, _HEADS).to(device()), mesh, by_heads)
    x = shard(randn(6, 4, _FEATURES), mesh, Replicate()).requires_grad_()
    with CommDebugMode() as mode:
        y = attention(x, x, x, need_weights=False)[0].redistribute(placements=[Replicate()])
    assert mode.get_comm_counts() == {"all_reduce": 1}
    cotangent = shard(torch.ones(6, 4, _FEATURES, device=device()), mesh, Replicate())
    with CommDebugMode() as mode:
        y.backward(cotangent)
    assert mode.get_comm_counts() == {"all_reduce": 1}


def test_heads_cost_a_sum(pool: Any) -> None:
    pool.run(4, heads_cost_a_sum)


@on_mesh()
def samples_of_padding(mesh: Any) -> None:
    """A sample that is all padding, with dropout: zeros without weights, and NaN with weights, as on one device."""
    x, some = randn(3, 6, _FEATURES), randn(6, 6, seed=1)
    padding = torch.arange(6, device=device()) >= torch.tensor([[6], [0], [4]], device=device())
    causal = torch.ones(6, 6, dtype=torch.bool, device=device()).triu(1)
    options: list[dict[str, Any]] = [
        {"key_padding_mask": padding},
        {"key_padding_mask": padding, "attn_mask": some},
        {"attn_mask": causal | (torch.arange(6, device=device()) < 2)},  # the first two queries see no key
        {"attn_mask": causal, "is_causal": True},
    ]
    for given in options:
        for weights in (False, True):
            found = []
            for partition in (None, by_heads):
                torch.manual_seed(0)
                attention = nn.MultiheadAttention(_FEATURES, _HEADS, dropout=0.3, batch_first=True).to(device())
                inputs = x.clone().requires_grad_()
                masks = dict(given)
                if partition is not None:
                    attention = distribute_module(attention, mesh, partition)
                    inputs = shard(x, mesh, Replicate()).requires_grad_()
                    masks = {k: shard(m, mesh, Replicate()) if k != "is_causal" else m for k, m in given.items()}
                torch.manual_seed(1)
                y, _ = attention(inputs, inputs, inputs, need_weights=weights, **masks)
                y.square().sum().backward()
                found.append([full(x) for x in (y, inputs.grad, *(p.grad for p in attention.parameters()))])
            assert found[0][0].isnan().any() == (weights and "is_causal" not in given)
            found = [[x.nan_to_num(7.0) for x in xs] for xs in found]
            for wanted, got in zip(*found, strict=True):
                close(got, wanted, f"{list(given)} {weights}", tolerance=1e-4)


def test_samples_of_padding(pool: Any) -> None:
    pool.run(4, samples_of_padding)


# ------------------------------------------------------------------------------------------------ cells
#: kind of cell -> number of its gates.
CELLS: dict[type[nn.RNNCellBase], int] = {nn.LSTMCell: 4, nn.GRUCell: 3, nn.RNNCell: 1}
if ON_NPU:  # where the simulation has no kernels of the others
    CELLS = {nn.RNNCell: 1}


@on_mesh()
def cells_with_sharded_units(mesh: Any) -> None:
    for kind, gates in CELLS.items():
        for relu in (False, True) if kind is nn.RNNCell else (None,):
            options = {} if relu is None else {"nonlinearity": "relu" if relu else "tanh"}
            torch.manual_seed(0)
            alone = kind(8, 4, **options).to(device())
            torch.manual_seed(0)
            cell = kind(8, 4, **options).to(device())
            for name, _ in list(cell.named_parameters()):
                distribute_parameter(cell, name, mesh, [PackedShard(0, (4,) * gates) if gates > 1 else Shard(0)])
            x, h, c = randn(3, 8), randn(3, 4, seed=1), randn(3, 4, seed=2)
            wanted, got = alone(x, _of(kind, h, c)), None
            with strict():
                got = cell(shard(x, mesh, Replicate()), _of(kind, *(shard(t, mesh, Shard(1)) for t in (h, c))))
            wanted, got = (y if isinstance(y, tuple) else (y,) for y in (wanted, got))
            for one, other in zip(got, wanted, strict=True):
                assert one.placements == (Shard(1),)
                close(one, other, kind.__name__)
            sum(y.square().sum() for y in wanted).backward()
            sum(y.square().sum() for y in got).backward()
            for (name, one), other in zip(cell.named_parameters(), alone.parameters(), strict=True):
                close(one.grad, other.grad, f"{kind.__name__}: {name}", tolerance=1e-4)


def _of(kind: type, h: Any, c: Any) -> Any:
    return (h, c) if kind is nn.LSTMCell else h


def test_cells_with_sharded_units(pool: Any) -> None:
    pool.run(2, cells_with_sharded_units)


# ------------------------------------------------------------------------------------------------ other ways
@on_mesh()
def other_ways(mesh: Any) -> None:
    """Calls that a layer does not serve itself are right still, or name the remedy."""
    x = shard(randn(4, 6), mesh, Shard(0))
    weight, ids = shard(randn(7, 6), mesh, Shard(0)), shard(torch.zeros(4, 2, dtype=torch.int64), mesh, Shard(0))
    for call, words in (
        (lambda: F.alpha_dropout(x, 0.3, True, inplace=True), "use inplace=False"),
        (lambda: F.embedding_bag(ids, weight, max_norm=1.0), "max_norm"),
    ):
        with pytest.raises(TypeError, match=words):
            call()
    for call, words in (
        (lambda: F.alpha_dropout(x, 1.5, True), "between 0 and 1"),
        (lambda: F.margin_ranking_loss(x, x, x, reduction="middle"), "not a valid value"),
        (lambda: F.triplet_margin_loss(x, x, x, margin=-1.0), "greater than 0"),
        (lambda: F.gaussian_nll_loss(x, x, -1.0), "negative"),
        (lambda: F.gaussian_nll_loss(x, x, x[:3].abs()), "incorrect size"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(RuntimeError, match="same dimension"):
        F.margin_ranking_loss(x, x, x[0])
    with pytest.raises(NotImplementedError, match="mode='sum'"):
        F.embedding_bag(ids, weight, mode="mean", per_sample_weights=shard(randn(4, 2), mesh, Shard(0)))


#: name -> (call, tensors): calls that a layer leaves to gathered operands, or torch to refuse.
GATHERED: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rrelu in training": (lambda x: F.rrelu(x, training=True), [(4, 6)]),
    "a deprecated word": (lambda x, y: F.margin_ranking_loss(x, y, y, size_average=False), [(4, 6)] * 2),
    "normalize with out=": (lambda x, y: F.normalize(x.detach(), out=y.detach()), [(4, 6)] * 2),
    "one sample of a cosine embedding": (lambda x, y: F.cosine_embedding_loss(x, y, (x[0] * 0 + 1).sum()), [(6,)] * 2),
    "a batch norm of one running statistic": (lambda x, m: F.instance_norm(x, m, None), [(4, 6, 3), (6,)]),
    "alpha_dropout of an input by name": (lambda x: torch.alpha_dropout(input=x, p=0.0, train=True), [(4, 6)]),
    "a pool by name": (lambda x: F.avg_pool1d(input=x, kernel_size=2), [(4, 6)]),
    "a similarity of shapes that do not fit": (lambda x, y: F.cosine_similarity(x, y), [(4, 6), (3, 6)]),
    "a cell by name": (lambda x, h, w, v: torch.rnn_tanh_cell(x, h, w_ih=w, w_hh=v), [(4, 3), (4, 3), (3, 3), (3, 3)]),
    "bags with gradients by frequency": (
        lambda w: F.embedding_bag((w[:2] * 0).long(), w, scale_grad_by_freq=True),
        [(5, 3)],
    ),
    "targets of a CTC in a row": (
        lambda x: F.ctc_loss(x.log_softmax(2), (x[0, :, 0] * 0 + 1).long(), (4, 4), (1, 1)),
        [(4, 2, 5)],
    ),
}


@on_mesh()
def gathered(mesh: Any) -> None:
    warnings.simplefilter("ignore")
    for name, (call, shapes) in GATHERED.items():
        plain = [randn(*shape, seed=i) for i, shape in enumerate(shapes)]
        torch.manual_seed(0)
        try:
            wanted: Any = call(*plain)
        except Exception as error:
            with pytest.raises(type(error)):
                call(*(shard(x, mesh, Shard(0)) for x in plain))
            continue
        torch.manual_seed(0)
        close(call(*(shard(x, mesh, Shard(0)) for x in plain)), wanted, name)


@on_mesh()
def sequences_of_several_lengths(mesh: Any) -> None:
    """Packed sequences, and noise between layers, are gathered."""
    torch.manual_seed(0)
    alone = nn.LSTM(4, 3, 2, dropout=0.5).to(device())
    torch.manual_seed(0)
    lstm = distribute_module(nn.LSTM(4, 3, 2, dropout=0.5).to(device()), mesh)
    x, states = randn(5, 2, 4), randn(2, 2, 3, seed=1)
    torch.manual_seed(0)
    wanted, _ = alone(x, (states, states))
    torch.manual_seed(0)
    given = shard(states, mesh, Shard(1))
    got, _ = lstm(shard(x, mesh, Shard(1)), (given, given))
    close(got, wanted)


@on_mesh()
def halves_and_plain_statistics(mesh: Any) -> None:
    """Sixteen bits are averaged in thirty-two; running statistics that stayed plain are written on every rank."""
    x = randn(4, 3, 2)
    mean, var = torch.zeros(3, device=device()), torch.ones(3, device=device())
    plain, other = mean.clone(), var.clone()
    wanted = F.batch_norm(x.bfloat16().float(), plain, other, training=True)
    got = F.batch_norm(shard(x.bfloat16(), mesh, Shard(0)), mean, var, training=True)
    assert got.dtype is torch.bfloat16
    close(got.float(), wanted, tolerance=2e-2)
    close(mean, plain)
    close(var, other, tolerance=1e-4)


def test_gathered(pool: Any) -> None:
    pool.run(2, gathered)
    pool.run(2, halves_and_plain_statistics)


@without_npu
def test_sequences_of_several_lengths(pool: Any) -> None:
    pool.run(2, sequences_of_several_lengths)


def test_other_ways(pool: Any) -> None:
    pool.run(2, other_ways)
