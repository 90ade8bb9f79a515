"""Tiny models of transformers with random weights, and the jobs that run on them."""

from __future__ import annotations

from typing import Any

import torch

from tests.torch.support import device

BATCH, LENGTH = 2, 7

_SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # the default gives logits that are nearly equal
}
_GPT2: dict[str, Any] = {
    "vocab_size": 53,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
# Kernels for grouped products want rows of 16 bytes, on every rank.
_MOE = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}

#: Architecture and differences from the sizes above.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, few key-value heads": ("Llama", {"num_key_value_heads": 2, "attn_implementation": "eager"}),
    "llama, one key-value head": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama, odd sizes": (
        "Llama",
        {"vocab_size": 47, "hidden_size": 36, "intermediate_size": 41, "head_dim": 6, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 8, "num_key_value_heads": 2}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 4}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma 2": (
        "Gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 5.0,
            "sliding_window": 4,
            "attn_implementation": "eager",
        },
    ),
    "gemma 3": (
        "Gemma3",
        {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    ),
    "gpt2": ("GPT2", {}),
    "gpt2, eager": ("GPT2", {"attn_implementation": "eager", "scale_attn_by_inverse_layer_idx": True}),
    "mixtral": ("Mixtral", _MOE),
    "mixtral, eager": ("Mixtral", {**_MOE, "experts_implementation": "eager"}),
    "apertus": ("Apertus", {}),
    "llama, heads that do not divide": (
        "Llama",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
    ),
    "qwen3, heads that do not divide": ("Qwen3", {"head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "gpt2, three heads": ("GPT2", {"n_head": 3, "n_embd": 36}),
    "gpt2, upcast": ("GPT2", {"attn_implementation": "eager", "reorder_and_upcast_attn": True}),
    "gpt2, heads that do not divide": ("GPT2", {"n_head": 5, "n_embd": 40}),
    "qwen3 moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
        },
    ),
}

_FALCON = {"ffn_hidden_size": 40, "multi_query": False, "new_decoder_architecture": False}

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
#: Cases that `test_huggingface_zoo` runs besides some of those.
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "gpt neox": ("GPTNeoX", {}),
    "phi 3": ("Phi3", {"num_key_value_heads": 2}),
    "falcon": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, as many key-value heads": ("Falcon", {**_FALCON, "bias": True, "attn_implementation": "eager"}),
    "falcon, one key-value head": ("Falcon", {**_FALCON, "multi_query": True}),
    "falcon, alibi": ("Falcon", {**_FALCON, "alibi": True}),
    "deepseek 2": (
        "DeepseekV2",
        {
            **_MOE,
            **_LATENT,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "granite, sinks": ("GraniteSWA", {"num_key_value_heads": 2, "sliding_window": 4}),
    "opt": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "opt, untied": ("OPT", {"ffn_dim": 40, "word_embed_proj_dim": 16, "dropout": 0.0, "tie_word_embeddings": False}),
    "bert": ("Bert", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "t5": ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}),
    "t5, gated": (
        "T5",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 40,
            "num_layers": 1,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    ),
}

#: Six experts in three groups, of which a token may use two: routes of their own, with a bias that no gradient changes.
_GROUPED = {
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

#: Cases with experts of other kinds.
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek 3": ("DeepseekV3", {**_GROUPED, **_LATENT}),
    "glm 4 moe": ("Glm4Moe", {**_GROUPED, "head_dim": 8, "use_qk_norm": True, "attention_bias": True}),
    "gpt oss": ("GptOss", {**_MOE, "head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"}),
    "llama 4": (
        "Llama4",
        {**_MOE, "intermediate_size_mlp": 40, "head_dim": 8, "interleave_moe_layer_step": 1, "no_rope_layers": [1, 0]},
    ),
}

#: Classes that are not called after their architecture and ``ForCausalLM``.
_CLASSES = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration"}
#: Those with a configuration for text alone.
_TEXT = ("Gemma3", "Llama4")
_T5_SIZES = {"vocab_size": 48, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}


def build(case: str, **changes: Any) -> Any:
    """The model of a case, the same on every rank."""
    import transformers  # takes seconds: by the workers that need it, not by pytest

    architecture, differs = (CASES | FURTHER | SPARSE)[case]
    sizes = {**{"GPT2": _GPT2, "T5": _T5_SIZES}.get(architecture, _SIZES), **differs, **changes}
    if architecture in _TEXT:
        config = getattr(transformers, f"{architecture}TextConfig")(**sizes)
        cls = getattr(transformers, f"{architecture}ForCausalLM")
    else:
        config = getattr(transformers, f"{architecture}Config")(**sizes)
        cls = getattr(transformers, _CLASSES.get(architecture, f"{architecture}ForCausalLM"))
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():  # norms and biases are ones and zeros, which hide mistakes
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model.eval().to(device())


def batch(vocabulary: int) -> dict[str, torch.Tensor]:
    """Ids, a mask that pads the second row on the left, and labels that ignore the padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (BATCH, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, :2], mask[1, :2] = 0, 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: x.to(device()) for name, x in inputs.items()}
