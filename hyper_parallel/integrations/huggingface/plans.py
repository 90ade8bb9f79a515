"""The plan of a model: its origin, and the styles of its entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.checks.paths import Paths
from hyper_parallel.core.tensor_parallel.checks.plan import did_you_mean
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.styles.parameters import ParameterParallel
from hyper_parallel.core.tensor_parallel.styles.style_names import style_by_name, style_names
from hyper_parallel.integrations.huggingface.blocks import block_plan
from hyper_parallel.integrations.huggingface.experts import (
    ExpertsParallel,
    IdentityExpertsParallel,
    WholeExpertsParallel,
)
from hyper_parallel.integrations.huggingface.known import NamedPlan, known_architectures, known_expert_plan, known_plan
from hyper_parallel.integrations.huggingface.latent import LatentKeyParallel
from hyper_parallel.integrations.huggingface.local import LocalParametersParallel
from hyper_parallel.integrations.huggingface.scaled import WholeScaledExperts
from hyper_parallel.platform import Platform

__all__ = ["named_plan", "resolve_styles", "supported_names"]

#: Style name of a plan's entry for a parameter -> function from its number of dimensions to its placement. The last two
#: dimensions are (out, in), and experts come before these. A bias has one dimension.
_PARAMETERS: dict[str, Callable[[int], Placement]] = {
    "colwise": lambda ndim: Shard(max(ndim - 2, 0)),
    "packed_colwise": lambda ndim: PackedShard(max(ndim - 2, 0), 2),
    "rowwise": lambda ndim: Shard(ndim - 1) if ndim > 1 else Replicate(),
    "packed_rowwise": lambda ndim: PackedShard(ndim - 1, 2) if ndim > 1 else Replicate(),
    "replicate": lambda ndim: Replicate(),
    "grouped_gemm": lambda ndim: Shard(0),
}
#: Style names of modules whose parameters have separate entries -> function from the placements of these parameters.
_HOLDERS: dict[str, Callable[[dict[str, Placement]], ParallelStyle]] = {
    "moe_tp_experts": ExpertsParallel,
    "all_reduce": ExpertsParallel,
    "ep_dispatch_experts": WholeExpertsParallel,
    "ep_scaled_experts": WholeScaledExperts,
    "local_params": LocalParametersParallel,
}
#: Further style names, each used by one model.
_FURTHER = ("mla_kv_a_proj", "moe_identity_expert")


def supported_names() -> tuple[str, ...]:
    """Return all names of styles that the plan of a transformers model may use."""
    return (*dict.fromkeys((*style_names(), *_PARAMETERS, *_HOLDERS, *_FURTHER)),)


def named_plan(
    model: Any,
    changes: dict[str, str | ParallelStyle | None],
    mesh: DeviceMesh,
    *,
    expert_parallel: bool = False,
) -> NamedPlan:
    """Return the model's plan, with the changes of the user. If the user removes an entry, its module may still be
    inside a module of another entry.

    Args:
        model: model of transformers.
        changes: changes of the user.
        mesh: 1-D mesh.
        expert_parallel: whether experts are sharded by the model's plan for expert parallelism.

    Raises:
        ValueError: for a model that has no plan and is not known here, unless the user gives one. Also for a model
            without a plan for expert parallelism.
    """
    plan: NamedPlan = dict(getattr(model, "tp_plan", None) or {})
    if not plan and (plan := known_plan(model)) and model.config.model_type == "gpt2":
        _register_conv1d(mesh.platform)
    plan |= block_plan(model, mesh.size())
    if expert_parallel:
        by_expert = dict(getattr(model, "ep_plan", None) or known_expert_plan(model))
        if not by_expert:
            raise ValueError(
                f"{type(model).__name__} has no plan for expert parallelism: leave out expert_parallel=True, or name "
                "experts with plan={...}, as 'ep_dispatch_experts' and their parameters as 'grouped_gemm'"
            )
        plan = {key: style for key, style in plan.items() if not any(_is_at(key, experts) for experts in by_expert)}
        plan |= by_expert
    if not plan and not changes:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan, and this library has none for the architecture "
            f"{model.config.model_type!r} (only for {', '.join(map(repr, known_architectures()))}): pass a plan to "
            "parallelize_model with plan={...}"
        )
    taken_out = [key for key, style in changes.items() if style is None]
    plan = {key: style for key, style in plan.items() if key not in taken_out}
    return {**plan, **{key: style for key, style in changes.items() if style is not None}}


def resolve_styles(
    plan: NamedPlan, modules: dict[str, Any], changes: dict[str, Any], mesh: DeviceMesh
) -> dict[str, ParallelStyle]:
    """Return the styles of all modules that a plan names, by the modules' paths.

    Entries of the model's plan that match nothing are ignored, because architectures share plans.

    Raises:
        ValueError: for a key of ``changes`` that matches nothing, or an unknown style.
    """
    names = [path for path in modules if path]
    names += [
        f"{path}.{name}".lstrip(".")
        for path, module in modules.items()
        for name, _ in mesh.platform.named_parameters(module)
    ]
    known = Paths(names)
    for key in changes:
        if not known.matching(key):
            raise ValueError(
                f"plan has the key {key!r}, but the model has no such module or parameter{did_you_mean(key, names)}"
            )
    styles: dict[str, ParallelStyle] = {}
    parameters: dict[str, dict[str, str]] = {}
    holding: dict[str, str] = {}
    platform = mesh.platform
    own = {
        f"{path}.{name}".lstrip("."): (path, name)
        for path, module in modules.items()
        for name, _ in platform.named_parameters(module)
    }
    paths, parameter_paths = Paths(modules), Paths(own)
    for key, given in plan.items():
        holders = paths.matching(key)
        of_parameter = [own[path] for path in parameter_paths.matching(key)]
        for path in holders:
            if isinstance(given, str) and given in _HOLDERS:
                holding[path] = given
            elif isinstance(given, str):
                styles[path] = _style(given, key, path, modules, platform, by_author=key not in changes)
            else:
                styles[path] = given
        for path, name in of_parameter:
            if not isinstance(given, str) or given not in _PARAMETERS:
                raise ValueError(
                    f"the plan has the style {given!r} for the parameter {key!r}: the styles of parameters are "
                    f"{', '.join(map(repr, _PARAMETERS))}. Otherwise use ParameterParallel for the module of the "
                    "parameter"
                )
            parameters.setdefault(path, {})[name] = given
    for key in (key for key, style in changes.items() if style is None):
        for path in paths.matching(key):
            styles.pop(path, None)
    for path in {**parameters, **holding}:
        placements = {
            name: _PARAMETERS[style](len(getattr(modules[path], name).shape))
            for name, style in parameters.get(path, {}).items()
        }
        styles[path] = _HOLDERS[holding[path]](placements) if path in holding else ParameterParallel(placements)
    return styles


def _style(
    name: str, key: str, path: str, modules: dict[str, Any], platform: Platform, *, by_author: bool
) -> ParallelStyle:
    """Return the style called ``name``, for the module at ``path``. If a model's author calls a projection
    ``"colwise"``, each rank must get consecutive features. This holds even for a fused projection: GPT-NeoX alternates
    query, key and value head by head."""
    if name == "mla_kv_a_proj":
        return _latent_key(modules[path.rpartition(".")[0]], path)
    if name == "moe_identity_expert":
        return IdentityExpertsParallel()
    if name == "grouped_gemm":
        raise ValueError(
            f"the plan has the style {name!r} for the module {key!r}, but this style is for parameters of experts"
        )
    style = style_by_name(name, key)
    one_matrix = by_author and name == "colwise" and platform.is_linear_module(modules[path])
    return ColwiseParallel(packed=1) if one_matrix else style


def _latent_key(attention: Any, path: str) -> ParallelStyle:
    """Return the style of the projection at ``path`` in an attention module of DeepSeek's kind."""
    features = getattr(attention, "qk_rope_head_dim", None)
    if features is None:
        raise ValueError(
            f"the plan has the style 'mla_kv_a_proj' for {path!r}, but {type(attention).__name__} has no "
            "qk_rope_head_dim, the number of features that all heads share. Set this attribute, or remove the "
            "attention's projections from the plan"
        )
    return LatentKeyParallel(features)


def _is_at(key: str, experts: str) -> bool:
    """Return whether an entry of a plan is for ``experts`` or for a module inside them."""
    return key == experts or key.startswith(f"{experts}.")


def _register_conv1d(platform: Platform) -> None:
    """Register the linear layers of GPT-2, whose weights are (in, out)."""
    from transformers.pytorch_utils import Conv1D

    platform.register_linear_module(Conv1D, out_dim=1)
