"""The Llama of the example in the sizes of tests, with the plans that spread it.

The plans are those of Hugging Face's ``LlamaConfig.base_model_tp_plan`` and ``LlamaForCausalLM._tp_plan``, word by
word, and of Qwen3 and Phi-3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mindspore import Tensor, mint, nn

from examples.train_llama.config import LlamaConfig
from examples.train_llama.model_mindspore import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)
from examples.train_llama.plan import tensor_parallel_plan
from hyper_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

LAYERS, BATCH, LENGTH = 2, 2, 8


@dataclass(frozen=True)
class Config(LlamaConfig):
    """Neither the vocabulary nor the hidden units divide by the ranks."""

    vocab_size: int = 45
    hidden_size: int = 32
    intermediate_size: int = 50
    num_hidden_layers: int = LAYERS
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 8
    max_position_embeddings: int = 24
    use_qk_norm: bool = False


# ------------------------------------------------------------------ fused weights, as Phi-3 has them
class FusedAttention(LlamaAttention):
    def add_projections(self, config: Any) -> None:
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.qkv_proj = mint.nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv_proj(x)
        unit = qkv.shape[-1] // sum(self.heads)  # of one head; of the plain part of a rank a fraction of it
        return mint.split(qkv, [n * unit for n in self.heads], -1)


class FusedMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        nn.Cell.__init__(self)
        self.gate_up_proj = mint.nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = mint.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        gate, up = mint.chunk(self.gate_up_proj(x), 2, -1)
        return self.down_proj(mint.nn.functional.silu(gate) * up)


class FusedLayer(LlamaDecoderLayer):
    attention_type = FusedAttention
    mlp_type = FusedMLP


class FusedModel(LlamaModel):
    layer_type = FusedLayer


class FusedLlama(LlamaForCausalLM):
    model_type = FusedModel


# ------------------------------------------------------------------ plans
BASE_MODEL_TP_PLAN = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
HEAD = {"lm_head": "colwise_gather_output"}
#: without it the embedding, and with it a tied head, stays whole
EMBEDDING = {"model.embed_tokens": "embedding_rowwise"}
PLAN = {**{f"model.{key}": style for key, style in BASE_MODEL_TP_PLAN.items()}, **EMBEDDING, **HEAD}


_QWEN3_NORMS = {f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
_PHI3 = {
    "model.layers.*.self_attn.qkv_proj": "colwise_gather_output",
    "model.layers.*.self_attn.o_proj": "rowwise_split_input",
    "model.layers.*.mlp.gate_up_proj": "colwise_gather_output",
    "model.layers.*.mlp.down_proj": "rowwise_split_input",
}


def with_head(style: Any) -> dict[str, Any]:
    return {**PLAN, "lm_head": style}


def replicated_key_value_heads() -> dict[str, Any]:
    style = ColwiseParallel(heads=Config.num_key_value_heads // 2, replicate_heads=True)
    return {**PLAN, "model.layers.*.self_attn.k_proj": style, "model.layers.*.self_attn.v_proj": style}


def fused(local: bool) -> dict[str, Any]:
    heads = (Config.num_attention_heads, Config.num_key_value_heads, Config.num_key_value_heads)
    return {
        **EMBEDDING,
        **HEAD,
        "model.layers.*.self_attn.qkv_proj": ColwiseParallel(heads=heads, use_local_output=local),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_up_proj": ColwiseParallel(packed=2, use_local_output=local),
        "model.layers.*.mlp.down_proj": "rowwise",
    }


# ------------------------------------------------------------------ models
@dataclass(frozen=True)
class Case:
    """One model, how it is spread, and which collectives hand-written code would issue for that."""

    config: Config
    plan: dict[str, Any]
    forward: dict[str, int]
    backward: dict[str, int]
    kind: type[LlamaForCausalLM] = LlamaForCausalLM
    #: the head leaves the logits sharded, and the loss is computed on them
    sharded_loss: bool = False
    #: attention and feed-forward run on DTensors, next to plain tables and masks
    distributed_inside: bool = False


#: Megatron-LM: one all-reduce after the embedding, after each attention and each feed-forward; backward one before each
#: attention, each feed-forward and the head. The head gathers the logits, or the loss does two all-reduces.
_FORWARD = {"all_reduce": 1 + 2 * LAYERS, "all_gather": 1}
_BACKWARD = {"all_reduce": 1 + 2 * LAYERS}
_NORMS = 2 * LAYERS + 1

_PLAIN = Case(Config(), PLAN, _FORWARD, _BACKWARD)
_LOSS = {"forward": {"all_reduce": 1 + 2 * LAYERS}, "plan": with_head(ColwiseParallel(use_local_output=False))}

CASES: dict[str, Case] = {
    "untied": _PLAIN,
    "tied": replace(_PLAIN, config=Config(tie_word_embeddings=True)),
    "untied, loss_parallel": replace(_PLAIN, **_LOSS, sharded_loss=True),
    "tied, loss_parallel": replace(_PLAIN, **_LOSS, config=Config(tie_word_embeddings=True), sharded_loss=True),
    # The gradients of both norms' weights, of each layer.
    "norms in heads": replace(
        _PLAIN, config=Config(use_qk_norm=True), backward={"all_reduce": 1 + 2 * LAYERS + 2 * LAYERS}
    ),
    "Qwen3's plan": replace(
        _PLAIN,
        config=Config(use_qk_norm=True),
        plan={**PLAN, **_QWEN3_NORMS},
        backward={"all_reduce": 1 + 2 * LAYERS + 2 * LAYERS},
    ),
    # The outputs of the fused layers are gathered, and each rank takes a part of the outputs of attention and
    # feed-forward.
    "Phi-3's plan": replace(
        _PLAIN,
        plan={**EMBEDDING, **HEAD, **_PHI3},
        kind=FusedLlama,
        forward={"all_reduce": 1 + 2 * LAYERS, "all_gather": 1 + 2 * LAYERS},
        backward={"all_reduce": 1 + 2 * LAYERS, "all_gather": 2 * LAYERS},
    ),
    "fused": replace(_PLAIN, plan=fused(local=True), kind=FusedLlama),
    "fused, DTensors inside": replace(_PLAIN, plan=fused(local=False), kind=FusedLlama, distributed_inside=True),
    "sequence": replace(
        _PLAIN,
        plan=tensor_parallel_plan(),
        forward={"reduce_scatter": 1 + 2 * LAYERS, "all_gather": 2 * LAYERS + 2},
        backward={"reduce_scatter": 1 + 2 * LAYERS, "all_gather": 1 + 2 * LAYERS, "all_reduce": _NORMS},
    ),
}
#: Two key-value heads on four ranks: the gradients of keys and of values are added up over the ranks, in each layer.
FEW_HEADS = replace(
    _PLAIN,
    config=Config(num_key_value_heads=2),
    plan=replicated_key_value_heads(),
    backward={"all_reduce": 1 + 2 * LAYERS + 2 * LAYERS},
)


def make(case: Case, mesh: Any = None) -> LlamaForCausalLM:
    """The same numbers every time; with a mesh, parallelised."""
    model, rng = case.kind(case.config), np.random.default_rng(0)
    for parameter in model.get_parameters():
        scale, shift = (0.3, 0.0) if parameter.ndim > 1 else (0.2, 1.0)
        parameter.set_data(Tensor((scale * rng.standard_normal(parameter.shape) + shift).astype(np.float32)))
    return model if mesh is None else parallelize_module(model, mesh, case.plan)


def tokens(config: Config, seed: int = 1, length: int = LENGTH) -> Tensor:
    return Tensor(np.random.default_rng(seed).integers(0, config.vocab_size, (BATCH, length)).astype(np.int32))
