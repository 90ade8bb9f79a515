"""Conversion of plain targets and class weights for a loss of distributed logits, inside a loss-parallel context."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.communication.rank_check import check_replicated
from hyper_parallel.core.layouts.layout import Layout, get_layout, replicated_layout
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.modes import is_loss_parallel
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.rules.labels import without
from hyper_parallel.core.rules.loss import class_dim


def distribute_targets(operands: tuple) -> tuple:
    """Return the operands of a loss, with plain targets and class weights converted to DTensors inside a loss-parallel
    context.

    This happens before the recipe is looked up, so no recipe depends on the context. Plain logits stay plain, because
    they must not be mixed with DTensors. The framework's loss-parallel context is queried only for plain operands, and
    for a target that is distributed over samples only.
    """
    logits = getattr(operands[0], "_layout", None)
    if logits is None or not logits.ndim:
        return operands
    lifted = _lifted_layout(logits, operands[1])
    if lifted is None and not any(map(_is_plain, operands[1:])):
        return operands
    if not is_loss_parallel() and not logits.mesh.platform.in_loss_parallel():
        return operands
    return (
        operands[0],
        _distributed(operands[1], _sample_layout(logits, operands[1]))
        if lifted is None
        else _distributed(operands[1].to_local(), lifted),
        *(_distributed(x, None if x is None else _whole(logits, x)) for x in operands[2:]),
    )


def _is_plain(x: Any) -> bool:
    return x is not None and getattr(x, "_layout", None) is None


def _lifted_layout(logits: Layout, target: Any) -> Layout | None:
    """Return the layout on the mesh of the logits for a target that is distributed over data-parallel ranks only.

    Ranks along the other mesh dimensions have equal targets, as with a plain target.
    """
    layout = getattr(target, "_layout", None)
    if layout is None or layout.mesh is logits.mesh or not logits.mesh.contains(layout.mesh):
        return None
    if logits.mesh.platform.is_floating_point(target):
        return None
    placements: list[Any] = [Replicate()] * logits.mesh.ndim
    for mesh_dim, placement in enumerate(layout.placements):
        placements[logits.mesh.index_of(layout.mesh, mesh_dim)] = placement
    return get_layout(logits.mesh, tuple(placements), layout.shape)


def _distributed(x: Any, layout: Layout | None) -> Any:
    if layout is None or getattr(x, "_layout", None) is not None:
        return x
    platform = layout.mesh.platform
    if CHECKS:
        check_replicated(x, layout.mesh, layout.placements, "a plain target or class weight of a loss")
    promoted = platform.wrap(platform.alias(x), layout)
    if layout.replicated:
        promoted._origin = x
    return promoted


def _whole(logits: Layout, x: Any) -> Layout:
    return replicated_layout(logits.mesh, logits.mesh.platform.shape_of(x))


def _sample_layout(logits: Layout, target: Any) -> Layout | None:
    """Return the layout of a plain target.

    If it has only this rank's samples, it is sharded like the samples of the logits. Otherwise it is replicated.
    """
    if target is None or getattr(target, "_layout", None) is not None:
        return None
    shape = tuple(logits.mesh.platform.shape_of(target))
    classes = class_dim(logits.shape)
    if len(shape) == logits.ndim:  # probabilities
        mine, everyone = list(logits.local_shape), tuple(logits.shape)
        mine[classes] = everyone[classes]
    else:
        mine, everyone = list(without(logits.local_shape, (classes,))), without(logits.shape, (classes,))
    if shape == tuple(everyone) or shape != tuple(mine):
        return _whole(logits, target)
    dropped = logits.ndim - len(shape)
    placements = (
        p.with_dim(p.dim - dropped if p.dim > classes else p.dim)
        if isinstance(p, Shard) and p.dim != classes
        else Replicate()
        for p in logits.placements
    )
    return get_layout(logits.mesh, tuple(placements), everyone)
