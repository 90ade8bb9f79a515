"""Sizes of the model and of the run: everything both frameworks must agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

VOCAB_SIZE = 256
"""Tokens are bytes."""


@dataclass(frozen=True)
class ModelConfig:
    """A Llama in miniature. Heads, hidden sizes and the sequence divide by 1, 2 and 4 processes."""

    dim: int = 128
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    hidden_dim: int = 256
    sequence_length: int = 64
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    def check_divisible(self, processes: int) -> None:
        """Raise ValueError unless everything that is sharded has equal parts."""
        if processes < 1:
            raise ValueError("at least one process is needed")
        for name in ("heads", "kv_heads", "hidden_dim", "sequence_length"):
            if getattr(self, name) % processes:
                raise ValueError(f"{name} is {getattr(self, name)}, which does not divide among {processes} processes")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, the same in both frameworks."""
        shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (VOCAB_SIZE, self.dim)}
        kv_dim = self.kv_heads * self.head_dim
        for layer in range(self.layers):
            prefix = f"layers.{layer}."
            shapes[prefix + "attention_norm.weight"] = (self.dim,)
            shapes[prefix + "attention.wq.weight"] = (self.dim, self.dim)
            shapes[prefix + "attention.wk.weight"] = (kv_dim, self.dim)
            shapes[prefix + "attention.wv.weight"] = (kv_dim, self.dim)
            shapes[prefix + "attention.wo.weight"] = (self.dim, self.dim)
            shapes[prefix + "ffn_norm.weight"] = (self.dim,)
            shapes[prefix + "feed_forward.w1.weight"] = (self.hidden_dim, self.dim)
            shapes[prefix + "feed_forward.w2.weight"] = (self.dim, self.hidden_dim)
            shapes[prefix + "feed_forward.w3.weight"] = (self.hidden_dim, self.dim)
        shapes["norm.weight"] = (self.dim,)
        shapes["output.weight"] = (VOCAB_SIZE, self.dim)
        return shapes

    def rotary_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of every position's rotation, each (sequence_length, 1, head_dim / 2)."""
        frequencies = self.rope_theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        angles = np.outer(np.arange(self.sequence_length), frequencies)[:, None, :]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass(frozen=True)
class RunConfig:
    """How the model is trained. Every process derives the same weights, batches and sample from it."""

    model: ModelConfig = field(default_factory=ModelConfig)
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

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to the final rate. Steps count from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * cosine
