"""The plan of a model: where it comes from, and the styles that its entries stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import PackedShard, Placement, Replicate, Shard
from hyper_parallel.core.tensor_parallel.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.colwise import ColwiseParallel
from hyper_parallel.core.tensor_parallel.parameters import ParameterParallel
from hyper_parallel.core.tensor_parallel.plan import did_you_mean, path_matches
from hyper_parallel.core.tensor_parallel.style_names import style_by_name
from hyper_parallel.integrations.huggingface.experts import ExpertsParallel
from hyper_parallel.platform import Platform

__all__ = ["named_plan", "resolve_styles"]

NamedPlan = dict[str, str | ParallelStyle]


def _gpt2(config: Any) -> NamedPlan:
    heads = config.num_attention_heads
    return {
        "wte": "embedding_rowwise",
        "h.*.attn.c_attn": ColwiseParallel(heads=(heads, heads, heads)),
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.q_attn": ColwiseParallel(heads=heads),
        "h.*.crossattention.c_attn": ColwiseParallel(heads=(heads, heads)),
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }


#: Plans for architectures that bring none, by ``config.model_type``: of the base model, from its config.
_PLANS: dict[str, Callable[[Any], NamedPlan]] = {"gpt2": _gpt2}

#: How the style of a plan's entry for a parameter (not a module) places it, from the number of its dimensions: the
#: last two are (out, in), in front of them are experts; one dimension is that of a bias.
_PARAMETERS: dict[str, Callable[[int], Placement]] = {
    "colwise": lambda ndim: Shard(max(ndim - 2, 0)),
    "packed_colwise": lambda ndim: PackedShard(max(ndim - 2, 0), 2),
    "rowwise": lambda ndim: Shard(ndim - 1) if ndim > 1 else Replicate(),
    "packed_rowwise": lambda ndim: PackedShard(ndim - 1, 2) if ndim > 1 else Replicate(),
    "replicate": lambda ndim: Replicate(),
}
_EXPERTS = "moe_tp_experts"


def named_plan(model: Any, changes: dict[str, str | ParallelStyle | None], platform: Platform) -> NamedPlan:
    """The model's plan, with the changes of the user; what these take out of a larger entry is in it still.

    Raises:
        ValueError: for a model that has none and is not known here, unless the user gives one.
    """
    plan: NamedPlan = dict(getattr(model, "tp_plan", None) or {})
    if not plan and (make := _PLANS.get(model.config.model_type)):
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        plan = {prefix + key: style for key, style in make(model.config).items()}
        _register_conv1d(platform)
    if not plan and not changes:
        raise ValueError(
            f"{type(model).__name__} brings no tensor-parallel plan, and none is known here for the architecture "
            f"{model.config.model_type!r} (only for {', '.join(map(repr, _PLANS))}): give parallelize_model one with "
            "plan={...}"
        )
    taken_out = [key for key, style in changes.items() if style is None]
    plan = {key: style for key, style in plan.items() if key not in taken_out}
    return {**plan, **{key: style for key, style in changes.items() if style is not None}}


def resolve_styles(
    plan: NamedPlan, modules: dict[str, Any], changes: dict[str, Any], mesh: DeviceMesh
) -> dict[str, ParallelStyle]:
    """The styles of all modules that a plan names, by the modules' own paths.

    Entries of the model's plan that name nothing are left out: architectures share them.

    Raises:
        ValueError: for a key of ``changes`` that names nothing, or a style that is not known.
    """
    names = [path for path in modules if path]
    names += [
        f"{path}.{name}".lstrip(".")
        for path, module in modules.items()
        for name, _ in mesh.platform.named_parameters(module)
    ]
    for key in changes:
        if not any(path_matches(name, key) for name in names):
            raise ValueError(
                f"plan has the key {key!r}, and the model no such module or parameter{did_you_mean(key, names)}"
            )
    styles: dict[str, ParallelStyle] = {}
    parameters: dict[str, dict[str, str]] = {}
    experts: set[str] = set()
    platform = mesh.platform
    own = {path: [name for name, _ in platform.named_parameters(module)] for path, module in modules.items()}
    for key, given in plan.items():
        holders = [path for path in modules if path_matches(path, key)]
        of_parameter = [
            (path, name)
            for path, names in own.items()
            for name in names
            if path_matches(f"{path}.{name}".lstrip("."), key)
        ]
        for path in holders:
            if given == _EXPERTS:
                experts.add(path)
            else:
                styles[path] = _style(given, key, by_author=key not in changes) if isinstance(given, str) else given
        for path, name in of_parameter:
            if not isinstance(given, str) or given not in _PARAMETERS:
                raise ValueError(
                    f"the plan gives the parameter {key!r} the style {given!r}: for parameters there are "
                    f"{', '.join(map(repr, _PARAMETERS))}; give the module that holds it ParameterParallel"
                )
            parameters.setdefault(path, {})[name] = given
    for key in (key for key, style in changes.items() if style is None):
        for path in [path for path in styles if path_matches(path, key)]:
            del styles[path]
    for path in {**parameters, **dict.fromkeys(experts)}:
        placements = {
            name: _PARAMETERS[style](len(getattr(modules[path], name).shape))
            for name, style in parameters.get(path, {}).items()
        }
        styles[path] = ExpertsParallel(placements) if path in experts else ParameterParallel(placements)
    return styles


def _style(name: str, key: str, *, by_author: bool) -> ParallelStyle:
    """The style of a name. Where the author of a model calls a projection ``"colwise"``, consecutive features belong
    together, also where it is several in one: GPT-NeoX has query, key and value alternate head by head."""
    style = style_by_name(name, key)
    return ColwiseParallel(packed=1) if by_author and name == "colwise" else style


def _register_conv1d(platform: Platform) -> None:
    """Make the linear layers of GPT-2 known, whose weights are (in, out)."""
    from transformers.pytorch_utils import Conv1D

    platform.register_linear_module(Conv1D, out_dim=1)
