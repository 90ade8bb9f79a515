"""Classification losses over whole classes; samples can be sharded.

The loss over a sharded class dimension is `core.tensor_parallel.loss`.
"""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.dtensor import collectives
from hyper_parallel.core.dtensor.op_sharding import OpSharding
from hyper_parallel.core.dtensor.rules import rule
from hyper_parallel.core.dtensor.rules.labels import named, whole, without


@rule("cross_entropy", "nll_loss")
def cross_entropy(shapes: tuple, statics: tuple) -> OpSharding | None:
    """Target holds classes, or probabilities when it has the shape of the logits. A mean is the local sum divided by
    the global weight of the samples, so that its parts add up."""
    logits, target, weight = (*shapes, None)[:3]
    reduction = statics[0]
    if not logits or target is None or reduction not in ("none", "sum", "mean"):
        return None
    classes = min(1, len(logits) - 1)
    labels = whole(named(logits), (classes,))
    samples = without(labels, (classes,))
    probabilities = len(target) == len(logits)
    if tuple(target) != (tuple(logits) if probabilities else without(logits, (classes,))):
        return None
    each = reduction == "none"
    return OpSharding(
        operands=(labels, labels if probabilities else samples, None if weight is None else (None,))[: len(shapes)],
        results=(samples if each else (),),
        result_shapes=(without(logits, (classes,)) if each else (),),
        reduce=None if each else "sum",
        call=(_mean_of_probabilities if probabilities else _mean) if reduction == "mean" else None,
    )


def _mean(
    platform: Any, native: Any, operands: tuple, statics: tuple, operand_layouts: tuple, result_layouts: tuple
) -> Any:
    layout = operand_layouts[1]
    split = [mesh_dim for mesh_dim, placement in enumerate(layout.placements) if placement.is_shard()]
    if not split:
        return native(operands, statics)
    _, target, weight = (*operands, None)[:3]
    loss = native(operands, ("sum", *statics[1:]))
    ignored = target == statics[1]
    # Neither the target nor the weight of a class has a gradient: this may happen outside autograd.
    if weight is None:
        weights = platform.ones(platform.shape_of(target), loss)
    else:
        weights = platform.detach(weight)[platform.masked_fill(target, ignored, 0)]
    # Not the sum of a tensor without elements: some backends leave it uninitialised.
    here = math.prod(platform.shape_of(target))
    total = platform.masked_fill(weights, ignored, 0.0).sum() if here else platform.zeros((), loss)
    for mesh_dim in split:
        total = collectives.all_reduce(total, layout.mesh, mesh_dim)
    return loss / total


def _mean_of_probabilities(
    platform: Any, native: Any, operands: tuple, statics: tuple, operand_layouts: tuple, result_layouts: tuple
) -> Any:
    layout = operand_layouts[1]
    if not any(placement.is_shard() for placement in layout.placements):
        return native(operands, statics)
    samples = math.prod(without(layout.shape, (min(1, layout.ndim - 1),)))
    return native(operands, ("sum", *statics[1:])) / samples
