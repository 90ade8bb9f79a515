"""Functions of neural networks, made of `operations`; each is one operation for the dispatcher."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numpy_backend import interception
from numpy_backend import operations as o
from numpy_backend.array import Array
from numpy_backend.interception import operation
from numpy_backend.random import GENERATOR

__all__ = [
    "attention", "batch_norm", "cross_entropy", "dropout", "embedding", "entropy", "gelu", "inverse", "layer_norm",
    "linear", "log_softmax", "logsumexp", "nll_loss", "rand_like", "relu", "rms_norm", "scale_rows_", "sigmoid", "silu",
    "softmax",
]  # fmt: skip


@operation("linear", 3)
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """``x @ weight.T + bias``."""
    y = o.matmul(x, o.permute(weight, (1, 0)))
    return y if bias is None else o.add(y, bias)


@operation("pointwise", 0)
def relu(x: Array) -> Array:
    """``max(x, 0)``."""
    return o.where(o.greater(x, 0.0), x, 0.0)


@operation("pointwise", 0)
def sigmoid(x: Array) -> Array:
    """The logistic function."""
    return o.mul(o.add(o.tanh(o.mul(x, 0.5)), 1.0), 0.5)


@operation("pointwise", 0)
def silu(x: Array) -> Array:
    """``x * sigmoid(x)``."""
    return o.mul(x, sigmoid(x))


@operation("pointwise", 0)
def gelu(x: Array) -> Array:
    """GELU, exact."""
    return o.mul(o.mul(x, 0.5), o.add(o.erf(o.mul(x, 1 / math.sqrt(2))), 1.0))


@operation("softmax")
def softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    """Softmax along ``dim``."""
    return o.exp(log_softmax(x, dim, dtype))


@operation("log_softmax")
def log_softmax(x: Array, dim: int, dtype: Any = None) -> Array:
    """Logarithm of the softmax."""
    x = x if dtype is None else o.cast(x, dtype)
    return o.sub(x, logsumexp(x, (dim,), True))


@operation("logsumexp")
def logsumexp(x: Array, dims: Any, keepdim: bool = False) -> Array:
    """Logarithm of the sum of exponentials."""
    if not x.value.size:
        return o.sum(x, dims, keepdim)
    shift = o.detach(o.amax(x, dims, True))
    y = o.add(o.log(o.sum(o.exp(o.sub(x, shift)), dims, True)), shift)
    return y if keepdim else o.squeeze(y, (dims,) if isinstance(dims, int) else dims)


@operation("layer_norm", 3)
def layer_norm(
    x: Array, weight: Array | None, bias: Array | None, dims: int = 1, statistics: int = 0, epsilon: float = 1e-5
) -> Array:
    """Normalize over the last ``dims`` dimensions."""
    last = tuple(range(-dims, 0))
    away = o.sub(x, o.mean(x, last, True))
    y = o.div(away, o.sqrt(o.add(o.mean(o.mul(away, away), last, True), epsilon)))
    y = y if weight is None else o.mul(y, weight)
    return y if bias is None else o.add(y, bias)


@operation("rms_norm", 2)
def rms_norm(x: Array, weight: Array | None, dims: int = 1, statistics: int = 0, epsilon: float = 1e-5) -> Array:
    """Normalize over the last ``dims`` dimensions."""
    y = o.div(x, o.sqrt(o.add(o.mean(o.mul(x, x), tuple(range(-dims, 0)), True), epsilon)))
    return y if weight is None else o.mul(y, weight)


@operation("embedding", 2)
def embedding(ids: Array, weight: Array, padding: int | None = None) -> Array:
    """Rows of ``weight``; the row ``padding`` gets no gradient."""
    rows = o.getitem(weight, ids)
    if padding is None:
        return rows
    is_padding = Array((ids.value == padding % weight.shape[0])[..., None])
    return o.where(is_padding, o.detach(rows), rows)


@operation("attention", 4)
def attention(q: Array, k: Array, v: Array, mask: Array | None = None, causal: bool = False, p: float = 0.0) -> Array:
    """Attention over (..., heads, length, features); ``k`` and ``v`` may have fewer heads."""
    if (groups := q.shape[-3] // max(k.shape[-3], 1)) > 1:
        k, v = (_repeated(x, groups) for x in (k, v))
    scores = o.mul(o.matmul(q, k, False, True), q.shape[-1] ** -0.5)
    if causal:
        ahead = np.triu(np.ones(scores.shape[-2:], bool), 1)
        scores = o.where(Array(np.broadcast_to(ahead, scores.shape)), -math.inf, scores)
    if mask is not None and mask.dtype == bool:  # true for visible keys
        scores = o.where(Array(np.broadcast_to(~mask.value, scores.shape)), -math.inf, scores)
    elif mask is not None:
        scores = o.add(scores, mask)
    return o.matmul(softmax(scores, -1), v)


def _repeated(x: Array, times: int) -> Array:
    shape = x.shape
    x = o.expand(o.unsqueeze(x, x.ndim - 2), (*shape[:-2], times, *shape[-2:]))
    return o.reshape(x, (*shape[:-3], shape[-3] * times, *shape[-2:]))


@operation("dropout")
def dropout(x: Array, p: float = 0.5, training: bool = True) -> Array:
    """Zeros with probability ``p``, and the others scaled up."""
    if not training:
        return x
    kept = (GENERATOR.random(x.value.shape) >= p).astype(x.dtype)
    return o.mul(x, Array(kept / np.asarray(1 - p if p < 1 else 1, x.dtype)))


@operation("cross_entropy", 3)
def cross_entropy(
    logits: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    ignore: int = -100,
    smoothing: float = 0.0,
    dtype: Any = None,
) -> Array:
    """Cross entropy of (rows, classes, ...), by class indices or by probabilities of the same shape."""
    dim = 0 if logits.ndim == 1 else 1
    interception.check_logits(logits, dim)
    logs = log_softmax(logits, dim)
    if np.issubdtype(target.dtype, np.floating):
        return _of_probabilities(logs, target, weight, reduction, smoothing, dim)
    if not smoothing:
        return nll_loss(logs, target, weight, reduction, ignore)
    weighted = logs if weight is None else o.mul(logs, _along(weight, dim, logs.ndim))
    ignored = Array(target.value == ignore)
    every = o.where(ignored, 0.0, o.neg(o.sum(weighted, (dim,))))
    losses, counts = _losses(logs, target, weight, ignore)
    count = logs.shape[dim]
    if reduction == "none":
        return o.add(o.mul(losses, 1 - smoothing), o.mul(every, smoothing / count))
    both = o.add(o.mul(o.sum(losses), 1 - smoothing), o.mul(o.sum(every), smoothing / count))
    return both if reduction == "sum" else o.div(both, o.sum(counts))


def _of_probabilities(
    logs: Array, target: Array, weight: Array | None, reduction: str, smoothing: float, dim: int
) -> Array:
    count = logs.shape[dim]
    target = o.add(o.mul(target, 1 - smoothing), smoothing / count)
    target = target if weight is None else o.mul(target, _along(weight, dim, logs.ndim))
    losses = o.neg(o.sum(o.mul(logs, target), (dim,)))
    return losses if reduction == "none" else o.sum(losses) if reduction == "sum" else o.mean(losses)


@operation("nll_loss", 3)
def nll_loss(
    logs: Array,
    target: Array,
    weight: Array | None = None,
    reduction: str = "mean",
    ignore: int = -100,
    dtype: Any = None,
) -> Array:
    """Negative log likelihood of (rows, classes, ...)."""
    losses, counts = _losses(logs, target, weight, ignore)
    if reduction == "none":
        return losses
    return o.sum(losses) if reduction == "sum" else o.div(o.sum(losses), o.sum(counts))


def _along(weight: Array, dim: int, ndim: int) -> Array:
    return o.reshape(weight, tuple(-1 if d == dim else 1 for d in range(ndim)))


def _losses(logs: Array, target: Array, weight: Array | None, ignore: int) -> tuple[Array, Array]:
    """The loss of each sample, and its weight in the mean."""
    dim = 0 if logs.ndim == 1 else 1
    ignored = Array(target.value == ignore)
    places = Array(np.where(ignored.value, 0, target.value))
    if places.value.size and not 0 <= places.value.min() <= places.value.max() < logs.shape[dim]:
        raise IndexError(f"class indices lie between 0 and {logs.shape[dim] - 1}")
    picked = o.squeeze(o.gather(logs, o.unsqueeze(places, dim), dim), (dim,))
    counts = Array(np.ones(places.value.shape, logs.dtype)) if weight is None else o.getitem(weight, places)
    counts = o.where(ignored, 0.0, counts)
    return o.where(ignored, 0.0, o.neg(o.mul(picked, counts))), counts


# ------------------------------------------------------------------------------ without a sharding rule
@operation()
def rand_like(x: Array) -> Array:
    """Uniform numbers of the shape of ``x``."""
    return Array(GENERATOR.random(x.value.shape).astype(x.dtype))


@operation()
def inverse(x: Array) -> Array:
    """Inverses of square matrices."""
    from numpy_backend.array import made

    def back(g: Array) -> list[Array]:
        turned = o.permute(y, (*range(y.ndim - 2), y.ndim - 1, y.ndim - 2))
        return [o.neg(o.matmul(o.matmul(turned, g), turned))]

    y = made(np.linalg.inv(x.value), (x,), back)
    return y


@operation()
def entropy(x: Array) -> Array:
    """``-x * log(x)``, element by element."""
    return o.neg(o.mul(x, o.log(x)))


@operation(writes=True)
def scale_rows_(x: Array) -> Array:
    """Divide each row by its norm, in place."""
    o.copy_(x, o.div(x, o.sqrt(o.sum(o.mul(x, x), (1,), True))))
    return x


@operation()
def batch_norm(x: Array, mean: Array, variance: Array) -> Array:
    """Normalisation over the first dimension as in training, which writes the running statistics."""
    now, spread = x.value.mean(0), x.value.var(0, ddof=1)
    for running, value in ((mean, now), (variance, spread)):
        running.value[...] = 0.9 * running.value + 0.1 * value
        running.writes[0] += 1
    away = o.sub(x, o.mean(x, (0,), True))
    return o.div(away, o.sqrt(o.add(o.mean(o.mul(away, away), (0,), True), 1e-5)))


def _place(which: Any) -> Any:
    @operation("reduce_whole")
    def place(x: Array, dims: Any, keepdim: bool = False) -> Array:
        return Array(which(x.value, axis=dims[0], keepdims=keepdim))

    return lambda x, dim: place(x, (dim,))


argmax, argmin = _place(np.argmax), _place(np.argmin)


@operation()
def diagonal(x: Array, offset: int, a: int, b: int) -> Array:
    """A diagonal of two dimensions."""
    whole = o.permute(x, (*(d for d in range(x.ndim) if d not in (a % x.ndim, b % x.ndim)), a % x.ndim, b % x.ndim))
    rows, columns = whole.shape[-2:]
    count = max(min(rows + min(offset, 0), columns - max(offset, 0)), 0)
    first = np.arange(count)
    return o.getitem(whole, (..., Array(first - min(offset, 0)), Array(first + max(offset, 0))))
