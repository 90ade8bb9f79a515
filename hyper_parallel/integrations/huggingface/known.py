"""Plans for architectures of transformers that have no plan of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.integrations.huggingface.blocks import ARCHITECTURES, is_known_block
from hyper_parallel.integrations.huggingface.local import LocalParametersParallel

__all__ = ["known_architectures", "known_expert_plan", "known_plan", "reads_whole_features"]

NamedPlan = dict[str, str | ParallelStyle]


def _gpt2(config: Any) -> NamedPlan:
    heads = config.num_attention_heads
    return {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": ColwiseParallel(heads=(heads, heads, heads)),
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.q_attn": ColwiseParallel(heads=heads),
        "h.*.crossattention.c_attn": ColwiseParallel(heads=(heads, heads)),
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }


def _opt(config: Any) -> NamedPlan:
    return {
        "decoder.embed_tokens": "embedding_rowwise",
        "decoder.layers.*.self_attn.[qkv]_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    }


def _falcon(config: Any) -> NamedPlan:
    # One key and value head for all query heads, or slopes that the model creates for all heads: the model's own code
    # cannot compute with some of the heads.
    shared = (config.multi_query and not config.new_decoder_architecture) or config.alibi
    return {
        "word_embeddings": "embedding_rowwise",
        "h.*.self_attention.query_key_value": "colwise_gather_output" if shared else ColwiseParallel(packed=1),
        "h.*.self_attention.dense": "rowwise_split_input" if shared else "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }


def _bert(config: Any) -> NamedPlan:
    return {
        "embeddings.word_embeddings": "embedding_rowwise",
        "encoder.layer.*.*attention.self.query": "colwise",
        "encoder.layer.*.*attention.self.key": "colwise",
        "encoder.layer.*.*attention.self.value": "colwise",
        "encoder.layer.*.*attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }


def _t5(config: Any) -> NamedPlan:
    attention = "*.block.*.layer.*.*Attention"
    return {
        "shared": "embedding_rowwise",
        f"{attention}.[qkv]": "colwise",
        f"{attention}.o": "rowwise",
        f"{attention}.relative_attention_bias": "colwise",  # (buckets, heads)
        "*.block.*.layer.*.DenseReluDense.wi*": "colwise",
        "*.block.*.layer.*.DenseReluDense.wo": "rowwise",
    }


#: ``config.model_type`` -> function from the config to the plan of the base model; and the path of the head over the
#: vocabulary.
_PLANS: dict[str, tuple[Callable[[Any], NamedPlan], str]] = {
    "gpt2": (_gpt2, "lm_head"),
    "opt": (_opt, "lm_head"),
    "falcon": (_falcon, "lm_head"),
    "bert": (_bert, "cls.predictions.decoder"),
    "t5": (_t5, "lm_head"),
}

#: Classes of experts that take all tokens for each expert, scaled.
_SCALED = ("Llama4TextExperts",)

#: Modules next to projections of sharded features that read and return full features.
_WHOLE = {"opt": re.compile(r"(.*\.)?layers\.\d+\.(self_attn|final)_layer_norm")}


def known_architectures() -> tuple[str, ...]:
    """Return names of architectures for which this file has a plan, and transformers has none."""
    return (*_PLANS, *ARCHITECTURES)


def known_plan(model: Any) -> NamedPlan:
    """Return the plan for a model's architecture; empty if the architecture is unknown here."""
    make, head = _PLANS.get(model.config.model_type, (None, ""))
    if make is None:
        return {}
    plan: NamedPlan = {head: "colwise_gather_output"}
    if model.config.model_type == "bert":  # BERT holds the bias of the head a second time
        plan["cls.predictions"] = LocalParametersParallel({"bias": Shard(0)})
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    return {**{prefix + key: style for key, style in make(model.config).items()}, **plan}


def known_expert_plan(model: Any) -> NamedPlan:
    """Return a plan for full experts if the architecture has none of its own, else an empty plan."""
    plan: NamedPlan = {}
    for path, module in model.named_modules():
        if type(module).__name__ in _SCALED:
            experts = re.sub(r"\.\d+\.", ".*.", path)
            plan |= {f"{experts}.{name}": "grouped_gemm" for name, _ in module.named_parameters()}
            plan[experts] = "ep_scaled_experts"
    return plan


def reads_whole_features(model: Any, path: str) -> bool:
    """Return whether a module is known to compute with features that are equal on every rank."""
    if is_known_block(model.get_submodule(path.rpartition(".")[0])):
        return True
    known = _WHOLE.get(model.config.model_type)
    return known is not None and known.fullmatch(path) is not None
