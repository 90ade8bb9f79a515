"""A decoder with the layers, names and shapes of Llama, for dry runs of models that are given by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["make_decoder"]


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        q, k, v = (
            project(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _FeedForward(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes["hidden"], 1e-5)
        self.self_attn = _Attention(sizes["hidden"], sizes["heads"], sizes["key_value_heads"])
        self.post_attention_layernorm = nn.RMSNorm(sizes["hidden"], 1e-5)
        self.mlp = _FeedForward(sizes["hidden"], sizes["intermediate"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Model(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes["vocabulary"], sizes["hidden"])
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes["layers"]))
        self.norm = nn.RMSNorm(sizes["hidden"], 1e-5)
        self.half = sizes["hidden"] // sizes["heads"] // 2

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] / 500000.0 ** (
            torch.arange(self.half, device=tokens.device) / self.half
        )
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Decoder(nn.Module):
    """Decoder from tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.model = _Model(sizes)
        self.lm_head = nn.Linear(sizes["hidden"], sizes["vocabulary"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of ``tokens``."""
        return self.lm_head(self.model(tokens))


def make_decoder(sizes: Any) -> nn.Module:
    """Return a decoder with the layers and names of Llama; see `Platform.make_decoder`."""
    return Decoder(sizes)
