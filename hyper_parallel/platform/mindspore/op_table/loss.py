"""Losses, and logsumexp, that MindSpore composes of many primitives: taken whole, before they fall apart.

``ops.cross_entropy`` is some twenty primitives, of which each is right on DTensors, and which together gather the
classes. So wrappers stand for the functions (`platform.mindspore.patches`), which hand them to core as one operation
and do nothing for plain tensors. A name that a program has imported from MindSpore before the first DTensor was made
stays what it was: right, but with gathered classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore import ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.launch import device_target
from hyper_parallel.platform.mindspore.op_table.binding import Function, arguments, dims_of, row
from hyper_parallel.platform.mindspore.tensor import InterceptedTensor, is_dispatching

__all__ = ["LOSSES", "dispatched_loss"]


def dispatched_loss(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    """What stands for a function of `LOSSES`."""
    native, function = LOSSES[name], Function(name.removesuffix("_ext"), plain)

    @functools.wraps(plain)
    def loss(*args: Any, **kwargs: Any) -> Any:
        if is_dispatching():
            found = next((x for x in (*args, *kwargs.values()) if isinstance(x, InterceptedTensor)), None)
            if found is not None and not (name == "nll_loss" and _smooths(args, kwargs)):
                return type(found)._dispatch(native, function, args, kwargs)
            if found is None and args and name != "logsumexp":
                shape = args[0].shape
                InterceptedTensor._core.refuse_part_of_classes(shape[min(1, len(shape) - 1)])
        return plain(*args, **kwargs)

    return loss


def _smooths(args: tuple, kwargs: dict) -> bool:
    """Whether ``nll_loss`` is given label smoothing, which belongs to cross entropy and stays composed here."""
    return bool(args[5] if len(args) > 5 else kwargs.get("label_smoothing", 0.0))


def _bind_cross_entropy(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    kwargs = {"x" if key == "input" else key: value for key, value in kwargs.items()}
    x, target, weight, ignore, reduction, smoothing = arguments(
        ("x", "target", "weight", "ignore_index", "reduction", "label_smoothing"),
        (None, -100, "mean", 0.0),
        args,
        kwargs,
    )
    return (x, target, weight), (reduction, int(ignore), float(smoothing))


def _bind_nll_loss(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    kwargs = {"x" if key == "inputs" else key: value for key, value in kwargs.items()}
    x, target, weight, ignore, reduction = arguments(
        ("x", "target", "weight", "ignore_index", "reduction"), (None, -100, "mean"), args, kwargs
    )
    return (x, target, weight), (reduction, int(ignore))


def _bind_log_sum_exp(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, dim, keepdim = arguments(("x", "dim", "keepdim"), (False,), args, kwargs)
    return (x,), (dims_of(dim), bool(keepdim))


def _cross_entropy(func: Any, xs: tuple, statics: tuple) -> Any:
    reduction, ignore, smoothing = statics
    return _on_device(func, ops.cross_entropy)(*xs, ignore, reduction, smoothing)


def _nll_loss(func: Any, xs: tuple, statics: tuple) -> Any:
    reduction, ignore = statics
    return _on_device(func, ops.nll_loss)(*xs, ignore, reduction)


def _on_device(func: Any, on_cpu: Any) -> Any:
    """The functions of mint have no kernels on CPU."""
    return on_cpu if device_target() == "CPU" else func


_CROSS_ENTROPY = row("cross_entropy", _bind_cross_entropy, _cross_entropy)
_NLL_LOSS = row("nll_loss", _bind_nll_loss, _nll_loss)
#: Name of the function -> row.
LOSSES: dict[str, NativeOp] = {
    "cross_entropy": _CROSS_ENTROPY,
    "cross_entropy_ext": _CROSS_ENTROPY,
    "nll_loss": _NLL_LOSS,
    "nll_loss_ext": _NLL_LOSS,
    "logsumexp": row("logsumexp", _bind_log_sum_exp, lambda func, xs, statics: func(xs[0], *statics)),
}
