"""Megatron's plans, for any library that has torch's styles."""

from __future__ import annotations

from typing import Any

__all__ = ["llama_plan", "mlp_plan", "whole_llama_plan"]


def mlp_plan(library: Any, dtensors: bool) -> dict[str, Any]:
    """Megatron's plan: plain tensors between modules, or DTensors."""
    plan = {
        "up": library.ColwiseParallel(use_local_output=not dtensors),
        "down": library.RowwiseParallel(use_local_output=not dtensors),
    }
    if dtensors:
        whole = library.Replicate()
        plan[""] = library.PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
    return plan


def llama_plan(library: Any, sequence_parallel: bool, dtensors: bool, tables: int = 2) -> dict[str, Any]:
    """Megatron's plan with or without sequence parallelism: plain tensors between modules where the plan allows it, or
    DTensors everywhere. ``tables`` is how many inputs besides x the block and its attention have."""
    whole = library.Replicate()
    part, rest = library.Shard(1) if sequence_parallel else whole, (None,) * tables
    column, row = (
        (lambda **layouts: library.ColwiseParallel(use_local_output=not dtensors, **layouts)),
        (lambda **layouts: library.RowwiseParallel(use_local_output=not dtensors, **layouts)),
    )
    plan = {
        "attention.wq": column(),
        "attention.wk": column(),
        "attention.wv": column(),
        "attention.wo": row(output_layouts=part),
        "feed_forward.w1": column(),
        "feed_forward.w3": column(),
        "feed_forward.w2": row(output_layouts=part),
    }
    if sequence_parallel:
        # In attention, the tables stay as they are.
        plan["attention_norm"] = plan["ffn_norm"] = library.SequenceParallel()
        plan["attention"] = library.PrepareModuleInput(
            input_layouts=(part, *rest), desired_input_layouts=(whole, *rest)
        )
        plan["feed_forward"] = library.PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))
    if dtensors:
        plan[""] = library.PrepareModuleInput(input_layouts=(part, *rest), desired_input_layouts=(part, *rest))
    return plan


def whole_llama_plan(library: Any, layers: int) -> dict[str, Any]:
    """Megatron's plan with sequence parallelism for `torch_models.Llama`."""
    part, whole = library.Shard(1), library.Replicate()
    plan = {
        "embedding": library.RowwiseParallel(input_layouts=whole, output_layouts=part),
        "norm": library.SequenceParallel(),
        "head": library.ColwiseParallel(input_layouts=part, output_layouts=whole),
    }
    block = llama_plan(library, sequence_parallel=True, dtensors=False)
    for i in range(layers):
        plan.update({f"layers.{i}.{path}": style for path, style in block.items()})
    return plan
