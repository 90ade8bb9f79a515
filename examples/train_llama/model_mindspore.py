"""Llama in MindSpore, with Hugging Face's module, parameter and configuration names.

Nothing in it knows about processes or shards: attention works on however many heads the projections return. So
`hyper_parallel.parallelize_module` spreads it by the strings of Hugging Face's plans (``base_model_tp_plan``).
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops


def rotary_tables(positions: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation, each float32 (positions, 1, head_dim / 2)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(positions), frequencies)[:, None, :]
    return Tensor(np.cos(angles).astype(np.float32)), Tensor(np.sin(angles).astype(np.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, length, heads, head_dim)."""
    first, second = mint.chunk(x, 2, dim=-1)
    return mint.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """Each head of (batch, length, heads, head_dim) `repeats` times over, side by side."""
    if repeats == 1:
        return x
    batch, length, heads, head_dim = x.shape
    x = mint.broadcast_to(x.unsqueeze(3), (batch, length, heads, repeats, head_dim))
    return x.reshape(batch, length, heads * repeats, head_dim)


class LlamaEmbedding(mint.nn.Embedding):
    """mint.nn.Embedding through `gather`, because its own kernel is missing on CPU."""

    def construct(self, ids: Tensor) -> Tensor:
        return ops.gather(self.weight, ids, 0)


class LlamaRMSNorm(nn.Cell):
    """Root-mean-square norm over the last dimension, in elementary operations (`ops.rms_norm` has no CPU kernel)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.variance_epsilon = eps
        self.weight = Parameter(mint.ones(size, dtype=ms.float32), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        mean_square = mint.mean(x * x, dim=-1, keepdim=True)
        return x * mint.rsqrt(mean_square + self.variance_epsilon) * self.weight


class KeyValueCache:
    """Keys and values (batch, length, heads, head_dim) of the tokens seen so far, for each layer.

    They are the outputs of the projections: sharded by heads, each rank keeps its own.
    """

    def __init__(self, layers: int) -> None:
        self.length = 0
        self._of_layer: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of further tokens; return those of all."""
        earlier = self._of_layer[layer]
        if earlier is not None:
            key, value = mint.cat((earlier[0], key), dim=1), mint.cat((earlier[1], value), dim=1)
        self._of_layer[layer] = key, value
        return key, value


class LlamaAttention(nn.Cell):
    """Causal grouped-query attention over however many heads the projections return."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.add_projections(config)
        query_size = config.num_attention_heads * config.head_dim
        self.o_proj = mint.nn.Linear(query_size, config.hidden_size, bias=False)
        if getattr(config, "use_qk_norm", False):
            self.q_norm: nn.Cell = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm: nn.Cell = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        future = np.triu(np.full((config.max_position_embeddings,) * 2, -np.inf, np.float32), 1)
        self.causal_mask = Tensor(future)

    def add_projections(self, config: Any) -> None:
        """Make the layers that `project` uses."""
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = mint.nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = mint.nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = mint.nn.Linear(config.hidden_size, key_size, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (batch, length, heads * head_dim)."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        batch, length = x.shape[:2]
        query, key, value = (t.reshape(batch, length, -1, self.head_dim) for t in self.project(x))
        query, key = rotate(self.q_norm(query), cos, sin), rotate(self.k_norm(key), cos, sin)
        if cache is not None:
            key, value = cache.extend(self.layer_idx, key, value)
        repeats = query.shape[2] // key.shape[2]
        key, value = repeat_heads(key, repeats), repeat_heads(value, repeats)
        query, key, value = (mint.transpose(t, 1, 2) for t in (query, key, value))
        scores = ops.bmm(query * self.head_dim**-0.5, mint.transpose(key, 2, 3))
        whole = key.shape[2]
        scores = scores + self.causal_mask[whole - length : whole, :whole]
        mixed = ops.bmm(mint.nn.functional.softmax(scores, dim=-1), value)
        return self.o_proj(mint.transpose(mixed, 1, 2).reshape(batch, length, -1))


class LlamaMLP(nn.Cell):
    """SwiGLU."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = mint.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = mint.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = mint.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.down_proj(mint.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaExperts(nn.Cell):
    """SwiGLU of several experts, for tokens sorted by expert and the number for each. It knows no other experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        count, hidden, size = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = Parameter(mint.zeros((count, hidden, 2 * size)), name="gate_up_proj")
        self.down_proj = Parameter(mint.zeros((count, size, hidden)), name="down_proj")

    def construct(self, tokens: Tensor, counts: Tensor) -> Tensor:
        outputs, start = [], 0
        for expert, count in enumerate(counts.asnumpy().tolist()):
            if count:  # without rows there are no kernels
                rows = mint.narrow(tokens, 0, start, count)
                gate, up = mint.chunk(mint.matmul(rows, self.gate_up_proj[expert]), 2, dim=-1)
                outputs.append(mint.matmul(mint.nn.functional.silu(gate) * up, self.down_proj[expert]))
                start += count
        return mint.cat(outputs)


class LlamaMoE(nn.Cell):
    """Mixture of experts, as in Mixtral: each token is the weighted sum of the best experts' outputs."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.count, self.best = config.num_local_experts, config.num_experts_per_tok
        self.gate = mint.nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = LlamaExperts(config)

    def construct(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.gate(tokens)
        _, experts = ops.topk(ops.stop_gradient(scores), self.best)
        logits, chosen = mint.gather(scores, -1, experts), experts.asnumpy().ravel()
        order = np.argsort(chosen, kind="stable")
        counts = Tensor(np.bincount(chosen, minlength=self.count))
        outputs = self.experts(tokens[Tensor(order // self.best)], counts)
        outputs = outputs[Tensor(np.argsort(order))].reshape(-1, self.best, x.shape[-1])
        weights = mint.nn.functional.softmax(logits, dim=-1).reshape(-1, self.best, 1)
        return mint.sum(outputs * weights, dim=1).reshape(x.shape)


class LlamaDecoderLayer(nn.Cell):
    """Attention and feed-forward, each behind a norm and around a residual."""

    attention_type: type[nn.Cell] = LlamaAttention
    mlp_type: type[nn.Cell] = LlamaMLP

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_type(config, layer_idx)
        self.mlp = (LlamaMoE if getattr(config, "num_local_experts", 0) else self.mlp_type)(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Cell):
    """Llama from tokens (batch, length) to their last hidden states (batch, length, hidden_size)."""

    layer_type: type[nn.Cell] = LlamaDecoderLayer

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = LlamaEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.CellList([self.layer_type(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.cos, self.sin = rotary_tables(config.max_position_embeddings, config.head_dim, config.rope_theta)

    def construct(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        first = 0 if cache is None else cache.length
        end = first + input_ids.shape[1]
        if end > len(self.cos):
            raise ValueError(f"the model was made for {len(self.cos)} tokens (max_position_embeddings), got {end}")
        cos, sin = self.cos[first:end], self.sin[first:end]
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        if cache is not None:
            cache.length = end
        return self.norm(x)


class LlamaForCausalLM(nn.Cell):
    """Llama from tokens (batch, length) to logits (batch, length, vocab_size).

    Args:
        config: the fields of Hugging Face's ``LlamaConfig``: vocab_size, hidden_size, intermediate_size,
            num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, max_position_embeddings,
            rms_norm_eps, rope_theta, tie_word_embeddings; and use_qk_norm for the norms in each head that Qwen3 has.
    """

    model_type: type[nn.Cell] = LlamaModel

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_type(config)
        self.lm_head = mint.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def construct(self, input_ids: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        return self.lm_head(self.model(input_ids, cache))

    def generate(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        """Continue each row by its most likely tokens.

        Args:
            input_ids: int (batch, length); all rows count, there is no padding.
            max_new_tokens: how many are added.

        Returns:
            int (batch, length + max_new_tokens), the input first; the same on every rank.

        Raises:
            ValueError: when the head gives only this rank's part of the logits, or there are too many tokens.
        """
        cache = KeyValueCache(self.config.num_hidden_layers)
        tokens, latest = [input_ids], input_ids
        for _ in range(max_new_tokens):
            logits = self(latest, cache)[:, -1]
            if logits.shape[-1] != self.config.vocab_size:
                raise ValueError(
                    f"lm_head gives {logits.shape[-1]} logits of {self.config.vocab_size}: to generate, it has to "
                    'gather them, as by "colwise_gather_output"'
                )
            latest = ops.argmax(logits, dim=-1).astype(input_ids.dtype).reshape(-1, 1)
            tokens.append(latest)
        return mint.cat(tokens, dim=1)
