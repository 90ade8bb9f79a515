"""Primitives without a rule that are compositions of operations with rules.

The functions of `COMPOSED` get the native function and its arguments, and call MindSpore's functions on DTensors. A
function returns NotImplemented for a call that it does not cover. The call then runs on gathered operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.basics.private import no_grad
from hyper_parallel.platform.mindspore.op_table.as_called import as_called
from hyper_parallel.platform.mindspore.op_table.binding import Choose, elementwise
from hyper_parallel.platform.mindspore.op_table.layers import GIVEN_STATISTICS, labelled
from hyper_parallel.platform.mindspore.processes.launch import device_target

__all__ = ["COMPOSED", "VARIANTS"]

Composition = Callable[[Any, tuple, dict], Any]
#: Rows of the loss of each element. Weights get no gradient.
_ENTROPY = elementwise("pointwise", flat=(2,), inside=0.5)
_ENTROPY_OF_LOGITS = elementwise("pointwise", flat=(2, 3))
_DIVERGENCE = elementwise("pointwise", flat=(1,), inside=0.5)
_SMOOTH = elementwise("pointwise")


def _dispatch(row: NativeOp, func: Any, args: tuple, kwargs: dict) -> Any:
    found = next(x for x in args if getattr(x, "_layout", None) is not None)
    return type(found)._dispatch(row, func, args, kwargs)


# -------------------------------------------------------------------- losses
def _total(loss: Any, reduction: str) -> Any:
    return mint.sum(loss) if reduction == "sum" else mint.mean(loss)


_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def _choose_element_wise(row: NativeOp, place: int) -> Choose:
    """Return a function that chooses ``row`` for losses without a reduction.

    A sum or a mean is composed instead.
    """
    return lambda args, kwargs: row if _REDUCTIONS.get(args[place]) == "none" else None


def _reduced_loss(function: Callable, place: int) -> Composition:
    """Return a composition that reduces ``function(*args, reduction="none")``; the argument at ``place`` selects the
    reduction."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        return _total(function(*args[:place], reduction="none"), _REDUCTIONS[args[place]])

    return run


def _reduced_by_attribute(function: Callable, row: NativeOp) -> Composition:
    """Compose a loss whose primitive has the reduction as an attribute: ``function(prim, *args)``."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        reduction = func.prim.reduction
        if reduction == "none":
            return _dispatch(row, func, args, kwargs)
        return _total(function(func.prim, *args), reduction)

    return run


_EACH_MARGIN = labelled("x target weight", "n.,n,.->n")


def _divergence(prim: Any, *args: Any) -> Any:
    return ops.kl_div(*args, reduction="none")


def _margins(prim: Any, x: Any, target: Any, weight: Any) -> Any:
    return _each_margin(prim.p, prim.margin)(x, target, weight)


@functools.cache
def _each_margin(p: int, margin: float) -> Any:
    return ops.operations.nn_ops.MultiMarginLoss(p, margin, "none")


# -------------------------------------------------------------------- shapes
def _bias_add(func: Any, args: tuple, kwargs: dict) -> Any:
    x, bias = args[:2]
    return x + bias.reshape((-1, *(1,) * (x.ndim - 2)))


def _trace(func: Any, args: tuple, kwargs: dict) -> Any:
    return ops.diagonal(args[0]).sum()


def _meshgrid(func: Any, args: tuple, kwargs: dict) -> Any:
    """Expand 1-D tensors to a grid. ``indexing`` is 0 for "ij" and 1 for "xy", which swaps the first two dimensions."""
    tensors, indexing = args[:2]
    order = [*range(len(tensors))]
    if indexing == 1 and len(order) > 1:
        order[:2] = 1, 0
    sizes = [0] * len(order)
    for x, place in zip(tensors, order, strict=True):
        sizes[place] = x.shape[0] if x.ndim else 1
    return tuple(
        ops.broadcast_to(x.reshape([-1 if d == place else 1 for d in range(len(order))]), tuple(sizes))
        for x, place in zip(tensors, order, strict=True)
    )


def _pixel_shuffle(func: Any, args: tuple, kwargs: dict) -> Any:
    return ops.pixel_shuffle(*args)


def _shape(func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    return x._core.replicated(Tensor(x.shape, ms.int64), x._layout.mesh)


def _size(func: Any, args: tuple, kwargs: dict) -> Any:
    return args[0].size


# -------------------------------------------------------------------- counts
_HISTOGRAM = as_called("count", "x", lambda given: (given.func.prim.bins,))


def _histogram(func: Any, args: tuple, kwargs: dict) -> Any:
    """Count elements in ranges between the smallest and the largest element, if the primitive has no limits."""
    x, prim = args[0], func.prim
    if prim.min < prim.max:
        return _dispatch(_HISTOGRAM, func, args, kwargs)
    low, high = float(ops.amin(x.astype(ms.float32))), float(ops.amax(x.astype(ms.float32)))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return NotImplemented
    return ops.histc(x, prim.bins, low, high)


def _on_cpu(function: Callable) -> Composition:
    """Return a composition that runs MindSpore's function if the device is a CPU. On Ascend, kernels run instead: their
    results have other dtypes."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        return function(*args, **kwargs) if device_target() == "CPU" else NotImplemented

    return run


# -------------------------------------------------------------------- statistics over the batch
def _batch_norm(func: Any, args: tuple, kwargs: dict) -> Any:
    """Compute batch norm from mean and variance of the global batch: each takes one all-reduce with one number per
    channel. Running statistics are updated as the kernel would update them. With given statistics, the kernel runs on
    each shard."""
    x, weight, bias, running_mean, running_var, training, eps, momentum = args[:8]
    if not training:
        given = (_distributed(running, args) for running in (running_mean, running_var))
        y = _dispatch(GIVEN_STATISTICS, func, (x, weight, bias, *given, *args[5:]), kwargs)
        return (y, *(ops.zeros_like(ops.stop_gradient(running_mean)) for _ in range(4)))
    _refuse_partial(running_mean, running_var)
    dtype = x.dtype
    if dtype != ms.float32:
        x = x.astype(ms.float32)
    x = _whole_sums(x)
    dims = tuple(d for d in range(x.ndim) if d != 1)
    mean = _whole_sums(mint.mean(x, dims, True))
    centred = x - mean
    variance = _whole_sums(mint.mean(mint.square(centred), dims, True))
    channels = tuple(-1 if d == 1 else 1 for d in range(x.ndim))
    y = centred * mint.rsqrt(variance + eps) * weight.reshape(channels) + bias.reshape(channels)
    count = x.size // x.shape[1]
    with no_grad():
        for running, new, scale in ((running_mean, mean, 1.0), (running_var, variance, count / max(count - 1, 1))):
            new = ops.stop_gradient(new).reshape((-1,)).astype(running.dtype) * scale
            if getattr(running, "_layout", None) is None:
                new = new.full_tensor()
            running.copy_(running * (1 - momentum) + new * momentum)
    saved = (ops.stop_gradient(v).reshape((-1,)) for v in (mean, variance))
    return (y if y.dtype == dtype else y.astype(dtype), running_mean, running_var, *saved)


def _distributed(running: Any, args: tuple) -> Any:
    """Return a statistic as a DTensor. A plain statistic is assumed to be the same on all ranks."""
    if getattr(running, "_layout", None) is not None:
        return running
    mesh, core = next((x._layout.mesh, x._core) for x in args if getattr(x, "_layout", None) is not None)
    with mesh.platform.no_dispatch():
        return core.replicated(ops.stop_gradient(running), mesh)


def _refuse_partial(running_mean: Any, running_var: Any) -> None:
    """Raise ValueError, on all ranks and before they communicate, if running statistics cannot be written."""
    for name, running in (("running_mean", running_mean), ("running_var", running_var)):
        layout = getattr(running, "_layout", None)
        if layout is not None and any(p.is_partial() for p in layout.placements):
            raise ValueError(
                f"batch_norm writes in place into {running._core.owner_of(running) or name}, placed "
                f"{list(layout.placements)}, which is not supported: redistribute it to Replicate() first"
            )


def _whole_sums(x: Any) -> Any:
    """Reduce partial sums now, so that following operations do not each reduce them again."""
    if not any(p.is_partial() for p in x.placements):
        return x
    return x.redistribute(placements=x._layout.cotangent.placements)


#: Primitive -> composition.
COMPOSED: dict[str, Composition] = {
    "BiasAdd": _bias_add,
    "Trace": _trace,
    "Meshgrid": _meshgrid,
    "PixelShuffle": _pixel_shuffle,
    "TensorShape": _shape,
    "Size": _size,
    "Histogram": _histogram,
    # Looked up at call time: `handlers.plain_inside` replaces one of them.
    "BincountExt": _on_cpu(lambda *args, **kwargs: ops.bincount(*args, **kwargs)),
    "HistcExt": _on_cpu(ops.histc),
    "Addmv": _on_cpu(ops.addmv),
    "BatchNorm": _batch_norm,
    "BinaryCrossEntropy": _reduced_loss(ops.binary_cross_entropy, 3),
    "BCEWithLogitsLoss": _reduced_loss(ops.binary_cross_entropy_with_logits, 4),
    "SmoothL1Loss": _reduced_loss(ops.smooth_l1_loss, 3),
    "KLDivLoss": _reduced_by_attribute(_divergence, _DIVERGENCE),
    "MultiMarginLoss": _reduced_by_attribute(_margins, _EACH_MARGIN),
}

VARIANTS: dict[str, Choose] = {
    "BinaryCrossEntropy": _choose_element_wise(_ENTROPY, 3),
    "BCEWithLogitsLoss": _choose_element_wise(_ENTROPY_OF_LOGITS, 4),
    "SmoothL1Loss": _choose_element_wise(_SMOOTH, 3),
}
