"""Classification losses. Samples and classes can be sharded; sharded classes are never gathered.

`vocab_parallel` computes losses of sharded classes. If each rank has all classes of its samples, the native operation
is used.
"""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.rules.classes import Classes
from hyper_parallel.core.rules.labels import named, without
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.core.rules.registry import rule
from hyper_parallel.core.rules.vocab_parallel import vocab_parallel_of


def class_dim(logits: tuple[int, ...]) -> int:
    """Return the dimension of the classes: 1, or 0 for a single sample."""
    return min(1, len(logits) - 1)


@rule(
    "cross_entropy",
    "x target weight(classes)=None | reduction='mean' ignore_index=-100 label_smoothing=0.0 dtype=None",
    loss=True,
)
def cross_entropy(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Cross entropy. The target holds classes, or probabilities if it has the shape of the logits."""
    return _loss(shapes, static_args[0], _cross_entropy) if 0.0 <= static_args[2] <= 1.0 else None


@rule(
    "nll_loss",
    "x target weight(classes)=None | reduction='mean' ignore_index=-100 dtype=None",
    loss=True,
)
def nll_loss(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Negative log-likelihood. The target holds classes."""
    same_shape = shapes[0] is not None and shapes[1] is not None and len(shapes[0]) == len(shapes[1])
    return None if same_shape else _loss(shapes, static_args[0], _nll_loss)


def _loss(shapes: tuple, reduction: str, call: Any) -> OpSharding | None:
    """Return the sharding of a loss.

    A mean is the local sum divided by the global weight of the samples. So local results can be summed. For sharded
    classes, the ranks combine their results within the call.
    """
    logits, target, weight = (*shapes, None)[:3]
    if not logits or target is None or reduction not in ("none", "sum", "mean"):
        return None
    classes = class_dim(logits)
    labels = named(logits)
    samples = without(labels, (classes,))
    probabilities = len(target) == len(logits)
    if tuple(target) != (tuple(logits) if probabilities else without(logits, (classes,))):
        return None
    if weight is not None and tuple(weight) != (logits[classes],):
        return None
    each = reduction == "none"
    return OpSharding(
        operands=(labels, labels if probabilities else samples, None if weight is None else (labels[classes],))[
            : len(shapes)
        ],
        results=(samples if each else (),),
        result_shapes=(without(logits, (classes,)) if each else (),),
        reduce=None if each else "sum",
        combined=(labels[classes],),
        call=call,
    )


def _cross_entropy(call: LocalCall) -> Any:
    logits = call.operand_layouts[0]
    if Classes.of(logits, class_dim(logits.shape)) is not None:
        return sharded_cross_entropy(call.platform, call.operands, call.static_args, call.operand_layouts)
    return _with_whole_classes(call)


def sharded_cross_entropy(
    platform: Any, operands: tuple, static_args: tuple, operand_layouts: tuple, dim: int | None = None
) -> Any:
    """Return the cross entropy over sharded classes.

    Args:
        platform: the platform of the tensors.
        operands: local logits, target, and optionally class weights or None.
        static_args: reduction, ignore_index, label_smoothing, and optionally the dtype of the result or None.
        operand_layouts: layouts of the operands. All must shard classes equally, and samples too.
        dim: dimension of the classes; None for the frameworks' default.

    Returns:
        The local result. It is replicated over the mesh dimensions that shard the classes. Unless the reduction is
        ``"none"``, it is a summand over the mesh dimensions that shard samples.
    """
    x, target, weight = (*operands, None)[:3]
    reduction, ignore_index, smoothing, dtype = (*static_args, None)[:4]
    logits = operand_layouts[0]
    classes = Classes.along(logits, class_dim(logits.shape) if dim is None else dim)
    functions = vocab_parallel_of(platform)
    if operand_layouts[1].ndim == logits.ndim:
        loss = functions.cross_entropy_of_probabilities(x, target, weight, classes, smoothing)
        count = math.prod(without(logits.shape, (classes.dim,)))
    else:
        _check_weight(platform, weight)
        loss, weights = functions.cross_entropy(x, target, weight, classes, ignore_index, smoothing)
        count = _total(platform, weights, operand_layouts[1]) if reduction == "mean" else None
    return platform.to_dtype(functions.losses.reduced(loss, reduction, count), x.dtype if dtype is None else dtype)


def _nll_loss(call: LocalCall) -> Any:
    platform = call.platform
    logits = call.operand_layouts[0]
    classes = Classes.of(logits, class_dim(logits.shape))
    if classes is None:
        return _with_whole_classes(call)
    x, target, weight = (*call.operands, None)[:3]
    reduction, ignore_index, dtype = (*call.static_args, None)[:3]
    _check_weight(platform, weight)
    functions = vocab_parallel_of(platform)
    loss, weights = functions.nll(x, target, weight, classes, ignore_index)
    count = None
    if reduction == "mean":
        dims = classes.mesh_dims if weight is not None else ()
        count = _total(platform, weights, call.operand_layouts[1], dims)
    # Reduce over samples first, so that one number is communicated.
    each = functions.losses.reduced(loss, "none" if reduction == "none" else "sum", None)
    loss = functions.summed(each, classes)
    return platform.to_dtype(loss if count is None else loss / count, x.dtype if dtype is None else dtype)


def _check_weight(platform: Any, weight: Any) -> None:
    if weight is not None and platform.requires_grad(weight):
        raise ValueError(
            "the class weights of a cross entropy have no gradient when the targets are class indices: detach the "
            "weights, or pass the targets as probabilities"
        )


def _total(platform: Any, weights: Any, layout: Any, more: tuple[int, ...] = ()) -> Any:
    """Return the weight of all samples, summed over the mesh dimensions that shard them, and over ``more``."""
    total = platform.clone(vocab_parallel_of(platform).losses.reduced(platform.detach(weights), "sum", None))
    for mesh_dim, placement in enumerate(layout.placements):
        if placement.is_shard() or mesh_dim in more:
            total = collectives.all_reduce(total, layout.mesh, mesh_dim)
    return total


def _with_whole_classes(call: LocalCall) -> Any:
    platform = call.platform
    logits, layout = call.operand_layouts[:2]
    if call.static_args[0] != "mean" or not any(placement.is_shard() for placement in layout.placements):
        return call.run()
    loss = call.native(call.operands, ("sum", *call.static_args[1:]))
    if layout.ndim == logits.ndim:  # probabilities
        return loss / math.prod(without(layout.shape, (class_dim(layout.shape),)))
    _, target, weight = (*call.operands, None)[:3]
    ignored = target == call.static_args[1]
    # Neither target nor class weight has a gradient, so this may run outside autograd.
    if weight is None:
        weights = platform.ones(platform.shape_of(target), loss)
    else:
        weights = platform.detach(weight)[platform.masked_fill(target, ignored, 0)]
    return loss / _total(platform, platform.masked_fill(weights, ignored, 0.0), layout)
