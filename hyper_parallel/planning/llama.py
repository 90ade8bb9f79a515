"""Sizes of models by name, and the plan of Llama."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.tensor_parallel.style import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = ["MODELS", "llama_plan"]


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int, vocabulary: int) -> dict:
    return {
        "hidden": hidden,
        "intermediate": intermediate,
        "layers": layers,
        "heads": heads,
        "key_value_heads": key_value_heads,
        "vocabulary": vocabulary,
    }


#: name -> the sizes that `Platform.make_decoder` takes, from the configurations published with the models.
MODELS: dict[str, dict[str, int]] = {
    "llama-tiny": _sizes(64, 128, 4, 8, 8, 256),
    "llama-2-7b": _sizes(4096, 11008, 32, 32, 32, 32000),
    "llama-2-70b": _sizes(8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": _sizes(4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": _sizes(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _sizes(16384, 53248, 126, 128, 8, 128256),
}


def llama_plan(sequence: bool = True) -> dict[str, ParallelStyle]:
    """Return the plan of a Llama with Hugging Face's module names. Its attention is called with x and tables of cosines
    and sines.

    Args:
        sequence: whether the residual stream is sharded along the sequence (Korthikanti et al. 2022).

    Example:
        >>> llama_plan()["model.norm"]
        SequenceParallel(sequence_dim=1, use_local_output=False)
    """
    layer = "model.layers.*"
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate()
        ),
        f"{layer}.self_attn.[qkv]_proj": ColwiseParallel(),
        f"{layer}.mlp.gate_proj": ColwiseParallel(),
        f"{layer}.mlp.up_proj": ColwiseParallel(),
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate())
    if sequence:
        into: Any = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
        plan[f"{layer}.self_attn"] = PrepareModuleInput(**into)
        plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for norm in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm"):
            plan[norm] = SequenceParallel()
    return plan
