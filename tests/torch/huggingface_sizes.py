"""Models of transformers in the sizes of released ones, without data: the second table of docs/huggingface.md."""

from __future__ import annotations

from typing import Any, NamedTuple

from hyper_parallel import init_device_mesh
from hyper_parallel.integrations.huggingface import parallelize_model
from hyper_parallel.integrations.huggingface.shares import shares_of
from hyper_parallel.platform.dry import dry_world

__all__ = ["SIZES", "Share", "Size", "share"]

#: The ranks of tensor parallelism, unless a model's heads or experts do not allow it.
RANKS = 8


class Size(NamedTuple):
    """A row of the table.

    Attributes:
        title: the name in the table.
        cls: its class in transformers.
        config: the class of its configuration.
        sizes: what its released configuration has besides the defaults of transformers.
        billions: its parameters as published, with the number of digits that was published.
        ranks: the ranks of tensor parallelism.
        options: keywords of `parallelize_model`.
    """

    title: str
    cls: str
    config: str
    sizes: dict[str, Any]
    billions: str
    ranks: int = RANKS
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Share(NamedTuple):
    """The outcome of one row.

    Attributes:
        billions: the parameters of the model that was made.
        sharded: share of the parameters' bytes that is sharded.
        rank_gib: GiB of parameters on the first rank, in bfloat16.
        whole: the largest parameters that every rank holds whole, with their share of all bytes.
    """

    billions: float
    sharded: float
    rank_gib: float
    whole: dict[str, float]


def _decoder(hidden: int, inner: int, layers: int, heads: int, key_value_heads: int, words: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": words,
    }


def _causal(
    title: str, architecture: str, sizes: dict[str, Any], billions: str, ranks: int = RANKS, **options: Any
) -> Size:
    return Size(title, f"{architecture}ForCausalLM", f"{architecture}Config", sizes, billions, ranks, options)


_VIT_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_SO400M = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}

SIZES = [
    _causal("Llama 3 8B", "Llama", _decoder(4096, 14336, 32, 32, 8, 128256), "8.03"),
    _causal("Llama 3 70B", "Llama", _decoder(8192, 28672, 80, 64, 8, 128256), "70.6"),
    _causal("Qwen 2.5 72B", "Qwen2", _decoder(8192, 29568, 80, 64, 8, 152064), "72.7"),
    _causal("Qwen 3 32B", "Qwen3", {**_decoder(5120, 25600, 64, 64, 8, 151936), "head_dim": 128}, "32.8"),
    _causal(
        "Qwen 3 30B-A3B",
        "Qwen3Moe",
        {**_decoder(2048, 6144, 48, 32, 4, 151936), "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128},
        "30.5",
    ),
    _causal(
        "Qwen 3 235B-A22B",
        "Qwen3Moe",
        {**_decoder(4096, 12288, 94, 64, 4, 151936), "head_dim": 128, "moe_intermediate_size": 1536},
        "235",
    ),
    _causal("Mixtral 8x7B", "Mixtral", _decoder(4096, 14336, 32, 32, 8, 32000), "46.7"),
    _causal("gpt-oss 20b", "GptOss", {**_decoder(2880, 2880, 24, 64, 8, 201088), "num_local_experts": 32}, "20.9"),
    _causal("gpt-oss 120b", "GptOss", {**_decoder(2880, 2880, 36, 64, 8, 201088), "num_local_experts": 128}, "116.8"),
    _causal("DeepSeek-V3", "DeepseekV3", {}, "671"),
    _causal(
        "Gemma 3 27B (text)",
        "Gemma3",
        {**_decoder(5376, 21504, 62, 32, 16, 262208), "head_dim": 128, "query_pre_attn_scalar": 168},
        "27.0",
    )._replace(config="Gemma3TextConfig"),
    _causal("GLM 4.5 Air", "Glm4Moe", {"head_dim": 128, "attention_bias": True}, "107"),
    _causal(
        "GLM 4.5",
        "Glm4Moe",
        {
            **_decoder(5120, 12288, 92, 96, 8, 151552),
            "head_dim": 128,
            "attention_bias": True,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "first_k_dense_replace": 3,
            "use_qk_norm": True,
        },
        "353",
    ),
    Size(
        "Llama 4 Scout, with vision",
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "text_config": _decoder(5120, 8192, 48, 40, 8, 202048),
            "vision_config": {
                "hidden_size": 1408,
                "intermediate_size": 5632,
                "num_hidden_layers": 34,
                "num_attention_heads": 16,
                "image_size": 336,
                "vision_output_dim": 4096,
            },
        },
        "109",
    ),
    _causal("Command R+", "Cohere", {**_decoder(12288, 33792, 64, 96, 8, 256000), "use_qk_norm": True}, "104"),
    _causal("OLMo 2 32B", "Olmo2", _decoder(5120, 27648, 64, 40, 8, 100352), "32.2"),
    _causal(
        "Falcon 40B",
        "Falcon",
        {
            "vocab_size": 65024,
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
        "41.3",
    ),
    _causal(
        "GPT-NeoX 20B",
        "GPTNeoX",
        {
            "vocab_size": 50432,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
        },
        "20.6",
    ),
    _causal("Phi-3 mini", "Phi3", _decoder(3072, 8192, 32, 32, 32, 32064), "3.82"),
    Size(
        "GPT-2 XL",
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 1600, "n_layer": 48, "n_head": 25},
        "1.56",
        5,
    ),
    _causal("Mamba 2.8B", "Mamba", {"hidden_size": 2560, "num_hidden_layers": 64}, "2.77"),
    _causal(
        "Mamba 2 2.7B",
        "Mamba2",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 64,
            "vocab_size": 50288,
            "num_heads": 80,
            "head_dim": 64,
            "n_groups": 1,
            "state_size": 128,
            "tie_word_embeddings": True,
        },
        "2.70",
    ),
    _causal("Jamba v0.1", "Jamba", {}, "51.6"),
    _causal(
        "Bamba 9B",
        "Bamba",
        {"vocab_size": 128256, "attn_layer_indices": [9, 18, 27], "mamba_d_head": 64, "mamba_d_state": 128},
        "9.78",
    ),
    Size(
        "Qwen3-VL 8B",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": {**_decoder(4096, 12288, 36, 32, 8, 151936), "head_dim": 128},
            "vision_config": {
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_heads": 16,
                "out_hidden_size": 4096,
                "num_position_embeddings": 2304,
                "patch_size": 16,
            },
            "tie_word_embeddings": False,
        },
        "8.77",
    ),
    Size(
        "Whisper large v3",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 51866,
            "num_mel_bins": 128,
            "d_model": 1280,
            "encoder_layers": 32,
            "decoder_layers": 32,
            "encoder_attention_heads": 20,
            "decoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "decoder_ffn_dim": 5120,
        },
        "1.54",
        4,
    ),
    Size("ViT-L/16", "ViTForImageClassification", "ViTConfig", _VIT_L, "0.304"),
    Size(
        "CLIP L/14",
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
            },
            "vision_config": {**_VIT_L, "patch_size": 14},
            "projection_dim": 768,
        },
        "0.428",
        4,
    ),
    Size(
        "SigLIP so400m/14, 384 pixels",
        "SiglipModel",
        "SiglipConfig",
        {
            "text_config": {**_SO400M, "projection_size": 1152},
            "vision_config": {**_SO400M, "image_size": 384, "patch_size": 14},
        },
        "0.878",
    ),
    Size(
        "ModernBERT large",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {"hidden_size": 1024, "intermediate_size": 2624, "num_hidden_layers": 28, "num_attention_heads": 16},
        "0.395",
    ),
    Size(
        "BERT large",
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        "0.335",
    ),
    Size(
        "T5 11B",
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128},
        "11.3",
    ),
]


def share(row: Size) -> Share:
    """Make a model without data, apply its plan as the first of its ranks, and count."""
    import transformers

    with dry_world(row.ranks) as platform, platform.without_data():
        mesh = init_device_mesh(mesh_dim_names=("tp",))
        model = getattr(transformers, row.cls)(getattr(transformers, row.config)(**row.sizes))
        parallelize_model(model, mesh, **row.options)
        found = shares_of(model)
        count = sum(p.numel() for p in model.parameters())
        own = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
    whole = {name: size / found.nbytes for name, size in found.whole.items()}
    return Share(count / 1e9, found.sharded_nbytes / found.nbytes, own * 2 / 2**30, whole)
