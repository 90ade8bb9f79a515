"""Losses over sharded classes: `loss_parallel` for DTensors, `vocab_parallel_cross_entropy` for local logits."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.communication.transitions import identity_reduce_grad
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import loss_parallel
from hyper_parallel.core.rules.class_shards import layout_of_logits, loss_of_shards
from hyper_parallel.core.rules.labels import without
from hyper_parallel.core.rules.loss import sharded_cross_entropy

__all__ = ["loss_parallel", "vocab_parallel_cross_entropy"]

_REDUCTIONS = ("none", "mean", "sum")


@loss_of_shards
def vocab_parallel_cross_entropy(
    local_logits: Any,
    target: Any,
    mesh: DeviceMesh,
    *,
    dim: int | None = None,
    vocab_size: int | None = None,
    weight: Any = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return the cross entropy of plain logits whose classes are sharded over the ranks.

    The logits are not gathered. Forward has two all-reduces of a few numbers per sample, backward has none.

    Args:
        local_logits: this rank's shard of the logits, of any floating point dtype. The shape is (N, classes),
            (N, classes, d1, ...) or (classes,), and with ``dim=-1`` (..., classes). Sums are computed in float32 or
            wider. The gradient is this rank's shard.
        target: integer class of each sample, the same on all ranks of the mesh, in the shape of ``local_logits``
            without the dimension of the classes. Alternatively this rank's shard of class probabilities, in the shape
            of ``local_logits``.
        mesh: 1-D mesh over which the classes are sharded, in consecutive shards. Of a larger mesh take a dimension,
            such as ``mesh["tp"]``.
        dim: dimension of the classes. Default: 1, or 0 for a single sample, as in the frameworks' ``cross_entropy``.
        vocab_size: global number of classes. Default: the number of local classes times the number of ranks. Give it if
            ranks have different numbers of classes. The shards must be those of `distribute_tensor`: 2, 2, 1 and 0 for
            5 classes over 4 ranks. In the first call for a number of classes ranks compare their shapes, so all ranks
            must make that call.
        weight: weight of each class, shape (vocab_size,), the same on all ranks. With probabilities it may require a
            gradient, which is the same on all ranks too, and costs one all-reduce in backward.
        ignore_index: target value of samples that do not contribute. It has no effect on probabilities.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``, over the samples of this call. With data parallelism these are
            the local samples. A mean is divided by the sum of the targets' weights, or for probabilities by the number
            of samples.
        label_smoothing: fraction of the target that is spread over all classes, between 0 and 1.

    Returns:
        A plain tensor of the dtype of ``local_logits``, the same on all ranks of the mesh. It is a scalar, or with
        ``"none"`` it has the shape of the samples.

    Raises:
        TypeError: for a DTensor (use the framework's cross entropy), or an object that is not a tensor.
        ValueError: for a mesh with several dimensions, an unknown reduction, ``label_smoothing`` out of range, shapes
            that do not fit, or class weights that need a gradient with integer targets.
        IndexError: for a target out of range, on CPU. On other devices the loss is NaN instead, because the check would
            synchronise with the host.

    Example:
        >>> import torch
        >>> from hyper_parallel import init_device_mesh, vocab_parallel_cross_entropy
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> loss = vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), mesh)
        >>> round(loss.item(), 4)
        1.3863

    Source: ``vocab_parallel_cross_entropy`` of Megatron-LM; arguments of ``torch.nn.functional.cross_entropy``.
    """
    platform = mesh.platform
    _check_options(mesh, reduction, label_smoothing)
    for name, x in (("local_logits", local_logits), ("target", target), ("weight", weight)):
        _check_plain(platform, name, x, optional=name == "weight")
    if not platform.is_floating_point(local_logits):
        raise ValueError(f"local_logits must be of a floating point dtype, got {local_logits.dtype}")
    logits, dim = layout_of_logits(tuple(platform.shape_of(local_logits)), mesh, dim, vocab_size)
    layouts, total = (logits, _layout_of_target(target, logits, dim)), logits.shape[dim]
    if weight is not None and tuple(platform.shape_of(weight)) != (total,):
        shape = tuple(platform.shape_of(weight))
        raise ValueError(f"weight must have one entry for each of {total} classes, got shape {shape}")
    with platform.no_dispatch():
        if weight is not None:
            weight = identity_reduce_grad(mesh, (0,))(weight)  # a rank uses the weights of its own classes
            weight = platform.narrow(weight, 0, logits.local_offset[dim], logits.local_shape[dim])
        if not platform.is_floating_point(target):
            target = platform.as_index(target)
        static_args = (reduction, ignore_index, float(label_smoothing))
        return sharded_cross_entropy(platform, (local_logits, target, weight), static_args, layouts, dim)


def _check_options(mesh: DeviceMesh, reduction: str, label_smoothing: float) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"vocab_parallel_cross_entropy takes a 1-D mesh, got {mesh}: pass the dimension over which the classes "
            "are sharded, such as mesh['tp']"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")


def _check_plain(platform: Any, name: str, x: Any, optional: bool) -> None:
    if x is None and optional:
        return
    if isinstance(x, DTensor):
        raise TypeError(
            f"{name} of vocab_parallel_cross_entropy must be a plain local tensor, got a DTensor: call the "
            "framework's cross_entropy on DTensors, within loss_parallel() if the target is plain, or pass to_local()"
        )
    if not platform.is_tensor(x):
        raise TypeError(f"{name} of vocab_parallel_cross_entropy must be a tensor, got {type(x).__name__}")


def _layout_of_target(target: Any, logits: Layout, dim: int) -> Layout:
    shape = tuple(logits.mesh.platform.shape_of(target))
    samples = without(logits.shape, (dim,))
    if logits.mesh.platform.is_floating_point(target):
        if shape == logits.local_shape:
            return logits
    elif shape == samples:
        return get_layout(logits.mesh, (Replicate(),), samples)
    raise ValueError(
        f"the target has shape {shape} and dtype {target.dtype}: for local_logits of shape "
        f"{tuple(logits.local_shape)} with the classes in dimension {dim} the target must hold integers of shape "
        f"{samples}, or probabilities of shape {tuple(logits.local_shape)}. Pass dim=-1 for classes in the last "
        "dimension"
    )
