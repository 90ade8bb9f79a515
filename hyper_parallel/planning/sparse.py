"""Experts in dry runs: their styles on the mesh, and the possible numbers of ranks that share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.api import parallelize_module
from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel
from hyper_parallel.planning.layers import matching, module_at

__all__ = ["Experts", "expert_modules", "lies_over_tp", "sizes_for_experts", "spread_experts"]

#: Path of expert modules, with ``*`` for a segment -> the style.
Experts = Mapping[str, ExpertParallel]


def lies_over_tp(experts: Experts) -> bool:
    """Return whether the ranks of tensor parallelism have different experts."""
    return any(style.tp_dim is not None and style.inside is None for style in experts.values())


def expert_modules(model: Any, experts: Experts, platform: Any) -> list[Any]:
    """Return the modules that match the paths of ``experts``.

    Raises:
        ValueError: for a path that matches no module.
    """
    found: list[Any] = []
    for key in experts:
        paths = matching(key, model, platform)
        if not paths:
            raise ValueError(f"experts={key!r} matches no module: pass a path such as 'model.layers.*.mlp.experts'")
        found += [module_at(model, path, platform) for path in paths]
    return found


def spread_experts(model: Any, mesh: DeviceMesh, experts: Experts) -> list[Any]:
    """Apply the styles of experts over the mesh dimension ``"ep"``, or over ``"ep"`` and ``"tp"`` for a style with
    ``tp_dim``. Return the modules.

    Raises:
        ValueError: for a mesh without ``"dp"`` or ``"ep"``, and a path that matches no module.
    """
    names = mesh.mesh_dim_names or ()
    if "ep" not in names or "dp" not in names:
        raise ValueError(f"experts need a mesh with the dimensions 'dp' and 'ep', got a mesh with {names}")
    found = expert_modules(model, experts, mesh.platform)
    for key, style in experts.items():
        over = mesh["ep"]
        if style.tp_dim is not None and style.inside is None:
            over = mesh["ep", style.tp_dim]._flatten("experts")
        parallelize_module(model, over, {key: style})
    return found


def sizes_for_experts(
    model: Any, experts: Experts | None, given: Sequence[int] | None, ranks: int, tp: int, platform: Any
) -> list[int]:
    """Return the possible numbers of ranks that share the experts; [1] without experts.

    Args:
        model: the model.
        experts: as for `spread_experts`; None for no experts.
        given: the numbers to try; None for all that divide the ranks, up to the number of experts.
        ranks: total number of ranks.
        tp: number of ranks of tensor parallelism.
        platform: platform of the model.
    """
    if not experts:
        return [1]
    count = min(
        next(p.shape[0] for _, p in platform.named_parameters(m)) for m in expert_modules(model, experts, platform)
    )
    step = tp if lies_over_tp(experts) else 1
    most = ranks if step == tp else ranks // tp
    sizes = [n for n in range(step, min(most, max(count, step)) + 1) if n % step == 0 and most % n == 0]
    return sizes if given is None else [n for n in given if n % step == 0 and n // step <= ranks // tp]
