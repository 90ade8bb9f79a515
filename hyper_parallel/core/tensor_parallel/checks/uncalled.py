"""Layers that their parent never calls: `MultiheadAttention` of both frameworks reads their weights directly."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.tensor_parallel.checks.attention import Match
from hyper_parallel.core.tensor_parallel.styles.weight import is_fused_attention

__all__ = ["check_called"]


def check_called(matches: list[Match], modules: dict[str, Any]) -> None:
    """Refuse a style for a layer whose parent reads its weight without calling the layer.

    Raises:
        ValueError: for such a layer. The message names its parent and two remedies.
    """
    for path, module, style in matches:
        above = path.rpartition(".")[0]
        around = modules.get(above)
        if around is None or around is module or not is_fused_attention(around):
            continue
        raise ValueError(
            f"the plan has {type(style).__name__} for {path!r}, but the {type(around).__name__} {above!r} reads the "
            f"weight of {path!r} without calling the layer: the style would never run. Use NoParallel() for the whole "
            "module. Or write attention with layers for query, key, value and output, with ColwiseParallel() and "
            "RowwiseParallel()"
        )
