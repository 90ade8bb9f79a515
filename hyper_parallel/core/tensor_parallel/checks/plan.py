"""Resolution of a plan: finds the style of each module, and checks that all styles fit."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.dtensor.undistributed import held_tensors
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.placement_types import Placement, Replicate
from hyper_parallel.core.lookalikes import import_hint
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import is_strict
from hyper_parallel.core.operations.operands import refuse_foreign
from hyper_parallel.core.tensor_parallel.checks.attention import Match, check_projections, head_norms
from hyper_parallel.core.tensor_parallel.checks.fused import check_fused
from hyper_parallel.core.tensor_parallel.checks.paths import Paths
from hyper_parallel.core.tensor_parallel.checks.uncalled import check_called
from hyper_parallel.core.tensor_parallel.checks.whole import check_whole
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.style_names import style_by_name

#: Most keys without a matching module that a message lists, each with similar paths.
LISTED = 20

Plan = ParallelStyle | str | dict[str, ParallelStyle | str]


def resolve_plan(plan: Plan, model: Any, mesh: DeviceMesh) -> list[Match]:
    """Return (path, module, style) for each style of a plan, in the order of application. Change nothing.

    Args:
        plan: plan, as for `parallelize_module`.
        model: module of the platform.
        mesh: 1-D mesh.

    Raises:
        TypeError, ValueError: for a plan that does not fit the model, as `parallelize_module` says.
    """
    if isinstance(plan, (ParallelStyle, str)):
        plan = {"": plan}
    if not isinstance(plan, dict):
        raise TypeError(
            f"parallelize_plan must be a style, its name, or a dict of them, got {type(plan).__name__}"
            f"{import_hint(plan)}"
        )
    modules = dict(mesh.platform.named_modules(model))
    matches = _match(plan, modules)
    check_whole(matches, modules, mesh)
    _check_styles(matches, mesh)
    check_called(matches, modules)
    check_fused(matches, modules, mesh)
    check_projections(matches, modules, mesh)
    matches += head_norms(matches, modules, mesh)
    # Inner modules first: a style that replicates the parameters below its module skips those already distributed.
    matches.sort(key=lambda match: -len(match[0].split(".")) if match[0] else 0)
    _check_ties(matches, modules, mesh)
    return matches


def plan_facts(matches: list[Match], model: Any, mesh: DeviceMesh, src_data_rank: int | None) -> dict[str, str]:
    """Return facts, by name, that must be equal on all ranks when a plan is applied. `check_ranks` compares them.

    Args:
        matches: result of `resolve_plan`.
        model, mesh, src_data_rank: as for `parallelize_module`.
    """
    facts = {
        "the model": type(model).__name__,
        "the shape of the mesh": f"{mesh.shape}, mesh_dim_names={mesh.mesh_dim_names}",
        "src_data_rank": str(src_data_rank),
    }
    for path, _, style in matches:
        facts[f"the style of {path!r}"] = repr(style)
    for kind, path, x in held_tensors(model, mesh.platform):
        gradient = f", requires_grad={x.requires_grad}" if kind == "parameter" else ""
        facts[f"{kind} {path!r}"] = f"{x.dtype} {tuple(x.shape)}{gradient}"
    return facts


def _match(plan: dict[str, ParallelStyle | str], modules: dict[str, Any]) -> list[Match]:
    """Return the modules that match the keys of the plan, in the order of the plan."""
    matches: list[Match] = []
    without: list[str] = []
    paths = Paths(modules)
    for pattern, given in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"a plan maps module paths to styles, got the key {pattern!r}")
        style = style_by_name(given, pattern) if isinstance(given, str) else given
        if not isinstance(style, ParallelStyle):
            raise TypeError(
                f"the plan has {style!r} for {pattern!r}, which is neither a ParallelStyle nor the name of a "
                f"style{import_hint(style)}"
            )
        found = [(path, modules[path], style) for path in paths.matching(pattern)]
        if not found:
            without.append(pattern)
        matches += found
    if without:
        _report_no_match(without, modules)
    return matches


def did_you_mean(pattern: str, paths: Iterable[str]) -> str:
    """Return the end of a message about a pattern without a match: the nearest paths, or ""."""
    near = difflib.get_close_matches(pattern, [path for path in paths if path], n=3, cutoff=0.4)
    return f"; the nearest paths are {', '.join(map(repr, near))}" if near else ""


def _report_no_match(patterns: list[str], modules: dict[str, Any]) -> None:
    # Only listed patterns get a search for near paths, which is slow in a large model.
    first, *others = patterns[:LISTED]
    near = did_you_mean(first, modules)
    near += "".join(f"\nthe plan's {p!r} matches no module{did_you_mean(p, modules)}" for p in others)
    if len(patterns) > LISTED:
        near += f"\n... and {len(patterns) - LISTED} more"
    message = f"the plan's {first!r} matches no module{near}"
    if is_strict():
        raise ValueError(message)
    warnings.warn(message, stacklevel=5)


def _check_styles(matches: list[Match], mesh: DeviceMesh) -> None:
    """Raise ValueError for a style that does not fit its module, or excludes another style of the module."""
    styles_of: dict[int, list[tuple[str, ParallelStyle]]] = {}
    for path, module, style in matches:
        style.check(module, mesh, path or type(module).__name__)
        for earlier_path, earlier in styles_of.setdefault(id(module), []):
            if style.excludes(earlier):
                raise ValueError(
                    f"the plan has two styles for {path!r}, {earlier!r} (as {earlier_path!r}) and {style!r}: keep one"
                )
        styles_of[id(module)].append((path, style))


def _check_ties(matches: list[Match], modules: dict[str, Any], mesh: DeviceMesh) -> None:
    """Raise ValueError if the plan treats a parameter differently in two modules that share it.

    The styles of the two modules may have different placements of the parameter, or one module may have no style.
    """
    platform = mesh.platform
    placement_of: dict[int, tuple[str, ParallelStyle, Placement]] = {}
    covered: set[int] = set()
    for path, module, style in matches:
        if not isinstance(style, ModuleStyle):
            continue
        for below, submodule in platform.named_modules(module):
            if id(submodule) not in covered:
                covered.add(id(submodule))
                placements: Mapping[str, Placement] = {} if below else style.parameter_placements(module, mesh)
                where = ".".join(filter(None, (path, below)))
                _check_parameters(where, submodule, style, placements, mesh, placement_of)
    for path, module in modules.items():
        if id(module) in covered:
            continue
        for name, parameter in platform.named_parameters(module):
            if id(parameter) in placement_of:
                other_path, style, placement = placement_of[id(parameter)]
                raise ValueError(
                    f"{path!r} shares its parameter {name!r} with {other_path!r}, which {style!r} places "
                    f"[{placement!r}], but the plan has no style for {path!r}. Add a style with the same placement of "
                    "the parameter to the same plan (one call for both modules). For a tied embedding and head, use "
                    "RowwiseParallel and ColwiseParallel, which both shard the vocabulary"
                )


def _check_parameters(
    path: str,
    module: Any,
    style: ModuleStyle,
    placements: Mapping[str, Placement],
    mesh: DeviceMesh,
    placement_of: dict[int, tuple[str, ParallelStyle, Placement]],
) -> None:
    """Raise ValueError if a parameter of a module has other placements than the module's style gives it.

    The parameter may have those placements already, or get them from the style of another module that shares it.
    """
    for name, tensor in (*mesh.platform.named_parameters(module), *mesh.platform.named_buffers(module)):
        refuse_foreign(tensor, mesh.platform, f"{name!r} of {path or type(module).__name__!r}: {style!r}")
    for name, parameter in mesh.platform.named_parameters(module):
        placement = get_layout(mesh, (placements.get(name, Replicate()),), tuple(parameter.shape)).placements[0]
        if isinstance(parameter, DTensor) and parameter.placements != (placement,):
            where = path or type(module).__name__
            raise ValueError(
                f"parameter {name!r} of {where!r} is placed {list(parameter.placements)} already, by another module "
                f"with this parameter, but {style!r} would place it [{placement!r}]. Modules with a shared parameter "
                "need styles with the same placement of the parameter"
            )
        other_path, other, earlier = placement_of.setdefault(id(parameter), (path, style, placement))
        if earlier is not placement:
            raise ValueError(
                f"{other_path!r} and {path!r} share the parameter {name!r}, and the plan places it in two ways: "
                f"{earlier!r} by {other!r} and {placement!r} by {style!r}. For a tied embedding and head, use "
                "RowwiseParallel and ColwiseParallel, which both shard the vocabulary"
            )
