"""Sizes of the model and of the run: everything both frameworks must agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

VOCAB_SIZE = 256
"""Tokens are bytes."""


@dataclass(frozen=True)
class LlamaConfig:
    """A Llama in miniature, its fields named as in Hugging Face's configuration of the same name.

    Heads, hidden sizes and the sequence divide by 1, 2 and 4 processes.
    """

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 16
    max_position_embeddings: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    num_local_experts: int = 0
    """Experts in place of each feed-forward layer, named as Mixtral's; 0 for none."""
    num_experts_per_tok: int = 2

    def check_divisible(self, processes: int) -> None:
        """Raise ValueError unless everything that is sharded has equal parts."""
        if processes < 1:
            raise ValueError("at least one process is needed")
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"):
            if getattr(self, name) % processes:
                raise ValueError(f"{name} is {getattr(self, name)}, which does not divide among {processes} processes")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, the same in both frameworks. A tied head has none of its own."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        query_size = self.num_attention_heads * self.head_dim
        key_size = self.num_key_value_heads * self.head_dim
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.hidden_size,)
            shapes[prefix + "self_attn.q_proj.weight"] = (query_size, self.hidden_size)
            shapes[prefix + "self_attn.k_proj.weight"] = (key_size, self.hidden_size)
            shapes[prefix + "self_attn.v_proj.weight"] = (key_size, self.hidden_size)
            shapes[prefix + "self_attn.o_proj.weight"] = (self.hidden_size, query_size)
            shapes[prefix + "post_attention_layernorm.weight"] = (self.hidden_size,)
            if self.num_local_experts:
                experts, size = self.num_local_experts, self.intermediate_size
                shapes[prefix + "mlp.gate.weight"] = (experts, self.hidden_size)
                shapes[prefix + "mlp.experts.gate_up_proj"] = (experts, self.hidden_size, 2 * size)
                shapes[prefix + "mlp.experts.down_proj"] = (experts, size, self.hidden_size)
                continue
            shapes[prefix + "mlp.gate_proj.weight"] = (self.intermediate_size, self.hidden_size)
            shapes[prefix + "mlp.down_proj.weight"] = (self.hidden_size, self.intermediate_size)
            shapes[prefix + "mlp.up_proj.weight"] = (self.intermediate_size, self.hidden_size)
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes


@dataclass(frozen=True)
class RunConfig:
    """Settings of a training run. Every process derives the same weights, batches and sample from it."""

    model: LlamaConfig = field(default_factory=LlamaConfig)
    steps: int = 100
    batch_size: int = 6
    learning_rate: float = 4e-3
    final_learning_rate: float = 4e-4
    warmup_steps: int = 5
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    validation_windows: int = 128
    validation_batch_size: int = 32
    validate_every: int = 50
    sample_bytes: int = 50
    temperature: float = 0.7
    seed: int = 0

    def check_batch(self, parts: int) -> None:
        """Raise ValueError unless the batch has equal parts: then the mean of their losses is that of the batch."""
        if parts < 1 or self.batch_size % parts:
            raise ValueError(f"batch_size is {self.batch_size}, which does not divide into {parts} equal parts")

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to the final rate. Steps count from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * cosine
