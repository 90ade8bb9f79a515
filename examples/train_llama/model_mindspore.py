"""The model in MindSpore, parameter for parameter that of model_torch.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from config import VOCAB_SIZE, ModelConfig


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, length, heads, head_dim)."""
    first, second = mint.chunk(x, 2, dim=-1)
    return mint.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """Each head of (batch, length, heads, head_dim) `repeats` times over, side by side."""
    batch, length, heads, head_dim = x.shape
    x = x.unsqueeze(3).expand((batch, length, heads, repeats, head_dim))
    return x.reshape(batch, length, heads * repeats, head_dim)


class Embedding(mint.nn.Embedding):
    """mint.nn.Embedding through `gather`, because its own kernel is missing on CPU."""

    def construct(self, ids: Tensor) -> Tensor:
        return ops.gather(self.weight, ids, 0)


class RMSNorm(nn.Cell):
    """Root-mean-square norm in elementary operations (`ops.rms_norm` has no CPU kernel)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter(mint.ones(dim, dtype=ms.float32), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        mean_square = mint.mean(x * x, dim=-1, keepdim=True)
        return x * mint.rsqrt(mean_square + self.eps) * self.weight


class Attention(nn.Cell):
    """Causal grouped-query attention over however many heads the projections return."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.queries_per_kv = config.heads // config.kv_heads
        kv_dim = config.kv_heads * config.head_dim
        self.wq = mint.nn.Linear(config.dim, config.dim, bias=False)
        self.wk = mint.nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = mint.nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = mint.nn.Linear(config.dim, config.dim, bias=False)
        square = (config.sequence_length, config.sequence_length)
        self.mask = Tensor(np.triu(np.full(square, -np.inf, np.float32), 1))

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        query = rotate(self.wq(x).view(batch, length, -1, self.head_dim), cos, sin)
        key = rotate(self.wk(x).view(batch, length, -1, self.head_dim), cos, sin)
        value = self.wv(x).view(batch, length, -1, self.head_dim)
        key = repeat_heads(key, self.queries_per_kv)
        value = repeat_heads(value, self.queries_per_kv)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        scores = ops.bmm(query * self.head_dim**-0.5, key.transpose(2, 3))
        scores = scores + self.mask[:length, :length]
        mixed = ops.bmm(mint.nn.functional.softmax(scores, dim=-1), value)
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Cell):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = mint.nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = mint.nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = mint.nn.Linear(config.dim, config.hidden_dim, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.w2(mint.nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Cell):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Cell):
    """From tokens (batch, length) to logits (batch, length, VOCAB_SIZE)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(VOCAB_SIZE, config.dim)
        self.layers = nn.CellList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = mint.nn.Linear(config.dim, VOCAB_SIZE, bias=False)
        cos, sin = config.rotary_tables()
        self.cos, self.sin = Tensor(cos), Tensor(sin)

    def construct(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))
