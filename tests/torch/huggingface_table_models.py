"""Small models of many architectures of transformers, with inputs: the rows of the table in docs/huggingface.md."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hyper_parallel import DTensor
from hyper_parallel.integrations.huggingface import parallelize_model
from hyper_parallel.integrations.huggingface.shares import shares_of
from tests.torch.huggingface_models import batch, build
from tests.torch.support import device, full

Inputs = dict[str, Any]

_SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "initializer_range": 0.2,
}
_TOWER_TEXT = {key: size for key, size in _SIZES.items() if key != "num_key_value_heads"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4}


class Model(NamedTuple):
    """A row of the table.

    Attributes:
        title: the name in the table.
        make: the model, with weights that are the same on every rank.
        inputs: those of a forward with a loss, or with logits of pairs.
        note: a particular of its plan, for the table.
    """

    title: str
    make: Callable[[], Any]
    inputs: Callable[[Any], Inputs]
    note: str = ""


def _made(cls: str, config: str, **sizes: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        torch.manual_seed(0)
        return _shaken(getattr(transformers, cls)(getattr(transformers, config)(**sizes)))

    return make


def _shaken(model: Any) -> Any:
    """Norms and biases are ones and zeros at first, which hides mistakes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "token" in name or "position" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval().to(device())


def _text(model: Any) -> Inputs:
    return batch(model.config.get_text_config().vocab_size)


def _unpadded(model: Any) -> Inputs:
    inputs = batch(model.config.get_text_config().vocab_size)
    return {"input_ids": inputs["input_ids"].clamp(min=3), "labels": inputs["labels"].clamp(min=3)}


def _image(model: Any, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    config = getattr(model.config, "vision_config", None) or model.config
    size = config.image_size
    return torch.randn(2, channels, size, size, generator=generator).to(device())


def _pixels(model: Any) -> Inputs:
    return {"pixel_values": _image(model), "labels": torch.tensor([0, 1], device=device())}


def _pairs(model: Any) -> Inputs:
    ids = batch(model.config.text_config.vocab_size)["input_ids"]
    return {"input_ids": ids, "pixel_values": _image(model)}


def _sound(model: Any) -> Inputs:
    generator = torch.Generator().manual_seed(4)
    frames = 2 * model.config.max_source_positions
    labels = batch(model.config.vocab_size)["input_ids"]
    sound = torch.randn(2, model.config.num_mel_bins, frames, generator=generator).to(device())
    return {"input_features": sound, "labels": labels}


def _patches(model: Any) -> Inputs:
    """Qwen3-VL: an image of 4 x 4 patches, which the merger makes 4 tokens of."""
    config = model.config
    vision, generator = config.vision_config, torch.Generator().manual_seed(5)
    features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    ids = [3, config.vision_start_token_id, *[config.image_token_id] * 4, config.vision_end_token_id, 4, 5]
    grid = torch.tensor([[1, 4, 4]])
    ids_tensor = torch.tensor([ids])
    return {
        "input_ids": ids_tensor.to(device()),
        "labels": ids_tensor.to(device()),
        "pixel_values": torch.randn(16, features, generator=generator).to(device()),
        "image_grid_thw": grid.to(device()),
        "mm_token_type_ids": (ids_tensor == config.image_token_id).int().to(device()),
    }


def _tiles(model: Any) -> Inputs:
    """Llama 4: an image of 4 x 4 patches, of which pixel shuffle makes 4 tokens."""
    config = model.config
    ids = torch.tensor([[3, 4, *[config.image_token_index] * 4, 5, 6]])
    return {"input_ids": ids.to(device()), "labels": ids.to(device()), "pixel_values": _image(model)[:1]}


def _llama_4() -> Any:
    """Release 5.24.0 reads an attribute of the text model's outputs that these do not have."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None
    return _made("Llama4ForConditionalGeneration", "Llama4Config", **_LLAMA_4)()


_MAMBA = {
    "vocab_size": 48,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 2,
    "time_step_rank": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_MAMBA_2 = {**_MAMBA, "num_heads": 8, "head_dim": 8, "chunk_size": 4}
_BAMBA = {
    **_SIZES,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
    "attn_layer_indices": [1],
}
_WHISPER = {
    "vocab_size": 48,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
    "init_std": 0.2,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_QWEN_VL = {
    "text_config": {
        **_SIZES,
        "vocab_size": 64,
        "head_dim": 8,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "in_channels": 3,
        "patch_size": 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,
    },
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
    "tie_word_embeddings": False,
}
_LLAMA_4 = {
    "text_config": {
        **_SIZES,
        **_EXPERTS,
        "intermediate_size": 48,
        "intermediate_size_mlp": 40,
        "head_dim": 8,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0],
    },
    "vision_config": {
        **_VISION,
        "image_size": 16,
        "intermediate_size": 128,  # four patches of hidden_size, which pixel shuffle joins
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "image_token_index": 40,
}

#: The models whose plan is made of blocks that are known here.
BLOCKS = [
    Model("Whisper", _made("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER), _sound),
    Model("ViT", _made("ViTForImageClassification", "ViTConfig", **_VISION), _pixels),
    Model(
        "CLIP",
        _made("CLIPModel", "CLIPConfig", text_config=_TOWER_TEXT, vision_config=_VISION, projection_dim=16),
        _pairs,
    ),
    Model(
        "SigLIP",
        _made("SiglipModel", "SiglipConfig", text_config={**_TOWER_TEXT, "projection_size": 32}, vision_config=_VISION),
        _pairs,
    ),
    Model(
        "ModernBERT",
        _made(
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            **{**_TOWER_TEXT, "local_attention": 4},
            cls_token_id=1,
            sep_token_id=2,
        ),
        _text,
    ),
    Model("Qwen3-VL", _made("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", **_QWEN_VL), _patches),
    Model(
        "Llama 4 with vision",
        _llama_4,
        _tiles,
        "the model of 5.24.0 ends in an error of its own, without the attribute that the test gives to its outputs",
    ),
    Model("Mamba", _made("MambaForCausalLM", "MambaConfig", **_MAMBA), _unpadded),
    Model("Mamba 2", _made("Mamba2ForCausalLM", "Mamba2Config", **_MAMBA_2, n_groups=4), _unpadded),
    Model(
        "Mamba 2, one group",
        _made("Mamba2ForCausalLM", "Mamba2Config", **_MAMBA_2, n_groups=1),
        _unpadded,
        "scan in full on every rank",
    ),
    Model(
        "Jamba",
        _made(
            "JambaForCausalLM",
            "JambaConfig",
            **{**_SIZES, **_EXPERTS},
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=4,
            experts_implementation="eager",
        ),
        _unpadded,
    ),
    Model("Bamba", _made("BambaForCausalLM", "BambaConfig", **_BAMBA, mamba_n_groups=4), _unpadded),
    Model(
        "Bamba, one group",
        _made("BambaForCausalLM", "BambaConfig", **_BAMBA, mamba_n_groups=1),
        _unpadded,
        "scan in full on every rank",
    ),
    Model("Doge", _made("DogeForCausalLM", "DogeConfig", **_SIZES, keep_window_size=4), _unpadded),
    Model(
        "Doge, mixture",
        _made("DogeForCausalLM", "DogeConfig", **{**_SIZES, **_EXPERTS, "num_experts": 16}, is_moe=True),
        _unpadded,
    ),
    Model("gpt-oss", lambda: build("gpt oss", experts_implementation="eager"), _text),
]


def _causal(architecture: str, **sizes: Any) -> Callable[[], Any]:
    """A model for text, in the sizes of all unless others are given."""
    return _made(f"{architecture}ForCausalLM", f"{architecture}Config", **{**_SIZES, **sizes})


_EAGER = {"experts_implementation": "eager"}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
_ROUTED = {**_EXPERTS, **_EAGER, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1}
_GROUPED = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

#: Name in `huggingface_models` -> title, of those that stand for their architecture.
TESTED = {
    "llama": "Llama",
    "llama, tied": "Llama, tied",
    "llama, few key-value heads": "Llama, two key-value heads",
    "qwen2": "Qwen 2",
    "qwen3": "Qwen 3",
    "mistral": "Mistral",
    "gemma": "Gemma",
    "gemma 2": "Gemma 2",
    "gemma 3": "Gemma 3 (text)",
    "gpt2": "GPT-2",
    "gpt neox": "GPT-NeoX",
    "phi 3": "Phi-3",
    "opt": "OPT",
    "bert": "BERT",
    "t5": "T5",
    "mixtral, eager": "Mixtral",
    "apertus": "Apertus",
    "granite, sinks": "Granite with sinks",
    "llama 4": "Llama 4 (text)",
}
#: Those that compute attention without a kernel.
_EAGER_ATTENTION = ("llama, few key-value heads", "gemma 2", "granite, sinks")


def _tested(name: str) -> Callable[[], Any]:
    return lambda: build(name)


def _eager(name: str) -> Callable[[], Any]:
    return lambda: build(name, **_EAGER)


#: All models whose plan is their own, or in `hyper_parallel.integrations.huggingface.known`.
OTHERS = [
    *(
        # The kernels for padded rows give NaN in double precision, on one process too.
        Model(title, _tested(name), _unpadded if name in _EAGER_ATTENTION else _text)
        for name, title in TESTED.items()
    ),
    Model("Falcon", _causal("Falcon", ffn_hidden_size=64, new_decoder_architecture=True, num_kv_heads=4), _text),
    *(
        Model(title, _eager(name), _text)
        for name, title in {
            "qwen3 moe": "Qwen 3 MoE",
            "deepseek 2": "DeepSeek-V2",
            "deepseek 3": "DeepSeek-V3",
            "glm 4 moe": "GLM 4 MoE",
        }.items()
    ),
    Model("Qwen 2 MoE", _causal("Qwen2Moe", **_ROUTED, shared_expert_intermediate_size=32), _text),
    Model("OLMoE", _causal("Olmoe", **_EXPERTS, **_EAGER), _text),
    Model("Phi", _causal("Phi"), _text),
    Model("OLMo", _causal("Olmo"), _text),
    Model("OLMo 2", _causal("Olmo2"), _text),
    Model("MiniCPM 3", _causal("MiniCPM3", **_LATENT), _text),
    Model("GLM 4 MoE Lite", _causal("Glm4MoeLite", **_ROUTED, **_LATENT, **_GROUPED), _text),
    Model("Cohere", _causal("Cohere"), _text),
    Model("Cohere 2", _causal("Cohere2", sliding_window=4), _text),
    Model("Granite", _causal("Granite"), _text),
    Model("StarCoder 2", _causal("Starcoder2"), _text),
    Model("GLM", _causal("Glm", head_dim=8), _text),
    Model("GLM 4", _causal("Glm4", head_dim=8), _text),
    Model("SmolLM 3", _causal("SmolLM3"), _text),
    Model("ERNIE 4.5", _causal("Ernie4_5", head_dim=8), _text),
    Model("EXAONE 4", _causal("Exaone4", sliding_window=4), _text),
    Model("Helium", _causal("Helium", head_dim=8), _text),
    Model("Nemotron", _causal("Nemotron"), _text),
    Model("SeedOss", _causal("SeedOss", head_dim=8), _text),
    Model("Arcee", _causal("Arcee"), _text),
    Model("MiniMax", _causal("MiniMax", **_EXPERTS, **_EAGER, head_dim=8, block_size=4), _text),
    Model("Ministral", _causal("Ministral", head_dim=8, sliding_window=4), _text),
]

#: All rows, in the order of the table.
ROWS = sorted([*BLOCKS, *OTHERS], key=lambda row: row.title.lower())


class Outcome(NamedTuple):
    """The outcome of one row on some ranks.

    Attributes:
        sharded: share of the parameters' bytes that is sharded.
        loss: difference to the loss of a single process, for a loss of size one.
        gradients: largest difference of a gradient, in parts of the largest of its parameter.
        where: the parameter of that.
        count: number of gradients that were compared.
    """

    sharded: float
    loss: float
    gradients: float
    where: str
    count: int


def compare(row: Model, mesh: Any) -> Outcome:
    """Run forward and backward of a row, in double precision, on one process and on the ranks of ``mesh``.

    Raises:
        AssertionError: where one of both has a gradient that the other lacks.
    """
    single = row.make().double()
    given = {name: x.double() if is_real(x) else x for name, x in row.inputs(single).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that less than half is sharded
        model = parallelize_model(copy.deepcopy(single), mesh)
    losses = []
    for one in (single, model):
        losses.append(loss_of(one(**given)))
        losses[-1].backward()
    own = {name: p.grad for name, p in single.named_parameters()}
    got = {name: p.grad for name, p in model.named_parameters()}
    assert list(own) == list(got)
    assert [name for name in own if (own[name] is None) != (got[name] is None)] == []
    assert all(isinstance(p.grad, DTensor) == isinstance(p, DTensor) for p in model.parameters() if p.grad is not None)
    wanted = {name: gradient for name, gradient in own.items() if gradient is not None}
    # A gradient that is zero on paper, that of a bias of keys, is noise: against the largest of all.
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in wanted.values())
    off = {
        name: (full(got[name]) - gradient).abs().max().item() / max(gradient.abs().max().item(), floor)
        for name, gradient in wanted.items()
    }
    worst = max(off, key=lambda name: off[name])
    found = shares_of(model)
    first, second = (loss.detach().item() for loss in losses)
    return Outcome(
        found.sharded_nbytes / found.nbytes, abs(first - second) / max(abs(first), 1.0), off[worst], worst, len(off)
    )


def is_real(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def loss_of(output: Any) -> torch.Tensor:
    if getattr(output, "loss", None) is not None:
        return output.loss
    pairs = output.logits_per_image
    return (pairs * torch.arange(1.0, pairs.numel() + 1, device=pairs.device).reshape(pairs.shape)).mean()
