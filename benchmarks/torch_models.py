"""The models, without anything about processes: an MLP and a Llama block, in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.sizes import LlamaSizes, MlpSizes


class Mlp(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, sizes: MlpSizes) -> None:
        super().__init__()
        self.up = nn.Linear(sizes.features, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.features)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def rotary_tables(positions: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's rotation, each (positions, 1, head_size / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.outer(torch.arange(positions), frequencies)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, sequence, heads, head_size)."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Module):
    """Causal attention over however many heads the projections return.

    ``past`` holds keys and values of earlier tokens, each (batch, heads, cached, head_size); then x is one token.
    """

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head_size = sizes.head_size
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(sizes.features, sizes.features, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return self.wo(self.mix(x, cos, sin, past))

    def mix(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
        """All but the output projection."""
        batch, sequence, size = x.shape[0], x.shape[1], self.head_size
        query = rotate(self.wq(x).view(batch, sequence, -1, size), cos, sin).transpose(1, 2)
        key = rotate(self.wk(x).view(batch, sequence, -1, size), cos, sin).transpose(1, 2)
        value = self.wv(x).view(batch, sequence, -1, size).transpose(1, 2)
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        return mixed.transpose(1, 2).reshape(batch, sequence, -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.features, sizes.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.hidden, sizes.features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.features, 1e-5)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.features, 1e-5)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, past=past)
        return x + self.feed_forward(self.ffn_norm(x))


class Blocks(nn.Module):
    """Several blocks, one after the other."""

    def __init__(self, sizes: LlamaSizes, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in range(layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class Llama(nn.Module):
    """Blocks between an embedding and a head; from tokens (batch, sequence) to logits."""

    def __init__(self, sizes: LlamaSizes, vocabulary: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, sizes.features)
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in range(layers))
        self.norm = nn.RMSNorm(sizes.features, 1e-5)
        self.head = nn.Linear(sizes.features, vocabulary, bias=False)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))
