"""The model in PyTorch, with Hugging Face's names. Nothing in it knows about processes or shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from config import LlamaConfig


def rotary_tables(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation, each float32 (positions, 1, head_dim / 2)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(positions), frequencies)[:, None, :]
    return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, length, heads, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class LlamaAttention(nn.Module):
    """Causal grouped-query attention over however many heads the projections return."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        query = rotate(self.q_proj(x).view(batch, length, -1, self.head_dim), cos, sin)
        key = rotate(self.k_proj(x).view(batch, length, -1, self.head_dim), cos, sin)
        value = self.v_proj(x).view(batch, length, -1, self.head_dim)
        repeats = query.shape[2] // key.shape[2]
        key = key.repeat_interleave(repeats, dim=2)
        value = value.repeat_interleave(repeats, dim=2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class LlamaMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaExperts(nn.Module):
    """SwiGLU of several experts, for tokens sorted by expert and the number for each. It knows no other experts."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        count, hidden, size = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, hidden, 2 * size))
        self.down_proj = nn.Parameter(torch.empty(count, size, hidden))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        outputs = []
        for rows, gate_up, down in zip(tokens.split(counts.tolist()), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = (rows @ gate_up).chunk(2, dim=-1)
            outputs.append((F.silu(gate) * up) @ down)
        return torch.cat(outputs)


class LlamaMoE(nn.Module):
    """Mixture of experts, as in Mixtral: each token is the weighted sum of the best experts' outputs."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.count, self.best = config.num_local_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = LlamaExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        logits, experts = self.gate(tokens).topk(self.best)
        order = experts.flatten().argsort(stable=True)
        outputs = self.experts(tokens[order // self.best], experts.flatten().bincount(minlength=self.count))
        outputs = outputs[order.argsort()].unflatten(0, (-1, self.best))
        return (outputs * logits.softmax(-1).unsqueeze(-1)).sum(1).view_as(x)


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMoE(config) if config.num_local_experts else LlamaMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Llama from tokens (batch, length) to their last hidden states (batch, length, hidden_size)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rotary_tables(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Llama from tokens (batch, length) to logits (batch, length, vocab_size)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))
