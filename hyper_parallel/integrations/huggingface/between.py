"""Parameters that the plan does not name in modules between sharded projections, such as parameters of activations."""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.checks.attention import Attention
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.head_norm import HeadNormParallel
from hyper_parallel.core.tensor_parallel.styles.rowwise import RowwiseParallel
from hyper_parallel.integrations.huggingface.known import reads_whole_features

__all__ = ["fit_between"]


class ActivationParallel(HeadNormParallel):
    """Run an activation with parameters of one element on sharded features. The gradients of the parameters are
    reduced over the mesh."""

    input_layouts = (Shard(-1),)
    whole_dims = 0


def fit_between(model: Any, styles: dict[str, ParallelStyle], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Complete the gradients of modules between a column-wise and a row-wise projection.

    Each rank computes only a partial gradient of a parameter between the projections. A module whose parameters are
    single numbers gets a style that reduces their gradients. Attention modules need no such style: `parallelize_module`
    handles norms inside heads, and linear layers read the replicated hidden states.

    Args:
        model: the model of these modules.
        styles: styles by path; changed in place.
        modules: all modules of the model, by path.
        mesh: 1-D mesh.

    Raises:
        ValueError: for larger parameters that the plan does not name. As plain parameters they would get wrong
            gradients.
    """
    platform = mesh.platform
    for above in _with_sharded_features(styles):
        if Attention.of(modules[above]) is not None:
            continue
        for path, module in modules.items():
            if path != above and not path.startswith(f"{above}."):
                continue
            if platform.is_linear_module(module) or any(_is_below(path, planned) for planned in styles):
                continue
            if reads_whole_features(model, path):
                continue
            sizes = {name: math.prod(tuple(parameter.shape)) for name, parameter in platform.named_parameters(module)}
            if not sizes:
                continue
            if max(sizes.values()) > 1 or path == above:
                raise ValueError(
                    f"the plan shards the features between the projections of {above!r}, but has no style for the "
                    f"parameters {', '.join(map(repr, sizes))} of {path!r}, which may be used between them. Add a "
                    f"style for {path!r} with plan={{...}}, such as 'replicated_with_grad_allreduce' for a norm "
                    "inside heads. Or remove the projections from the plan"
                )
            styles[path] = ActivationParallel()


def _with_sharded_features(styles: dict[str, ParallelStyle]) -> list[str]:
    """Return paths of modules that directly contain a column-wise projection with sharded output and a row-wise
    projection."""
    columns, rows = set(), set()
    for path, style in styles.items():
        if path and isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),):
            columns.add(path.rpartition(".")[0])
        elif path and isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),):
            rows.add(path.rpartition(".")[0])
    return sorted(columns & rows)


def _is_below(path: str, planned: str) -> bool:
    return path == planned or path.startswith(f"{planned}.")
