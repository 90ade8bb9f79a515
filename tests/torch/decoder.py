"""A small decoder that the training tests parallelise with either library, and one training step of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.torch.support import device


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder; ``sequence`` must divide by the number of ranks."""

    vocabulary: int = 12
    features: int = 8
    hidden: int = 12
    heads: int = 2
    sequence: int = 6


#: Vocabulary and hidden features that two and three ranks hold unequal parts of.
UNEVEN = Sizes(vocabulary=11, features=12, hidden=10, heads=6)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.size = sizes.features // sizes.heads
        self.wq, self.wk, self.wv = (nn.Linear(sizes.features, sizes.features, bias=False) for _ in range(3))
        self.wo = nn.Linear(sizes.features, sizes.features, bias=bias)

    def forward(self, x: Any) -> Any:
        q, k, v = (w(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.features, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.features, sizes.hidden, bias=bias)
        self.down = nn.Linear(sizes.hidden, sizes.features, bias=bias)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, bias: bool) -> None:
        super().__init__()
        norm = nn.LayerNorm if bias else nn.RMSNorm
        self.norm1, self.norm2 = norm(sizes.features), norm(sizes.features)
        self.attention, self.feed_forward = Attention(sizes, bias), FeedForward(sizes, bias)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """Embedding, one block with attention and a gated feed-forward layer, norm and head; gives the loss.

    Args:
        sizes: sizes.
        bias: whether linear layers have biases and norms are LayerNorm, else RMSNorm.
        wrap: how `forward` calls the block: ``wrap(block, x)``.
    """

    def __init__(self, sizes: Sizes = Sizes(), bias: bool = True, wrap: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.features)
        self.block = Block(sizes, bias)
        self.norm = nn.RMSNorm(sizes.features)
        self.head = nn.Linear(sizes.features, sizes.vocabulary, bias=False)
        self.wrap = wrap or (lambda block, x: block(x))

    def forward(self, ids: Any, targets: Any) -> Any:
        logits = self.head(self.norm(self.wrap(self.block, self.embedding(ids))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plan(lib: Any) -> dict[str, Any]:
    """Megatron's with sequence parallelism, with the styles of ``lib``."""
    part, whole = lib.Shard(1), lib.Replicate()
    into = lib.PrepareModuleInput(input_layouts=part, desired_input_layouts=whole)
    return {
        "embedding": lib.RowwiseParallel(input_layouts=whole, output_layouts=part),
        "block.norm1": lib.SequenceParallel(),
        "block.norm2": lib.SequenceParallel(),
        "block.attention": into,
        "block.attention.w[qkv]": lib.ColwiseParallel(),
        "block.attention.wo": lib.RowwiseParallel(output_layouts=part),
        "block.feed_forward": into,
        "block.feed_forward.gate": lib.ColwiseParallel(),
        "block.feed_forward.up": lib.ColwiseParallel(),
        "block.feed_forward.down": lib.RowwiseParallel(output_layouts=part),
        "norm": lib.SequenceParallel(),
        "head": lib.ColwiseParallel(input_layouts=part, output_layouts=whole),
    }


def decoder(sizes: Sizes = Sizes(), dtype: Any = torch.float64, **options: Any) -> Decoder:
    """The same model every time. In double precision rounding does not hide an error of the optimizer's arithmetic."""
    torch.manual_seed(7)
    return Decoder(sizes, **options).to(device(), dtype)


def batch(sizes: Sizes, step: int, samples: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets (samples, sequence) of a training step."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (samples, sizes.sequence)
    ids, targets = (torch.randint(0, sizes.vocabulary, shape, generator=generator) for _ in range(2))
    return ids.to(device()), targets.to(device())
