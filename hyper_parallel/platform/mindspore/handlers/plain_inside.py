"""Functions of MindSpore that make plain tensors internally, from sizes and numbers: zeros to compare with, or indices
of a slice. These tensors are the same on all ranks, so they are treated as replicated while the function runs. Tensors
that the caller passes must still be distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, distributed_in, is_dispatching

__all__ = ["MAKING_PLAIN", "METHODS", "bincount", "nanmean", "with_plain_inside"]

_BY_MODULE = {
    "math_func": "count_nonzero isneginf isposinf diff trapz bucketize diag_embed vander",
    "array_func": "select_scatter slice_scatter diagonal_scatter sequence_mask",
    "nn_func": "threshold",
}
#: Functions of `mindspore.ops.function`, with their modules.
MAKING_PLAIN = tuple(f"{module}.{name}" for module, names in _BY_MODULE.items() for name in names.split())


#: Methods that do not call the functions, which are replaced.
_METHODS = "diff isposinf isneginf select_scatter slice_scatter diagonal_scatter"


def _method(name: str) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(ops, name)(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"``Tensor.{name}``: see `mindspore.ops.{name}`."
    return method


#: Methods of DTensors.
METHODS = {name: _method(name) for name in _METHODS.split()}


def with_plain_inside(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Replace a function of `MAKING_PLAIN`: plain tensors made inside count as replicated."""
    found = next(distributed_in((args, kwargs)), None) if is_dispatching() else None
    if found is None or any(map(_is_plain, (*args, *kwargs.values()))):
        return original(*args, **kwargs)
    with found._core.implicit_replication():
        return original(*args, **kwargs)


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, InterceptedTensor) and x.ndim > 0


def bincount(original: Callable, input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Replace `ops.bincount` by sums over segments. The largest number determines the size of the result."""
    if not isinstance(input, InterceptedTensor) or not is_dispatching() or input.ndim != 1 or not input.size:
        return original(input, weights, minlength)
    count = max(int(ops.amax(input.astype(ms.float32))) + 1, minlength)
    added = ops.full_like(input, 1, dtype=ms.float32) if weights is None else weights.astype(ms.float32)
    return ops.unsorted_segment_sum(added, input.astype(ms.int32), count)


def nanmean(original: Callable, input: Any, axis: Any = None, keepdims: bool = False, *, dtype: Any = None) -> Any:
    """Replace `ops.nanmean`, which is a cell with its own backward, by sums."""
    if not isinstance(input, InterceptedTensor) or not is_dispatching():
        return original(input, axis, keepdims, dtype=dtype)
    x = input if dtype is None else input.astype(dtype)
    there = ops.logical_not(ops.isnan(x))
    total = mint.sum(ops.where(there, x, 0.0), axis, keepdims)
    return total / mint.sum(there.astype(x.dtype), axis, keepdims)
