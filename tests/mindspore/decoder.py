"""A small decoder for training tests, as `tests.torch.decoder` has it for torch."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

import hyper_parallel as hp

LENGTH = 6
#: name -> (vocabulary, features, hidden, heads); the uneven ones do not divide by two ranks.
SIZES = {"even": (12, 8, 12, 2), "uneven": (11, 12, 10, 6)}


class RmsNorm(nn.Cell):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones((features,), np.float32)), name="weight")

    def construct(self, x: Any) -> Any:
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + 1e-5) * self.weight


class Attention(nn.Cell):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.size = features // heads
        self.wq = mint.nn.Linear(features, features, bias=False)
        self.wk = mint.nn.Linear(features, features, bias=False)
        self.wv = mint.nn.Linear(features, features, bias=False)
        self.wo = mint.nn.Linear(features, features)

    def construct(self, x: Any) -> Any:
        batch, length = x.shape[:2]
        q, k, v = (w(x).reshape(batch, length, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = mint.nn.functional.softmax(mint.matmul(q, k.transpose(2, 3)) * self.size**-0.5, dim=-1)
        return self.wo(mint.matmul(scores, v).transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Cell):
    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate = mint.nn.Linear(features, hidden, bias=False)
        self.up, self.down = mint.nn.Linear(features, hidden), mint.nn.Linear(hidden, features)

    def construct(self, x: Any) -> Any:
        return self.down(mint.nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Cell):
    def __init__(self, features: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((features,)), nn.LayerNorm((features,))
        self.attention, self.feed_forward = Attention(features, heads), FeedForward(features, hidden)

    def construct(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Nothing(nn.Cell):
    """A layer without parameters."""

    def construct(self, x: Any) -> Any:
        return x


class Decoder(nn.Cell):
    """Embedding, block, norm and head; gives the loss.

    Args:
        sizes: a name in `SIZES`.
        tied: head and embedding have one parameter.
        scalar: the loss is multiplied by a parameter without dimensions.
    """

    def __init__(self, sizes: str, tied: bool = False, scalar: bool = False) -> None:
        super().__init__()
        vocabulary, features, hidden, heads = SIZES[sizes]
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, features)
        self.block = Block(features, hidden, heads)
        self.nothing = Nothing()
        self.idle = mint.nn.Linear(features, 3)
        self.norm = RmsNorm(features)
        self.head = mint.nn.Linear(features, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.embedding_table
        self.gain = ms.Parameter(Tensor(0.7, ms.float32), name="gain") if scalar else None

    def logits(self, ids: Any) -> Any:
        """A row for each word."""
        return self.head(self.norm(self.nothing(self.block(self.embedding(ids))))).reshape(-1, self.vocabulary)

    def construct(self, ids: Any, targets: Any) -> Any:
        loss = ops.cross_entropy(self.logits(ids), targets.reshape(-1))
        return loss if self.gain is None else loss * self.gain


def decoder(sizes: str, dtype: Any, **options: Any) -> Decoder:
    """The same numbers every time."""
    net, rng = Decoder(sizes, **options), np.random.default_rng(7)
    for p in net.get_parameters():
        p.set_dtype(dtype)
        p.set_data(Tensor(rng.standard_normal(p.shape) * 0.3, dtype))
    return net


def plan(sequence: bool, loss_parallel: bool) -> dict[str, Any]:
    """Megatron's styles, with the activations between layers as parts of the sequence or not."""
    part = hp.Shard(1) if sequence else hp.Replicate()
    into = hp.PrepareModuleInput(input_layouts=part, desired_input_layouts=hp.Replicate())
    head = {"use_local_output": False} if loss_parallel else {"output_layouts": hp.Replicate()}
    styles = {
        "embedding": hp.RowwiseParallel(input_layouts=hp.Replicate(), output_layouts=part),
        "block.attention.w[qkv]": hp.ColwiseParallel(),
        "block.attention.wo": hp.RowwiseParallel(output_layouts=part),
        "block.feed_forward.gate": hp.ColwiseParallel(),
        "block.feed_forward.up": hp.ColwiseParallel(),
        "block.feed_forward.down": hp.RowwiseParallel(output_layouts=part),
        "head": hp.ColwiseParallel(input_layouts=part, **head),
    }
    if sequence:
        styles.update({"block.attention": into, "block.feed_forward": into})
        styles.update({name: hp.SequenceParallel() for name in ("block.norm1", "block.norm2", "norm")})
    return styles


def batch(sizes: str, step: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and targets (samples, length) of a training step."""
    rng = np.random.default_rng(100 + step)
    vocabulary = SIZES[sizes][0]
    ids, targets = (rng.integers(0, vocabulary, (samples, LENGTH)).astype(np.int32) for _ in range(2))
    return ids, targets
