"""Losses, and logsumexp, that MindSpore composes of many primitives: dispatched as one operation.

``ops.cross_entropy`` runs some twenty primitives. Each is correct on DTensors, but together they gather the classes. So
the functions are replaced (`platform.mindspore.patches`): DTensors go to core as one operation, and for plain tensors
nothing changes. If a program imported such a function by name before the first DTensor, it keeps the original function.
Its result is correct, but it gathers the classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.op_table.binding import Function, by_name, row
from hyper_parallel.platform.mindspore.processes.launch import device_target
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, is_dispatching

__all__ = ["LOSSES", "dispatched_loss"]


def dispatched_loss(original: Callable, *args: Any, loss: str, **kwargs: Any) -> Any:
    """Replace the function ``loss`` of `LOSSES`."""
    if is_dispatching():
        found = next((x for x in (*args, *kwargs.values()) if isinstance(x, InterceptedTensor)), None)
        if found is not None and not (loss == "nll_loss" and _smooths(args, kwargs)):
            return type(found)._dispatch(LOSSES[loss], Function(loss.removesuffix("_ext"), original), args, kwargs)
        if found is None and args and loss != "logsumexp":
            shape = args[0].shape
            InterceptedTensor._core.refuse_part_of_classes(shape[min(1, len(shape) - 1)], args[0])
    return original(*args, **kwargs)


def _smooths(args: tuple, kwargs: dict) -> bool:
    """Return whether ``nll_loss`` got label smoothing. With label smoothing, ``nll_loss`` is not dispatched as one
    operation."""
    return bool(args[5] if len(args) > 5 else kwargs.get("label_smoothing", 0.0))


def _on_device(func: Any, on_cpu: Any) -> Any:
    """Return ``func``, or ``on_cpu`` on CPU, where functions of mint have no kernels."""
    return on_cpu if device_target() == "CPU" else func


def _cross_entropy(func: Any, xs: tuple, static_args: tuple) -> Any:
    reduction, ignore, smoothing, _ = static_args
    return _on_device(func, ops.cross_entropy)(*xs, ignore, reduction, smoothing)


def _nll_loss(func: Any, xs: tuple, static_args: tuple) -> Any:
    reduction, ignore = static_args[:2]
    return _on_device(func, ops.nll_loss)(*xs, ignore, reduction)


#: Name of the function -> row.
LOSSES: dict[str, NativeOp] = by_name(
    {
        "cross_entropy cross_entropy_ext": row(
            "cross_entropy",
            "x target weight=None ignore_index=-100 reduction='mean' label_smoothing=0.0",
            _cross_entropy,
        ),
        "nll_loss nll_loss_ext": row(
            "nll_loss",
            "x target weight=None ignore_index=-100 reduction='mean'",
            _nll_loss,
        ),
        "logsumexp": row("logsumexp", "x dims keepdim=False"),
    }
)
