"""Recurrent layers and fused attention, which a plan can give to every rank whole, and not in parts."""

from __future__ import annotations

from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.checks.attention import Match
from hyper_parallel.core.tensor_parallel.styles.context import ContextParallel
from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNormParallel
from hyper_parallel.core.tensor_parallel.styles.parameters import ParameterParallel
from hyper_parallel.core.tensor_parallel.styles.sequence import SequenceParallel
from hyper_parallel.core.tensor_parallel.styles.weight import is_fused_attention, recurrent_kind

__all__ = ["check_whole"]

#: Styles of modules whose samples, positions or experts are independent.
_OF_OTHERS = (SequenceParallel, HeadNormParallel, ExpertParallel)


def check_whole(matches: list[Match], mesh: DeviceMesh) -> None:
    """Refuse a style that gives ranks parts of a module which needs all of its weights or positions.

    Raises:
        ValueError: for such a style. The message names the module, the reason and the style that computes it whole.
    """
    for path, module, style in matches:
        kind = recurrent_kind(module, mesh.platform)
        if kind:
            refused: tuple[type, ...] = (*_OF_OTHERS, ContextParallel)
            if kind == "layer":  # a cell computes with sharded weights, operation by operation
                refused += (ParameterParallel,)
            reason = "each step needs the step before it and all hidden units"
        elif is_fused_attention(module):
            refused, reason = _OF_OTHERS, "each position needs all others, and one function reads all weights"
        else:
            continue
        if isinstance(style, refused):
            dim = getattr(style, "sequence_dim", None)
            remedy = "" if dim is None else f"input_layout=Shard({dim}), output_layout=Shard({dim})"
            raise ValueError(
                f"the plan gives {path or 'the module'!r} {type(style).__name__}, and in a {type(module).__name__} "
                f"{reason}: give it NoParallel({remedy}), which computes it whole on every rank"
            )
