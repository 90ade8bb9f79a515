"""`parallelize_module`: apply a plan to a model. Mirrors ``torch.distributed.tensor.parallel.api``."""

from __future__ import annotations

import difflib
import fnmatch
import warnings
from typing import Any

from hyper_parallel.core.dtensor.api import check_src_data_rank
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.dtensor.modes import is_strict
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.dtensor.tensor import DTensor, bind_platform
from hyper_parallel.core.tensor_parallel.base import ModuleStyle, ParallelStyle

__all__ = ["parallelize_module"]


def parallelize_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Parallelise a model in place according to a plan.

    The whole plan is checked before any parameter is touched.

    Args:
        module: model of the selected platform.
        device_mesh: 1-D mesh; None is the one entered with ``with mesh:``.
        parallelize_plan: a style for ``module`` itself, or a dict from module paths to styles. Each segment of a path
            may be a glob pattern: ``"layers.*.attention.w[qkv]"``. ``""`` is ``module`` itself.
        src_data_rank: rank of the mesh whose parameters count: each parameter is scattered or broadcast from it. None
            takes each rank's own and communicates nothing.

    Returns:
        ``module``.

    Raises:
        TypeError: for a plan that is neither a style nor a dict of styles.
        ValueError: for a mesh that is not 1-D, a style that does not fit its module or was applied before, a
            ``src_data_rank`` outside the mesh; inside `strict()` also for a path that matches no module, which
            otherwise warns and names the nearest paths.

    Example:
        >>> import torch
        >>> from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> _ = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> mlp[0].weight.placements
        (Shard(dim=0),)

    Source: ``torch.distributed.tensor.parallel.parallelize_module``.
    """
    mesh = resolve_mesh(device_mesh, "parallelize_module")
    platform = bind_platform(mesh.platform)
    if parallelize_plan is None:
        warnings.warn("parallelize_module was called without a parallelize_plan and does nothing", stacklevel=2)
        return module
    if mesh.ndim != 1:
        raise ValueError(
            f"parallelize_module needs a 1-D mesh, got one of shape {mesh.shape}: pass one dimension of it, as in "
            "mesh['tp']"
        )
    check_src_data_rank(src_data_rank, mesh)
    plan = {"": parallelize_plan} if isinstance(parallelize_plan, ParallelStyle) else parallelize_plan
    if not isinstance(plan, dict):
        raise TypeError(f"parallelize_plan must be a style or a dict of styles, got {type(plan).__name__}")
    matches = _match(plan, dict(platform.named_modules(module)))
    _check(matches, mesh)
    for _, submodule, style in matches:
        style.src_data_rank = src_data_rank
        style._apply(submodule, mesh)
    return module


def _match(plan: dict[str, ParallelStyle], modules: dict[str, Any]) -> list[tuple[str, Any, ParallelStyle]]:
    """(path, module, style) for each module that the plan names, in plan order."""
    matches: list[tuple[str, Any, ParallelStyle]] = []
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"a plan maps module paths to styles, got the key {pattern!r}")
        if not isinstance(style, ParallelStyle):
            raise TypeError(f"the plan gives {pattern!r} {style!r}, which is no ParallelStyle")
        found = [(path, module, style) for path, module in modules.items() if _path_matches(path, pattern)]
        if not found:
            _report_no_match(pattern, modules)
        matches += found
    return matches


def _path_matches(path: str, pattern: str) -> bool:
    if not path or not pattern:
        return path == pattern
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))


def _report_no_match(pattern: str, modules: dict[str, Any]) -> None:
    near = difflib.get_close_matches(pattern, [path for path in modules if path], n=3, cutoff=0.4)
    hint = f"; the nearest paths are {', '.join(map(repr, near))}" if near else ""
    message = f"the plan's {pattern!r} matches no module{hint}"
    if is_strict():
        raise ValueError(message)
    warnings.warn(message, stacklevel=4)


def _check(matches: list[tuple[str, Any, ParallelStyle]], mesh: DeviceMesh) -> None:
    """Raise for what does not fit, before anything is changed."""
    styles_of: dict[int, list[tuple[str, ParallelStyle]]] = {}
    placement_of: dict[int, tuple[str, ParallelStyle, Placement]] = {}
    for path, module, style in matches:
        style.check(module, mesh, path)
        for earlier_path, earlier in styles_of.setdefault(id(module), []):
            if style.excludes(earlier):
                raise ValueError(
                    f"the plan gives {path!r} two styles, {earlier!r} (as {earlier_path!r}) and {style!r}: keep one"
                )
        styles_of[id(module)].append((path, style))
        if isinstance(style, ModuleStyle):
            _check_ties(path, module, style, mesh, placement_of)


def _check_ties(
    path: str,
    module: Any,
    style: ModuleStyle,
    mesh: DeviceMesh,
    placement_of: dict[int, tuple[str, ParallelStyle, Placement]],
) -> None:
    """Raise when the plan places one parameter, which several modules share, in two ways."""
    wanted = style.parameter_placements(module, mesh.platform)
    for name, parameter in mesh.platform.named_parameters(module):
        placement = wanted.get(name, Replicate())
        if isinstance(parameter, DTensor) and parameter.placements != (placement,):
            raise ValueError(
                f"parameter {name!r} of {path!r} is placed {list(parameter.placements)} already, by a module that "
                f"shares it, and {style!r} would place it [{placement!r}]: modules that share a parameter need styles "
                "that place it the same way"
            )
        other_path, other, earlier = placement_of.setdefault(id(parameter), (path, style, placement))
        if earlier is not placement:
            raise ValueError(
                f"{other_path!r} and {path!r} share the parameter {name!r}, and the plan places it in two ways: "
                f"{earlier!r} by {other!r} and {placement!r} by {style!r}. An embedding and a head that are tied go "
                "together as RowwiseParallel and ColwiseParallel, which both shard the vocabulary"
            )
