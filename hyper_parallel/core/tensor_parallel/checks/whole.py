"""Check that a plan does not shard recurrent layers and fused attention, which can only be replicated."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.checks.attention import Match
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.context import ContextParallel
from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNormParallel
from hyper_parallel.core.tensor_parallel.styles.parameters import ParameterParallel
from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel
from hyper_parallel.core.tensor_parallel.styles.weight import WeightParallel, is_fused_attention, recurrent_kind

__all__ = ["check_whole"]

#: Styles of modules whose samples, positions or experts are independent.
_OF_OTHERS = (SequenceParallel, HeadNormParallel, ExpertParallel)
_CUTTING = (*_OF_OTHERS, ContextParallel, WeightParallel)
_STEPS = "each step needs the step before it and all hidden units"
_POSITIONS = "each position needs all others, and one function reads all weights"


def check_whole(matches: list[Match], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Raise ValueError if a style shards a module that needs all of its weights or positions on each rank.

    Raises:
        ValueError: for such a style. The message names the module, the reason and the style that computes it in full.
    """
    for path, module, style in matches:
        kind, above = recurrent_kind(module, mesh.platform), path.rpartition(".")[0]
        if isinstance(style, _CUTTING) and _is_part_of_layer(path, module, modules, mesh):
            raise _refusal(path, style, modules[above], _STEPS, f"{above or 'the module'!r}")
        refused: tuple[type, ...] = ()
        if kind:
            # A cell computes with sharded weights, operation by operation.
            refused = (*_OF_OTHERS, ContextParallel, *((ParameterParallel,) if kind == "layer" else ()))
        elif is_fused_attention(module):
            refused = _OF_OTHERS
        if isinstance(style, refused):
            raise _refusal(path, style, module, _STEPS if kind else _POSITIONS, "it")


def _is_part_of_layer(path: str, module: Any, modules: dict[str, Any], mesh: DeviceMesh) -> bool:
    """Return whether the module is a part of a recurrent layer, as MindSpore's recurrent layers have parts."""
    platform = mesh.platform
    if not path or platform.is_linear_module(module) or recurrent_kind(module, platform):
        return False
    return recurrent_kind(modules[path.rpartition(".")[0]], platform) == "layer"


def _refusal(path: str, style: ParallelStyle, module: Any, reason: str, what: str) -> ValueError:
    dim = getattr(style, "sequence_dim", None)
    layouts = "" if dim is None else f"input_layout=Shard({dim}), output_layout=Shard({dim})"
    return ValueError(
        f"the plan has {type(style).__name__} for {path or 'the module'!r}, but in a {type(module).__name__} {reason}: "
        f"use NoParallel({layouts}) for {what}, which computes the module in full on every rank"
    )
