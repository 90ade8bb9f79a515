"""The plan that spreads the model over the processes, the same for both frameworks.

Along the mesh dimension "tp" it is tensor parallel. The residual stream is split along the sequence (dimension 1 of
(batch, length, hidden_size)). It is gathered in front of attention and feed-forward, whose weights are split over heads
and hidden units. Their outputs are summed and split along the sequence again.

Along the mesh dimension "dp" each row of processes has its own part of the batch. It also has its own part of every
parameter: `fully_shard` gathers a layer when it is needed, and averages its gradients.

With experts, each process has some of them in whole. It sends the others the tokens of its part of batch and sequence.
`fully_shard` leaves experts alone: their gradients have come from all processes.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    ExpertParallel,
    ParallelStyle,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    fully_shard,
    parallelize_module,
)


def spread(model: Any, mesh: DeviceMesh) -> None:
    """Spread a `LlamaForCausalLM` over a mesh with the dimensions "dp" and "tp", in place."""
    has_experts = hasattr(model.model.layers[0].mlp, "experts")
    plan = tensor_parallel_plan()
    if has_experts:
        plan = {path: style for path, style in plan.items() if not path.startswith("model.layers.*.mlp")}
        plan["model.layers.*.mlp"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=True
        )
        plan["model.layers.*.mlp.gate"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    parallelize_module(model, mesh["tp"], plan)
    if has_experts:
        both = mesh["dp", "tp"]._flatten("ep")
        experts = ExpertParallel(input_layout=Shard(0), tp_dim="tp")
        parallelize_module(model, both, {"model.layers.*.mlp.experts": experts})
    if mesh["dp"].size() > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])


def part_of_batch(batch: Any, mesh: DeviceMesh) -> Any:
    """The samples of a batch that this process trains on."""
    size, rank = len(batch) // mesh["dp"].size(), mesh.get_local_rank("dp")
    return batch[rank * size : (rank + 1) * size]


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
