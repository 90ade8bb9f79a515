"""How the model is spread over the tensor-parallel processes: one plan for both frameworks.

The residual stream is split along the sequence (dimension 1 of (batch, length, hidden_size)). It is gathered
in front of attention and feed-forward, whose weights are split over heads and hidden units, and
what they return is summed and split along the sequence again.
"""

from __future__ import annotations

from hyper_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
)


def tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Module path (`*` matches one segment) -> style."""
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(Shard(1), None, None),  # x, and the plain rotary tables cos and sin
            desired_input_layouts=(Replicate(), None, None),
        ),
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
