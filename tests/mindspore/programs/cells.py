"""Programs that differ in their cells."""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from hyper_parallel import ColwiseParallel, NoParallel, Replicate, RowwiseParallel, SequenceParallel, Shard
from tests.mindspore.programs.program import SAMPLES, Program

__all__ = ["CLASSES", "FEATURES", "HIDDEN", "LENGTH", "PROGRAMS", "classified", "mlp", "mlp_plan", "pairs"]

FEATURES, HIDDEN, CLASSES, LENGTH, VOCABULARY, HEAD = 6, 8, 4, 5, 12, 4


# ---------------------------------------------------------------------- batches
def classified(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Features (samples, features), and classes."""
    x = rng.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    return x, rng.integers(0, CLASSES, SAMPLES).astype(np.int32)


def pairs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Features, and as many numbers as there are classes."""
    x = rng.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    return x, rng.standard_normal((SAMPLES, CLASSES)).astype(np.float32)


def sequences(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = rng.standard_normal((SAMPLES, LENGTH, HIDDEN)).astype(np.float32)
    return x, rng.integers(0, CLASSES, SAMPLES).astype(np.int32)


def even_sequences(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sequences that two ranks can share evenly, as plain parts of a sequence have to be."""
    x, targets = sequences(rng)
    return np.ascontiguousarray(x[:, :4]), targets


def tokens(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    ids = rng.integers(0, VOCABULARY, (SAMPLES, LENGTH)).astype(np.int32)
    return ids, rng.integers(0, VOCABULARY, (SAMPLES, LENGTH)).astype(np.int32)


def sentences(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    ids = rng.integers(0, VOCABULARY, (SAMPLES, LENGTH)).astype(np.int32)
    return ids, rng.integers(0, CLASSES, SAMPLES).astype(np.int32)


def pictures(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    x = rng.standard_normal((SAMPLES, 3, 8, 8)).astype(np.float32)
    return x, rng.integers(0, CLASSES, SAMPLES).astype(np.int32)


# ---------------------------------------------------------------------- layers
def mlp(features: int = FEATURES, classes: int = CLASSES) -> nn.Cell:
    return nn.SequentialCell(nn.Dense(features, HIDDEN), nn.ReLU(), nn.Dense(HIDDEN, classes))


def mlp_plan(path: str = "_backbone") -> dict[str, Any]:
    return {f"{path}.0": ColwiseParallel(), f"{path}.2": RowwiseParallel()}


def scored(backbone: nn.Cell) -> nn.Cell:
    """A backbone with the loss of its classes."""
    return nn.WithLossCell(backbone, nn.CrossEntropyLoss())


class FeedForward(nn.Cell):
    def __init__(self, width: int = HIDDEN, hidden: int = 2 * HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(width, hidden), nn.Dense(hidden, width)

    def construct(self, x: Any) -> Any:
        return self.down(ops.gelu(self.up(x)))


class Gated(nn.Cell):
    def __init__(self, width: int = HIDDEN, hidden: int = 2 * HIDDEN) -> None:
        super().__init__()
        self.gate = nn.Dense(width, hidden, has_bias=False)
        self.up, self.down = nn.Dense(width, hidden, has_bias=False), nn.Dense(hidden, width, has_bias=False)

    def construct(self, x: Any) -> Any:
        return self.down(ops.silu(self.gate(x)) * self.up(x))


class RmsNorm(nn.Cell):
    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(width, np.float32)), name="weight")

    def construct(self, x: Any) -> Any:
        return x * ops.rsqrt(ops.square(x).mean(-1, True) + 1e-5) * self.weight


class Attention(nn.Cell):
    """Causal, with rotary positions where asked for, and fewer heads of keys and values."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, is_rotary: bool = True) -> None:
        super().__init__()
        self.q = nn.Dense(HIDDEN, heads * HEAD, has_bias=False)
        self.k = nn.Dense(HIDDEN, kv_heads * HEAD, has_bias=False)
        self.v = nn.Dense(HIDDEN, kv_heads * HEAD, has_bias=False)
        self.o = nn.Dense(heads * HEAD, HIDDEN, has_bias=False)
        angles = np.arange(LENGTH)[:, None] * np.array([1.0, 0.1])[None]
        self.cos = Tensor(np.cos(angles).astype(np.float32))
        self.sin = Tensor(np.sin(angles).astype(np.float32))
        self.mask = Tensor(np.triu(np.ones((LENGTH, LENGTH), bool), 1))
        self.is_rotary, self.shared = is_rotary, heads // kv_heads

    def rotated(self, x: Any) -> Any:
        if not self.is_rotary:
            return x
        first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return ops.cat((first * self.cos - second * self.sin, first * self.sin + second * self.cos), -1)

    def construct(self, x: Any) -> Any:
        batch = x.shape[0]
        q, k, v = (y.reshape(batch, LENGTH, -1, HEAD).transpose(0, 2, 1, 3) for y in (self.q(x), self.k(x), self.v(x)))
        q, k = self.rotated(q), self.rotated(k)
        k, v = (ops.repeat_interleave(y, self.shared, 1) if self.shared > 1 else y for y in (k, v))
        scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) / math.sqrt(HEAD)
        weights = ops.softmax(scores.masked_fill(self.mask, -1e9), -1)
        return self.o(ops.matmul(weights, v).transpose(0, 2, 1, 3).reshape(batch, LENGTH, -1))


ATTENTION_PLAN = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "o": RowwiseParallel}


def below(path: str, **styles: Any) -> dict[str, Any]:
    return {f"{path}.{name}": style() for name, style in styles.items()}


# ---------------------------------------------------------------------- nets
class Llama(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.before, self.attention = RmsNorm(), Attention()
        self.after, self.feed_forward = RmsNorm(), Gated()
        self.norm, self.head = RmsNorm(), nn.Dense(HIDDEN, VOCABULARY, has_bias=False)

    def construct(self, ids: Any) -> Any:
        x = self.embedding(ids)
        x = x + self.attention(self.before(x))
        x = x + self.feed_forward(self.after(x))
        return self.head(self.norm(x))


class OfTokens(nn.Cell):
    """The loss of each position's next token."""

    def __init__(self, net: nn.Cell) -> None:
        super().__init__(auto_prefix=True)
        self.net = net

    def construct(self, ids: Any, targets: Any) -> Any:
        logits = self.net(ids)
        return ops.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def llama_plan() -> dict[str, Any]:
    return {
        "net.embedding": RowwiseParallel(input_layouts=Replicate()),
        **below("net.attention", **ATTENTION_PLAN),
        **below("net.feed_forward", gate=ColwiseParallel, up=ColwiseParallel, down=RowwiseParallel),
        "net.head": ColwiseParallel(output_layouts=Replicate()),
    }


class Bert(nn.Cell):
    """Three embeddings that are added, layers of MindSpore's own, a pooled first token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.segments = nn.Embedding(2, HIDDEN)
        self.norm = nn.LayerNorm((HIDDEN,))
        self.attention, self.feed_forward = nn.MultiheadAttention(HIDDEN, 2, batch_first=True), FeedForward()
        self.pool, self.head = nn.Dense(HIDDEN, HIDDEN), nn.Dense(HIDDEN, CLASSES)

    def construct(self, ids: Any) -> Any:
        places = ops.arange(LENGTH).astype(ms.int32)
        x = self.norm(self.words(ids) + self.positions(places) + self.segments((ids > 5).astype(ms.int32)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.feed_forward(x)
        return self.head(ops.tanh(self.pool(x[:, 0])))


class ViT(nn.Cell):
    """Patches by a convolution, a token for the class, learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, 4, 4, has_bias=True)
        self.token = Parameter(Tensor(np.zeros((1, 1, HIDDEN), np.float32)), name="token")
        self.positions = Parameter(Tensor(np.zeros((1, LENGTH, HIDDEN), np.float32)), name="positions")
        self.norm, self.attention = nn.LayerNorm((HIDDEN,)), Attention(is_rotary=False)
        self.feed_forward, self.head = FeedForward(), nn.Dense(HIDDEN, CLASSES)

    def construct(self, x: Any) -> Any:
        x = self.patches(x)
        x = x.reshape(x.shape[0], HIDDEN, -1).transpose(0, 2, 1)
        token = self.token.broadcast_to((x.shape[0], 1, HIDDEN))
        x = ops.cat((token, x), 1) + self.positions
        x = x + self.attention(self.norm(x))
        return self.head((x + self.feed_forward(x))[:, 0])


class Convolutions(nn.Cell):
    def __init__(self, norm: nn.Cell) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, HIDDEN, 3, has_bias=True, pad_mode="pad", padding=1)
        self.norm, self.pool = norm, nn.MaxPool2d(2, 2)
        self.second = nn.Conv2d(HIDDEN, HIDDEN, 3, pad_mode="same")
        self.rest = mlp(HIDDEN)

    def construct(self, x: Any) -> Any:
        x = self.pool(ops.relu(self.norm(self.first(x))))
        return self.rest(ops.relu(self.second(x)).mean((2, 3)))


class Recurrent(nn.Cell):
    def __init__(self, layer: nn.Cell, width: int) -> None:
        super().__init__()
        self.layer, self.rest = layer, mlp(width)

    def construct(self, x: Any) -> Any:
        return self.rest(self.layer(x)[0][:, -1])


class TextConvolutions(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.convolutions = nn.CellList([nn.Conv1d(HIDDEN, 4, size, has_bias=True) for size in (2, 3)])
        self.rest = mlp(8)

    def construct(self, ids: Any) -> Any:
        x = self.embedding(ids).transpose(0, 2, 1)
        found = [ops.amax(ops.relu(convolution(x)), -1) for convolution in self.convolutions]
        return self.rest(ops.cat(found, 1))


class WideAndDeep(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(VOCABULARY, CLASSES)
        self.deep, self.rest = nn.Embedding(VOCABULARY, HIDDEN), mlp(LENGTH * HIDDEN)

    def construct(self, ids: Any) -> Any:
        return self.wide(ids).sum(1) + self.rest(self.deep(ids).reshape(ids.shape[0], -1))


class Tied(nn.Cell):
    """A head that is the embedding, by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.feed_forward = nn.Embedding(VOCABULARY, HIDDEN), FeedForward()
        self.head = nn.Dense(HIDDEN, VOCABULARY, has_bias=False)
        self.head.weight = self.embedding.embedding_table

    def construct(self, ids: Any) -> Any:
        x = self.embedding(ids)
        return self.head(x + self.feed_forward(x))


class ReadTwice(nn.Cell):
    """A weight that two functions read, the second transposed: an autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.zeros((HIDDEN, FEATURES), np.float32)), name="weight")
        self.between = FeedForward()

    def construct(self, x: Any) -> Any:
        y = self.between(ops.tanh(ops.matmul(x, self.weight.transpose(1, 0))))
        return ops.matmul(y, self.weight)


class Siamese(nn.Cell):
    """One net for both halves of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = mlp(FEATURES // 2, HIDDEN), nn.Dense(HIDDEN, CLASSES)

    def construct(self, x: Any) -> Any:
        first, second = ops.split(x, FEATURES // 2, 1)
        return self.head(ops.abs(self.net(first) - self.net(second)))


class Experts(nn.Cell):
    """Each token goes to its best expert: all compute all tokens, and masks say which count."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Dense(FEATURES, count)
        self.experts = nn.CellList([mlp() for _ in range(count)])

    def construct(self, x: Any) -> Any:
        scores = ops.softmax(self.router(x), -1)
        best = ops.argmax(scores, 1)
        total = 0
        for i, expert in enumerate(self.experts):
            chosen = (best == i).astype(ms.float32)
            total = total + expert(x) * (scores[:, i] * chosen).expand_dims(1)
        return total


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.CellDict({"norm": nn.LayerNorm((HIDDEN,)), "mlp": FeedForward()})

    def construct(self, x: Any) -> Any:
        return x + self.parts["mlp"](self.parts["norm"](x))


class Residual(nn.Cell):
    """Blocks in a list, with their cells in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Dense(FEATURES, HIDDEN), nn.Dense(HIDDEN, CLASSES)
        self.blocks = nn.CellList([Block() for _ in range(2)])

    def construct(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Scaled(nn.Cell):
    """Parameters of the net itself: a scale without dimensions, a table that is indexed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.float32(1)), name="scale")
        self.table = Parameter(Tensor(np.zeros((CLASSES, FEATURES), np.float32)), name="table")
        self.rest = mlp()

    def construct(self, x: Any) -> Any:
        return self.rest(x * self.scale + self.table[1])


class TwoHeads(nn.Cell):
    """Two losses of one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.number = mlp(FEATURES, HIDDEN), nn.Dense(HIDDEN, CLASSES), nn.Dense(HIDDEN, 1)

    def construct(self, x: Any, targets: Any) -> Any:
        y = ops.tanh(self.trunk(x))
        number = self.number(y).reshape(-1)
        return ops.cross_entropy(self.classes(y), targets) + 0.5 * ops.square(number - x[:, 0]).mean()


class SharedBelow(nn.Cell):
    """One cell in two places of the tree."""

    def __init__(self) -> None:
        super().__init__()
        shared = FeedForward()
        self.first, self.last = nn.Dense(FEATURES, HIDDEN), nn.Dense(HIDDEN, CLASSES)
        self.here, self.there = nn.SequentialCell(shared, nn.Tanh()), nn.SequentialCell(nn.Tanh(), shared)

    def construct(self, x: Any) -> Any:
        return self.last(self.there(self.here(self.first(x))))


class PreNorm(nn.Cell):
    """A norm and a sum that compute on a part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Dense(HIDDEN, HIDDEN), nn.LayerNorm((HIDDEN,))
        self.feed_forward, self.last = FeedForward(), nn.Dense(HIDDEN, CLASSES)

    def construct(self, x: Any) -> Any:
        x = self.first(x)
        return self.last(x + self.feed_forward(self.norm(x))).mean(1)


def frozen(net: nn.Cell, *names: str) -> nn.Cell:
    for p in net.get_parameters():
        if any(name in p.name for name in names):
            p.requires_grad = False
    return net


FEED_FORWARD = {"up": ColwiseParallel, "down": RowwiseParallel}

PROGRAMS: dict[str, Program] = {
    "MLP": Program("two dense layers in a `SequentialCell`", lambda: scored(mlp()), classified, mlp_plan),
    "gated MLP": Program(
        "two projections that are multiplied",
        lambda: scored(nn.SequentialCell(nn.Dense(FEATURES, HIDDEN), Gated(), nn.Dense(HIDDEN, CLASSES))),
        classified,
        lambda: below("_backbone.1", gate=ColwiseParallel, up=ColwiseParallel, down=RowwiseParallel),
    ),
    "Llama": Program(
        "rotary positions, shared keys and values, RMS norms", lambda: OfTokens(Llama()), tokens, llama_plan
    ),
    "BERT": Program(
        "three embeddings, `nn.MultiheadAttention`, a pooled token",
        lambda: scored(Bert()),
        sentences,
        lambda: {
            "_backbone.words": ColwiseParallel(output_layouts=Replicate()),
            **below("_backbone.feed_forward", **FEED_FORWARD),
        },
    ),
    "ViT": Program(
        "patches by a convolution, parameters that are joined and added",
        lambda: scored(ViT()),
        pictures,
        lambda: {**below("_backbone.attention", **ATTENTION_PLAN), **below("_backbone.feed_forward", **FEED_FORWARD)},
    ),
    "convolutions": Program(
        "`nn.Conv2d`, `nn.GroupNorm`, pooling",
        lambda: scored(Convolutions(nn.GroupNorm(2, HIDDEN))),
        pictures,
        lambda: mlp_plan("_backbone.rest"),
    ),
    "BatchNorm": Program(
        "running statistics, of a distributed batch",
        lambda: scored(Convolutions(nn.BatchNorm2d(HIDDEN))),
        pictures,
        lambda: mlp_plan("_backbone.rest"),
        is_distributed=True,
    ),
    "LSTM": Program(
        "a recurrent layer of two layers",
        lambda: scored(Recurrent(nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True), HIDDEN)),
        sequences,
        lambda: mlp_plan("_backbone.rest"),
    ),
    "GRU": Program(
        "a recurrent layer in both directions",
        lambda: scored(Recurrent(nn.GRU(HIDDEN, 3, batch_first=True, bidirectional=True), 6)),
        sequences,
        lambda: mlp_plan("_backbone.rest"),
    ),
    "text convolutions": Program(
        "`nn.Conv1d` of several sizes in a `CellList`",
        lambda: scored(TextConvolutions()),
        sentences,
        lambda: mlp_plan("_backbone.rest"),
    ),
    "wide and deep": Program(
        "two embeddings of the same numbers",
        lambda: scored(WideAndDeep()),
        sentences,
        lambda: {"_backbone.deep": RowwiseParallel(input_layouts=Replicate()), **mlp_plan("_backbone.rest")},
    ),
    "tied head": Program(
        "one parameter in an embedding and a head",
        lambda: OfTokens(Tied()),
        tokens,
        lambda: {
            "net.embedding": RowwiseParallel(input_layouts=Replicate()),
            "net.head": ColwiseParallel(output_layouts=Replicate()),
            **below("net.feed_forward", **FEED_FORWARD),
        },
    ),
    "autoencoder": Program(
        "one weight read twice, once transposed",
        lambda: nn.WithLossCell(ReadTwice(), nn.MSELoss()),
        lambda rng: (classified(rng)[0],) * 2,
        lambda: below("_backbone.between", **FEED_FORWARD),
    ),
    "siamese": Program(
        "one net called twice",
        lambda: scored(Siamese()),
        classified,
        lambda: mlp_plan("_backbone.net"),
    ),
    "experts by masks": Program(
        "a router; every expert computes all tokens",
        lambda: scored(Experts()),
        classified,
        lambda: {"_backbone.experts.*.0": ColwiseParallel(), "_backbone.experts.*.2": RowwiseParallel()},
    ),
    "residual blocks": Program(
        "a `CellList`, and a `CellDict` in each of its cells",
        lambda: scored(Residual()),
        classified,
        lambda: {
            "_backbone.blocks.*.parts.mlp.up": ColwiseParallel(),
            "_backbone.blocks.*.parts.mlp.down": RowwiseParallel(),
        },
    ),
    "parameters of the net": Program(
        "a scale without dimensions, a table that is indexed",
        lambda: scored(Scaled()),
        classified,
        lambda: mlp_plan("_backbone.rest"),
    ),
    "two heads": Program(
        "two losses of one trunk, no cell for the loss",
        TwoHeads,
        classified,
        lambda: {**mlp_plan("trunk"), "classes": NoParallel()},
    ),
    "a cell in two places": Program(
        "one cell in two others",
        lambda: scored(SharedBelow()),
        classified,
        lambda: below("_backbone.here.0", **FEED_FORWARD),
    ),
    "frozen embedding": Program(
        "parameters without a gradient",
        lambda: frozen(OfTokens(Tied()), "embedding"),
        tokens,
        lambda: below("net.feed_forward", **FEED_FORWARD),
    ),
    "sequence parallel": Program(
        "a norm and a sum on a shard of the sequence",
        lambda: scored(PreNorm()),
        even_sequences,
        lambda: {
            "_backbone.first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "_backbone.norm": SequenceParallel(),
            "_backbone.feed_forward.up": ColwiseParallel(input_layouts=Shard(1)),
            "_backbone.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            "_backbone.last": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    ),
}
