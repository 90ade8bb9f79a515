"""Plans for blocks of transformers, by the class of the block, for models without a complete plan.

A block is a module with a forward of its own: attention, an MLP, a mixer, an embedding. A model with several towers
(text and images) consists of the same blocks, and needs no plan as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Replicate, Shard
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.replicated import NoParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.integrations.huggingface.experts import BiasedExpertsParallel
from hyper_parallel.integrations.huggingface.local import LocalParametersParallel
from hyper_parallel.integrations.huggingface.mixers import ColumnsOfHeads, LocalMixer, RowsReadByParts

__all__ = ["ARCHITECTURES", "block_plan", "is_known_block"]

BlockPlan = dict[str, str | ParallelStyle]
#: Function from the block and the number of ranks to styles by path below the block; "" is the block itself.
MakePlan = Callable[[Any, int], BlockPlan]

_COLUMNS, _ROWS, _GATHERED = "colwise", "rowwise", "colwise_gather_output"


def _fixed(columns: str, rows: str) -> MakePlan:
    plan: BlockPlan = {**dict.fromkeys(columns.split(), _COLUMNS), **dict.fromkeys(rows.split(), _ROWS)}
    return lambda block, ranks: dict(plan)


def _always(**plan: str) -> MakePlan:
    return lambda block, ranks: dict(plan)


def _fused_attention(projection: str, output: str) -> MakePlan:
    """Return the plan of attention with query, key and value concatenated in a single weight."""

    def make(block: Any, ranks: int) -> BlockPlan:
        size = block.head_dim
        heads = getattr(block, projection).weight.shape[0] // (3 * size)
        if heads % ranks:
            return {projection: _GATHERED, output: "rowwise_split_input"}
        return {projection: ColwiseParallel(heads=(heads, heads, heads)), output: _ROWS}

    return make


def _packed_mlp(projection: str, output: str) -> MakePlan:
    """Return the plan of an MLP with two equal matrices in a single weight."""
    return lambda block, ranks: {projection: ColwiseParallel(packed=2), output: RowwiseParallel()}


def _gathered_mixer() -> BlockPlan:
    """Return a plan with sharded projections, where every rank computes convolution and scan in full."""
    return {"in_proj": _GATHERED, "out_proj": "rowwise_split_input"}


def _names(block: Any, *names: str) -> list[str]:
    """Return those of the given parameter names that the block has. Biases may be absent."""
    return [name for name in names if name in dict(block.named_parameters())]


def _mamba(block: Any, ranks: int) -> BlockPlan:
    """Return the plan of a Mamba mixer, with one scan for each inner channel.

    The scan of each channel reads the time step, B and C, which depend on all channels.
    """
    channels = block.intermediate_size
    if channels % ranks:
        return _gathered_mixer()
    names = _names(block, "A_log", "D", "conv1d.weight", "conv1d.bias", "dt_proj.weight", "dt_proj.bias")
    own = LocalMixer(dict.fromkeys(names, Shard(0)), {"intermediate_size": channels // ranks})
    plan: BlockPlan = {
        "": own,
        "in_proj": ColwiseParallel(packed=2),
        "x_proj": RowsReadByParts(),
        "out_proj": _ROWS,
    }
    if hasattr(block, "dt_layernorm"):  # Jamba's norms, which read the full output
        plan["x_proj"] = RowwiseParallel()
        plan |= {
            f"{name}_layernorm": NoParallel(local_output_grad_placements=(Partial(),)) for name in ("dt", "b", "c")
        }
    return plan


def _mamba_2(block: Any, ranks: int) -> BlockPlan:
    """Return the plan of a Mamba 2 mixer, with one scan for each head.

    Heads of a group share B and C, and each group has its own norm.
    """
    heads, groups = block.num_heads, block.n_groups
    if groups % ranks or heads % ranks:
        return _gathered_mixer()
    inner, states = block.intermediate_size, groups * block.ssm_state_size
    convolved = PackedShard(0, (inner, states, states))
    placements = dict.fromkeys(_names(block, "A_log", "D", "dt_bias", "norm.weight"), Shard(0))
    placements |= dict.fromkeys(_names(block, "conv1d.weight", "conv1d.bias"), convolved)
    sizes = {name: getattr(block, name) // ranks for name in ("num_heads", "n_groups", "intermediate_size", "conv_dim")}
    return {
        "": LocalMixer(placements, sizes),
        "in_proj": ColumnsOfHeads(packed=(inner, inner, states, states, heads)),
        "out_proj": _ROWS,
    }


def _doge_attention(block: Any, ranks: int) -> BlockPlan:
    """Return the plan of Doge's attention, whose mask is computed from the values of all heads.

    A layer maps these values to one number for each key and value head.
    """
    heads = block.A.shape[0]
    if heads % ranks:
        return {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), _GATHERED), "o_proj": "rowwise_split_input"}
    return {
        "": LocalParametersParallel({"A": Shard(0)}),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _COLUMNS),
        "dt_proj": RowwiseParallel(output_layouts=Shard(-1)),
        "o_proj": _ROWS,
    }


def _sinking_attention(block: Any, ranks: int) -> BlockPlan:
    """Return the plan of attention with sinks.

    The sink of a head is a number that takes a share of its attention weights.
    """
    return {
        "": LocalParametersParallel({"sinks": Shard(0)}),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _COLUMNS),
        "o_proj": _ROWS,
    }


def _biased_experts(block: Any, ranks: int) -> BlockPlan:
    """Return the plan of experts with biases, whose gate and up features alternate."""
    if block.intermediate_size % ranks:
        raise ValueError(
            f"{type(block).__name__} has {block.intermediate_size} features inside each expert, which do not divide "
            f"over {ranks} ranks: use a mesh whose size divides the features, or give each rank complete experts with "
            "expert_parallel=True"
        )
    return {
        "": BiasedExpertsParallel(
            {
                "gate_up_proj": Shard(2),
                "gate_up_proj_bias": Shard(1),
                "down_proj": Shard(1),
                "down_proj_bias": Replicate(),
            }
        )
    }


_SEPARATE = _fixed("q_proj k_proj v_proj", "o_proj")
_SEPARATE_OUT = _fixed("q_proj k_proj v_proj", "out_proj")
_TWO_LAYERS = _fixed("fc1", "fc2")
_GATED = _fixed("gate_proj up_proj", "down_proj")
_HEAD = _always(lm_head=_GATHERED)
_EMBEDDING = _always(embed_tokens="embedding_rowwise")

#: Architectures, by ``config.model_type``, that have no plan at all and consist of blocks known here.
ARCHITECTURES = ("whisper", "vit", "clip", "siglip", "modernbert", "mamba", "mamba2")

#: Class of a block -> function that returns its plan.
_BLOCKS: dict[str, MakePlan] = {
    # Whisper
    "WhisperAttention": _SEPARATE_OUT,
    "WhisperEncoderLayer": _TWO_LAYERS,
    "WhisperDecoderLayer": _TWO_LAYERS,
    "WhisperDecoder": _EMBEDDING,
    "WhisperForConditionalGeneration": _always(proj_out=_GATHERED),
    "WhisperForCausalLM": _always(proj_out=_GATHERED),
    # ViT
    "ViTAttention": _SEPARATE,
    "ViTMLP": _TWO_LAYERS,
    "ViTPooler": _always(dense=_GATHERED),
    # CLIP
    "CLIPAttention": _SEPARATE_OUT,
    "CLIPMLP": _TWO_LAYERS,
    "CLIPTextEmbeddings": _always(token_embedding="embedding_rowwise"),
    "CLIPModel": _always(visual_projection=_GATHERED, text_projection=_GATHERED),
    "CLIPTextModelWithProjection": _always(text_projection=_GATHERED),
    "CLIPVisionModelWithProjection": _always(visual_projection=_GATHERED),
    # SigLIP
    "SiglipAttention": _SEPARATE_OUT,
    "SiglipMLP": _TWO_LAYERS,
    "SiglipTextEmbeddings": _always(token_embedding="embedding_rowwise"),
    "SiglipTextModel": _always(head=_GATHERED),
    # ModernBERT
    "ModernBertEmbeddings": _always(tok_embeddings="embedding_rowwise"),
    "ModernBertAttention": _fused_attention("Wqkv", "Wo"),
    "ModernBertMLP": _packed_mlp("Wi", "Wo"),
    "ModernBertPredictionHead": _always(dense=_GATHERED),
    "ModernBertForMaskedLM": _always(decoder=_GATHERED),
    # Qwen3-VL
    "Qwen3VLVisionAttention": _fused_attention("qkv", "proj"),
    "Qwen3VLVisionMLP": _fixed("linear_fc1", "linear_fc2"),
    "Qwen3VLVisionPatchMerger": _fixed("linear_fc1", "linear_fc2"),
    "Qwen3VLTextAttention": _SEPARATE,
    "Qwen3VLTextMLP": _GATED,
    # Llama 4 with images
    "Llama4VisionAttention": _SEPARATE,
    "Llama4VisionMLP": _TWO_LAYERS,
    "Llama4VisionMLP2": _TWO_LAYERS,
    "Llama4TextModel": _EMBEDDING,
    # Mamba, Mamba 2 and models with layers of them
    "MambaMixer": _mamba,
    "MambaModel": _always(embeddings="embedding_rowwise"),
    "MambaForCausalLM": _HEAD,
    "Mamba2Mixer": _mamba_2,
    "Mamba2Model": _always(embeddings="embedding_rowwise"),
    "Mamba2ForCausalLM": _HEAD,
    "JambaMambaMixer": _mamba,
    "JambaAttention": _SEPARATE,
    "JambaMLP": _GATED,
    "JambaModel": _EMBEDDING,
    "BambaMixer": _mamba_2,
    "BambaAttention": _SEPARATE,
    "BambaMLP": _GATED,
    # Doge
    "DogeAttention": _doge_attention,
    "DogeModel": _EMBEDDING,
    # gpt-oss
    "GptOssAttention": _sinking_attention,
    "GptOssExperts": _biased_experts,
}


def block_plan(model: Any, ranks: int) -> BlockPlan:
    """Return the plan for all known blocks of a model, by path. ``*`` stands for the number of a layer.

    Args:
        model: model of transformers.
        ranks: number of ranks of tensor parallelism.

    Raises:
        ValueError: for a block that so many ranks cannot share.
    """
    plan: BlockPlan = {}
    for path, module in model.named_modules():
        if not is_known_block(module):
            continue
        for below, style in _BLOCKS[type(module).__name__](module, ranks).items():
            key = re.sub(r"\.\d+(?=\.|$)", ".*", ".".join(filter(None, (path, below))))
            plan[key] = style
    return plan


def is_known_block(module: Any) -> bool:
    """Return whether this file has a plan for the block ``module``. Layers of such a block that the plan does not name
    read and return full features."""
    cls = type(module)
    return cls.__name__ in _BLOCKS and cls.__module__.startswith("transformers.models.")
