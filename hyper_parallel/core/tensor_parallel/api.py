"""`parallelize_module`, which applies a plan to a model. Mirrors ``torch.distributed.tensor.parallel.api``."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.announcing import announce
from hyper_parallel.core.dtensor.api import check_src_data_rank
from hyper_parallel.core.dtensor.tensor import bind_platform
from hyper_parallel.core.dtensor.undistributed import broadcast_undistributed, check_whole_tensors, remember_plan
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.operations.owners import remember_model
from hyper_parallel.core.plain_code.first_call import follow_first_call
from hyper_parallel.core.rules.random import share_draws
from hyper_parallel.core.tensor_parallel.checks.forgotten_layers import guard_forgotten_layers
from hyper_parallel.core.tensor_parallel.checks.plan import Match, Plan, plan_facts, resolve_plan
from hyper_parallel.core.tensor_parallel.program.planned_parameters import UNIT, name_module
from hyper_parallel.core.tensor_parallel.program.programs import share_inputs

__all__ = ["parallelize_module"]


def parallelize_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    """Parallelise a model in place according to a plan.

    The plan is checked completely before any parameter changes. Inside `check_ranks()` ranks also compare their plans.

    Args:
        module: model of the selected platform.
        device_mesh: 1-D mesh; None takes the mesh that was entered with ``with mesh:``. A mesh with several dimensions
            is allowed for user-defined styles that do not need a 1-D mesh. Their `_apply` gets it unchanged.
        parallelize_plan: a style for ``module`` itself, or a dict from module paths to styles. Each segment of a path
            may be a glob pattern: ``"layers.*.attention.w[qkv]"``. The path ``""`` is ``module`` itself. A style may be
            given by its name: ``"colwise"``, ``"rowwise"``, ``"colwise_rep"``, ``"sequence_parallel"``, another name
            from plans of Hugging Face's models, or a name from `register_style`. Norms inside sharded attention heads
            (q_norm, k_norm) get `HeadNormParallel` automatically.
        src_data_rank: rank of the mesh whose parameters and buffers all ranks get. Tensors in the plan are scattered or
            broadcast from it. All other parameters and buffers of ``module`` are broadcast together, in place. All
            ranks also get the random state of the mesh's first rank, so that dropout between styled modules is equal on
            all ranks. None keeps the local values of each rank and communicates nothing. Tensors on the meta device
            stay there.

    Returns:
        ``module``.

    Raises:
        TypeError: for a module of another framework, or a plan that is neither a style nor a dict of styles.
        ValueError: for a mesh with several dimensions and a style that needs a 1-D mesh, an unknown style name, a style
            that does not fit its module or was applied before, attention heads that the ranks cannot share evenly, a
            parameter that is shared by modules and gets different placements in them, or a ``src_data_rank`` outside
            the mesh. Inside `strict()` also for a path that matches no module; otherwise that is a warning, which lists
            the nearest paths.

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
    bind_platform(mesh.platform)
    if not isinstance(module, mesh.platform.Module):
        raise TypeError(
            f"parallelize_module takes a {mesh.platform.Module.__name__} of the platform {mesh.platform.name!r}, got "
            f"{type(module).__name__}"
        )
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module was called without a parallelize_plan and does nothing: pass a style, or a dict from "
            "paths of modules to styles",
            stacklevel=2,
        )
        return module
    check_src_data_rank(src_data_rank, mesh)
    for path, submodule in mesh.platform.named_modules(module):
        if hasattr(submodule, UNIT):
            raise ValueError(
                f"parallelize_module: fully_shard was applied to {path or 'the module'!r} already, and has sharded "
                "its parameters: apply parallelize_module first"
            )
    matches = resolve_plan(parallelize_plan, module, mesh)
    guards = guard_forgotten_layers(matches, dict(mesh.platform.named_modules(module)), mesh)
    if CHECKS:
        CHECKS[-1].agree("parallelize_module", plan_facts(matches, module, mesh, src_data_rank))
    for path, submodule, style in matches:
        name_module(submodule, path)
        style.src_data_rank = src_data_rank
        style._apply(submodule, mesh)
    share_inputs(matches, dict(mesh.platform.named_modules(module)), mesh)
    for path, submodule, guard in guards:
        name_module(submodule, path)
        mesh.platform.register_forward_pre_hook(submodule, guard)
    remember_model(module)
    remember_plan(module, [submodule for _, submodule, _ in matches], mesh)
    broadcast_undistributed(module, mesh, src_data_rank)
    if src_data_rank is not None and mesh.ndim == 1:
        share_draws(module, mesh)
    if CHECKS:
        check_whole_tensors(module, mesh)
    follow_first_call(module, mesh)
    announce(_summary(parallelize_plan, matches), module, mesh)
    return module


def _summary(plan: Plan, matches: Sequence[Match]) -> str:
    """Return a summary such as ``"parallelize_module: a plan of 2 keys, 8 modules (8 ColwiseParallel)"``."""
    styles = Counter(type(style).__name__ for _, _, style in matches)
    keys = f"a plan of {len(plan)} key{'s' * (len(plan) != 1)}" if isinstance(plan, dict) else "one style"
    counts = ", ".join(f"{count} {name}" for name, count in styles.items())
    return f"parallelize_module: {keys}, {len(matches)} module{'s' * (len(matches) != 1)} ({counts or 'none'})"
