"""Scaled dot-product attention, which MindSpore has on Ascend alone. `hyper_parallel.mindspore` exports it to users."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.op_table.binding import Function, row
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, is_dispatching

__all__ = ["attention_calls", "scaled_dot_product_attention"]

_RUN: ContextVar[Callable[..., Any] | None] = ContextVar("hyper_parallel_attention_of_parts", default=None)
#: Value of a hidden score before the softmax: finite, so that a query without visible keys gets zeros.
_HIDDEN = -1e30


def _bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    q, k, v, mask, dropout_p, is_causal, scale = args
    return (q, k, v, mask), (is_causal, dropout_p, scale)


def _call(func: Any, operands: tuple, static_args: tuple) -> Any:
    q, k, v, mask = operands
    is_causal, dropout_p, scale = static_args
    return _attention(q, k, v, mask, dropout_p, is_causal, scale)


_ROW = row("attention", _bind, _call)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return scaled dot-product attention: see `hyper_parallel.mindspore.scaled_dot_product_attention`."""
    tensors = (query, key, value, attn_mask)
    args = (*tensors, float(dropout_p), bool(is_causal), None if scale is None else float(scale))
    if not is_dispatching():
        return _attention(*args)

    if (run := _RUN.get()) is None:
        return _on_any(args)

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        made = mask is not None and attn_mask is None
        return _on_any((q, k, v, mask, args[4], args[5] and not made, args[6]))

    return run(call, *tensors, dropout_p)


def _on_any(args: tuple) -> Any:
    """Run attention on plain tensors or DTensors."""
    for x in args[:4]:
        if isinstance(x, InterceptedTensor):
            return x._dispatch(_ROW, _FUNCTION, args, {})
    return _attention(*args)


@contextmanager
def attention_calls(run: Callable[..., Any], mixes: Callable[[str, Sequence[int]], None]) -> Iterator[None]:
    """Return a context that replaces the attention function by ``run``. Other functions on plain tensors are not
    observed."""
    token = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(token)


def _attention(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
    """Compute attention of plain tensors from plain operations."""
    shape, keys = tuple(q.shape), tuple(k.shape)
    scale = 1 / math.sqrt(shape[-1]) if scale is None else scale
    q = q * scale
    together = len(shape) > 2 and keys[-3] not in (1, shape[-3])
    if together:  # heads that share a key, concatenated along the length
        q = q.reshape((*shape[:-3], keys[-3], shape[-3] // keys[-3] * shape[-2], shape[-1]))
    scores = mint.matmul(q, k.swapaxes(-1, -2))
    scores = scores.reshape((*shape[:-1], keys[-2])) if together else scores
    hidden = None
    if is_causal:
        hidden = Tensor(np.triu(np.ones((shape[-2], keys[-2]), bool), 1))
    if mask is not None and mask.dtype == ms.bool_:
        unseen = ops.logical_not(mask)
        hidden = unseen if hidden is None else ops.logical_or(hidden, unseen)
    elif mask is not None:
        scores = scores + mask
    if hidden is not None:
        scores = scores.masked_fill(hidden, _HIDDEN)
    # Composed here: the gradient of MindSpore's softmax is wrong after a softmax over a single key (2.10, `softmax` of
    # (..., 1)).
    largest = ops.stop_gradient(ops.amax(scores, -1, True))
    if mask is not None:  # numbers may hide all keys of a query too
        largest = largest.clip(_HIDDEN, None)
    weights = ops.exp(scores - largest)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    if dropout_p:
        weights = ops.dropout(weights, dropout_p)
    if together:
        weights = weights.reshape((*shape[:-3], keys[-3], shape[-3] // keys[-3] * shape[-2], keys[-2]))
    return mint.matmul(weights, v).reshape((*scores.shape[:-1], v.shape[-1]))


_FUNCTION = Function("scaled_dot_product_attention", scaled_dot_product_attention)
