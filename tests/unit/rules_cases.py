"""One or more calls of every canonical operation, each with a NumPy version of it, for `rules_harness`.

The NumPy versions are strict where a framework is: an id out of range, the largest of no elements, a mean of nothing
are errors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hyper_parallel.platform.indexing import decode_index, encode_index
from tests.unit.rules_cases_more import MORE
from tests.unit.rules_harness import Case

_RNG = np.random.default_rng(3)


def floats(*shape: int) -> np.ndarray:
    return _RNG.standard_normal(shape)


def ints(high: int, *shape: int) -> np.ndarray:
    return _RNG.integers(0, high, shape)


# ---------------------------------------------------------------- NumPy versions
def _linear(operands: tuple, static_args: tuple) -> Any:
    x, weight, bias = (*operands, None)[:3]
    y = x @ weight.T
    return y if bias is None else y + bias


def _matmul(operands: tuple, static_args: tuple) -> Any:
    a, b = (
        x.swapaxes(-1, -2) if flag and x.ndim > 1 else x
        for x, flag in zip(operands, (*static_args, False, False)[:2], strict=True)
    )
    return a @ b


def _axes(dims: Any) -> Any:
    return None if dims in (None, ()) else dims


def _largest(operands: tuple, static_args: tuple) -> Any:
    return np.argmax(operands[0])


@np.errstate(divide="ignore", invalid="ignore")
def _quotient(operands: tuple, static_args: tuple) -> Any:
    return operands[0] / operands[1]


def _mean(operands: tuple, static_args: tuple) -> Any:
    x, dims = operands[0], _axes(static_args[0])
    count = math.prod(x.shape[d] for d in (range(x.ndim) if dims is None else np.atleast_1d(dims)))
    assert count > 0, "the mean of nothing"
    return np.mean(x, axis=dims, keepdims=static_args[1])


def _norm(operands: tuple, static_args: tuple) -> Any:
    p, dims, keepdim = static_args
    x = np.abs(operands[0])
    how = {"axis": _axes(dims), "keepdims": keepdim}
    if math.isinf(p):
        return np.max(x, **how) if p > 0 else np.min(x, **how)
    if p == 0:
        return np.sum(x != 0, **how).astype(x.dtype)
    # Scaled as a framework may do it, so that nothing overflows.
    return np.sum(x**p, **how) ** (1 / p)


def _reshape(operands: tuple, static_args: tuple) -> Any:
    return operands[0].reshape(static_args[0])


def _squeeze(operands: tuple, static_args: tuple) -> Any:
    x, dims = operands[0], static_args[0]
    dims = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    # Like the frameworks, unlike NumPy: a dimension not of size 1 stays.
    return x.squeeze(tuple(d % x.ndim for d in dims if x.ndim and x.shape[d] == 1))


def _expand(operands: tuple, static_args: tuple) -> Any:
    x, shape = operands[0], static_args[0]
    old = (1,) * (len(shape) - x.ndim) + x.shape
    return np.broadcast_to(x, [o if n == -1 else n for o, n in zip(old, shape, strict=True)])


def _check_bounds(x: np.ndarray, index: tuple) -> None:
    """Slices may be cut to size by a framework or not: ask for none that would have to be."""
    dims = iter(x.shape)
    for item in index:
        if item is Ellipsis:
            break
        if item is not None:
            size = next(dims)
            if isinstance(item, tuple) and item[0] == "slice":
                assert all(n is None or -size <= n <= size for n in item[1:3]), f"{item} of {size} elements"


def _getitem(operands: tuple, static_args: tuple) -> Any:
    _check_bounds(operands[0], static_args[0])
    return operands[0][decode_index(static_args[0], operands[1:])]


def _setitem(operands: tuple, static_args: tuple) -> Any:
    _check_bounds(operands[0], static_args[0])
    x = operands[0].copy()
    x[decode_index(static_args[0], operands[2:])] = static_args[1] if operands[1] is None else operands[1]
    return x


def _narrow(operands: tuple, static_args: tuple) -> Any:
    x, (dim, start, length) = operands[0], static_args
    start = start + x.shape[dim] if start < 0 else start
    assert 0 <= start <= start + length <= x.shape[dim]
    return np.take(x, range(start, start + length), axis=dim)


def _gather(operands: tuple, static_args: tuple) -> Any:
    x, index = operands
    dim = static_args[0] % x.ndim
    cut = tuple(slice(None) if d == dim else slice(0, n) for d, n in enumerate(index.shape))
    assert all(index.shape[d] <= x.shape[d] for d in range(x.ndim) if d != dim)
    return np.take_along_axis(x[cut], index, axis=dim)


def _split(operands: tuple, static_args: tuple) -> Any:
    x, (size, dim) = operands[0], static_args
    if isinstance(size, int):
        return np.split(x, range(size, x.shape[dim], size), axis=dim)
    return np.split(x, np.cumsum(size)[:-1], axis=dim)


def _chunk(operands: tuple, static_args: tuple) -> Any:
    x, (chunks, dim) = operands[0], static_args
    if x.shape[dim] == 0:
        return [x] * chunks
    return _split(operands, (-(-x.shape[dim] // chunks), dim))


def _softmax(operands: tuple, static_args: tuple) -> Any:
    x, dims = operands[0], static_args[0]
    e = np.exp(x - x.max(axis=dims, keepdims=True, initial=-9))
    return e / e.sum(axis=dims, keepdims=True)


def _log_sum_exp(operands: tuple, static_args: tuple) -> Any:
    x, dims = operands[0], _axes(static_args[0])
    largest = np.max(x, axis=dims, keepdims=True)
    largest = np.where(np.isfinite(largest), largest, 0.0)
    with np.errstate(divide="ignore"):
        y = largest + np.log(np.exp(x - largest).sum(axis=dims, keepdims=True))
    return y if static_args[1] else y.squeeze(tuple(range(x.ndim)) if dims is None else dims)


def _log_softmax(operands: tuple, static_args: tuple) -> Any:
    return operands[0] - _log_sum_exp(operands, ((static_args[0],), True))


def _sort(operands: tuple, static_args: tuple) -> Any:
    x, (dim,) = operands[0], static_args[0]
    return [np.sort(x, axis=dim), np.argsort(x, axis=dim)]


def _topk(operands: tuple, static_args: tuple) -> Any:
    x, (k, dim) = operands[0], static_args
    order = np.take(np.argsort(-x, axis=dim), range(k), axis=dim)
    return [np.take_along_axis(x, order, axis=dim), order]


def _glu(operands: tuple, static_args: tuple) -> Any:
    gate, up = np.split(operands[0], 2, static_args[0])
    return gate / (1 + np.exp(-gate)) * up


def _rotary(operands: tuple, static_args: tuple) -> Any:
    x, cos, sin = operands
    first, second = np.split(x, 2, -1)
    return x * cos + np.concatenate([-second, first], -1) * sin


def _layer_norm(operands: tuple, static_args: tuple) -> Any:
    x, weight, bias = (*operands, None)[:3]
    dims = tuple(range(x.ndim - static_args[0], x.ndim))
    mean, rstd = x.mean(axis=dims, keepdims=True), 1 / np.sqrt(x.var(axis=dims, keepdims=True) + 1e-5)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return [y if bias is None else y + bias, mean, rstd][: 1 + static_args[1]]


def _rms_norm(operands: tuple, static_args: tuple) -> Any:
    x, weight = operands
    dims = tuple(range(x.ndim - static_args[0], x.ndim))
    rstd = 1 / np.sqrt((x * x).mean(axis=dims, keepdims=True) + 1e-5)
    return [x * rstd * weight, rstd][: 1 + static_args[1]]


def _embedding(operands: tuple, static_args: tuple) -> Any:
    ids, weight = operands
    padding = static_args[0]
    assert np.all((ids >= 0) & (ids < len(weight))), "id out of range"
    assert padding is None or -len(weight) <= padding < len(weight)
    return weight[ids]


def _attention(operands: tuple, static_args: tuple) -> Any:
    q, k, v, mask = (*operands, None)[:4]
    if q.ndim > 2 and k.ndim > 2 and k.shape[-3] not in (1, q.shape[-3]):
        assert q.shape[-3] % k.shape[-3] == 0
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    if static_args[0]:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    return _softmax((scores,), ((-1,),)) @ v


def _flex_attention(operands: tuple, static_args: tuple) -> Any:
    """Compute `_attention` with scores that depend on batch element and head; return their sums and largest too."""
    q, k, v, *tables = operands
    statistics = static_args[1]
    pieces = static_args[2] if len(static_args) > 2 else tuple(((0, n),) for n in q.shape[:2])
    batch, heads = (np.array([i for o, n in own for i in range(o, o + n)], dtype=int) for own in pieces)
    k, v = (np.repeat(x, q.shape[1] // max(x.shape[1], 1), axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) + 0.1 * (1 + batch[:, None, None, None]) * heads[:, None, None]
    for x in tables:
        scores = scores * x[heads][:, None, None]
    out = _softmax((scores,), ((-1,),)) @ v
    return [out, np.exp(scores).sum(-1), scores.max(-1)][: 1 + statistics] if statistics else out


def _fused_attention(operands: tuple, static_args: tuple) -> Any:
    """Compute `_attention` with dimensions in the order of the layout; return the statistics of the softmax too."""
    q, k, v, bias, mask, sink, more_q, more_k = (*operands, *(None,) * 5)[:8]
    layout, heads, keep, _, size, tokens_first = static_args[:6]
    if more_q is not None:
        q, k = np.concatenate([q, more_q], -1), np.concatenate([k, more_k], -1)
    features = q.shape[-1] // heads if layout.endswith("H") else q.shape[-1]
    shared = k.shape[-1] // features if layout.endswith("H") else k.shape[_HEADS_DIM[layout]]
    q, k, v = (_heads_first(x, layout, n) for x, n in ((q, heads), (k, shared), (v, shared)))
    assert q.shape[1] == heads and heads % shared == 0 and heads > 0
    k, v = (np.repeat(x, heads // shared, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(features)
    if bias is not None:
        distance = -np.abs(np.arange(q.shape[2])[:, None] - np.arange(k.shape[2]))
        scores = scores + (bias if bias.ndim == 4 else bias[..., None, None] * distance)
    if mask is not None:
        scores = np.where(mask, -1e9, scores)
    largest = scores.max(-1, keepdims=True)
    total = np.exp(scores - largest).sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[:, None, None] - largest)
    weights = np.exp(scores - largest) / total
    if keep < 1:
        weights = weights * (np.random.default_rng(0).random(weights.shape) < keep) / keep
    largest, total = (np.repeat(x, size, -1) for x in (largest, total))
    if layout == "TND":
        largest, total = (x[0].swapaxes(0, 1) if tokens_first else x[0] for x in (largest, total))
    return [_heads_back(weights @ v, layout), largest, total]


_HEADS_DIM = {"BNSD": 1, "BSND": 2, "TND": 1}


def _heads_first(x: np.ndarray, layout: str, heads: int) -> np.ndarray:
    if layout == "TND":
        x = x[None]
    if layout == "SBH":
        x = x.swapaxes(0, 1)
    if layout.endswith("H"):
        x = x.reshape(*x.shape[:-1], heads, -1)
    return x if layout == "BNSD" else x.swapaxes(1, 2)


def _heads_back(x: np.ndarray, layout: str) -> np.ndarray:
    x = x if layout == "BNSD" else x.swapaxes(1, 2)
    if layout.endswith("H"):
        x = x.reshape(*x.shape[:2], -1)
    return x.swapaxes(0, 1) if layout == "SBH" else x[0] if layout == "TND" else x


def _add_rms_norm(operands: tuple, static_args: tuple) -> Any:
    x, other, weight = operands
    total = x + other
    return [*_rms_norm((total, weight), (weight.ndim, 1)), total]


def _nll(log_probs: np.ndarray, target: np.ndarray, weight: Any, reduction: str, ignore: int) -> Any:
    classes = min(1, log_probs.ndim - 1)
    count = log_probs.shape[classes]
    assert np.all((target == ignore) | ((target >= 0) & (target < count))), "class out of range"
    kept = target != ignore
    safe = np.where(kept, target, 0)
    picked = np.take_along_axis(log_probs, np.expand_dims(safe, classes), axis=classes).squeeze(classes)
    weights = kept * (1.0 if weight is None else weight[safe])
    loss = -picked * weights
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.sum() / weights.sum()


def _nll_loss(operands: tuple, static_args: tuple) -> Any:
    return _nll(*(*operands, None)[:3], *static_args)


def _cross_entropy(operands: tuple, static_args: tuple) -> Any:
    logits, target, weight = (*operands, None)[:3]
    reduction, ignore, smoothing = static_args
    classes = min(1, logits.ndim - 1)
    log_probs = logits - np.log(np.exp(logits).sum(axis=classes, keepdims=True))
    count = logits.shape[classes]
    column = (count,) + (1,) * (logits.ndim - classes - 1)
    class_weights = np.ones(column) if weight is None else weight.reshape(column)
    if target.ndim == logits.ndim:
        soft = target * (1 - smoothing) + smoothing / count
        loss = -(log_probs * soft * class_weights).sum(axis=classes)
        if reduction == "mean":
            assert loss.size
            return loss.sum() / loss.size
        return loss.sum() if reduction == "sum" else loss
    hard = _nll(log_probs, target, weight, reduction, ignore)
    kept = target != ignore
    spread = -(log_probs * class_weights).sum(axis=classes) * kept
    if reduction != "none":
        spread = spread.sum()
    if reduction == "mean":
        spread = spread / (kept * (1.0 if weight is None else weight[np.where(kept, target, 0)])).sum()
    return (1 - smoothing) * hard + smoothing / count * spread


def _dropout(operands: tuple, static_args: tuple) -> Any:
    x, (p, training) = operands[0], static_args
    if not training:
        return x
    # Every rank has a generator of its own in the same state.
    return x * (np.random.default_rng(11).random(x.shape) >= p) / (1 - p)


def _pad(operands: tuple, static_args: tuple) -> Any:
    return np.pad(operands[0], static_args[0], constant_values=9.0)


def _index(*items: Any) -> tuple[tuple, tuple]:
    tensors, encoded = encode_index(items, lambda item: isinstance(item, np.ndarray), lambda item: item.dtype == bool)
    return tensors, encoded


def _get(labels: str, x: np.ndarray, *items: Any) -> Case:
    tensors, encoded = _index(*items)
    return Case("getitem", labels, (x, *tensors), (encoded,), _getitem)


def _set(labels: str, x: np.ndarray, value: Any, *items: Any) -> Case:
    tensors, encoded = _index(*items)
    scalar = not isinstance(value, np.ndarray)
    return Case(
        "setitem_", labels, (x, None if scalar else value, *tensors), (encoded, value if scalar else None), _setitem
    )


def _probabilities(*shape: int) -> np.ndarray:
    return _softmax((floats(*shape),), ((min(1, len(shape) - 1),),))


_S = slice
_ALL = slice(None)

ELEMENTWISE = [
    Case("pointwise", "ab->ab", (floats(5, 4),), (), lambda o, s: np.tanh(o[0])),
    Case(
        "pointwise",
        "ab,a.,.b->ab",
        (floats(5, 4), floats(5, 1), floats(1, 4)),
        (),
        lambda o, s: np.hypot(*o[:2]) ** o[2] ** 2,
    ),
    Case("pointwise", "ab,b->ab", (floats(5, 4), floats(4)), (), lambda o, s: np.maximum(*o)),
    Case("pointwise", "ab,,_->ab", (floats(5, 4), floats(), 2.0), (), lambda o, s: np.where(o[0] > o[1], o[0], o[2])),
    Case("pointwise", "ab.,bc->abc", (floats(4, 3, 1), floats(3, 2)), (), lambda o, s: np.maximum(*o)),
    Case("pointwise", "ab,ab->ab", (floats(5, 1), floats(5, 1)), (), lambda o, s: np.maximum(*o)),
    Case("pointwise", "ab,.b->ab", (floats(0, 4), floats(1, 4)), (), lambda o, s: np.maximum(*o)),
    Case("pointwise", "->", (floats(),), (), lambda o, s: np.tanh(o[0])),
    Case("pointwise_", "ab,.b->ab", (floats(5, 4), floats(1, 4)), (), lambda o, s: np.maximum(*o)),
    Case("add", "ab,b->ab", (floats(5, 4), floats(4)), (), lambda o, s: o[0] - 3 * o[1]),
    Case("add", "ab,ab,ab->ab", (floats(2, 4), floats(2, 4), floats(2, 4)), (), lambda o, s: o[0] + o[1] + o[2]),
    Case("add", "ab,->ab", (floats(5, 4), floats()), (), lambda o, s: o[0] + o[1]),
    Case("add", "a,_->a", (floats(5), 2.0), (), lambda o, s: o[0] + o[1]),
    Case("add_", "ab,a.->ab", (floats(5, 4), floats(5, 1)), (), lambda o, s: o[0] + o[1]),
    Case("mul", "ab,b->ab", (floats(5, 4), floats(4)), (), lambda o, s: o[0] * o[1]),
    Case("mul", "_,ab->ab", (3.0, floats(5, 4)), (), lambda o, s: o[0] * o[1]),
    Case("mul", "_,ab->ab", (float("inf"), floats(5, 4)), (), lambda o, s: o[0] * o[1]),
    Case("mul_", "ab,_->ab", (floats(5, 4), float("inf")), (), lambda o, s: o[0] * o[1]),
    Case("mul_", "ab,->ab", (floats(5, 4), floats()), (), lambda o, s: o[0] * o[1]),
    Case("div", "ab,b->ab", (floats(5, 4), np.array([0.0, 1, -0.0, 2])), (None,), _quotient),
    Case("div", "ab,_->ab", (floats(5, 4), 0.3), (None,), _quotient),
    Case("div", "ab,_->ab", (floats(5, 4), 0), (None,), _quotient),
    Case("div", "_,ab->ab", (3.0, floats(5, 4)), (None,), lambda o, s: o[0] / o[1]),
    Case("div", "ab,_->ab", (floats(5, 4), 0.3), ("floor",), lambda o, s: np.floor(o[0] / o[1])),
    Case("div_", "ab,_->ab", (floats(5, 4), 0.3), (None,), _quotient),
    Case("div_", "ab,b->ab", (floats(5, 4), floats(4)), (None,), _quotient),
    Case("div_", "ab,_->ab", (floats(5, 4), 0.0), (None,), _quotient),
    Case("linear_unary", "ab->ab", (floats(5, 4),), (), lambda o, s: -o[0]),
    Case("linear_", "ab,b->ab", (floats(5, 4), floats(4)), (), lambda o, s: np.broadcast_to(o[1], o[0].shape)),
    Case("linear_", "ab->ab", (floats(5, 4),), (), lambda o, s: 0 * o[0]),
    Case("like", "ab->ab", (floats(5, 4),), (), lambda o, s: np.full_like(o[0], 7.0)),
]

MATMUL = [
    Case("linear", "abi,oi,o->abo", (floats(2, 3, 4), floats(5, 4), floats(5)), (), _linear),
    Case("linear", "bi,oi,_->bo", (floats(5, 4), floats(6, 4), None), (), _linear),
    Case("linear", "bi,oi->bo", (floats(5, 7), floats(6, 7)), (), _linear),
    Case("linear", "i,oi,o->o", (floats(5), floats(3, 5), floats(3)), (), _linear),
    Case("linear", "bi,i,->b", (floats(5, 4), floats(4), floats()), (), _linear),
    Case("matmul", "mk,kn->mn", (floats(5, 3), floats(3, 4)), (False, False), _matmul),
    Case("matmul", "km,nk->mn", (floats(3, 5), floats(4, 3)), (True, True), _matmul),
    Case("matmul", "k,k->", (floats(5), floats(5)), (False, False), _matmul),
    Case("matmul", "bmk,k->bm", (floats(2, 5, 3), floats(3)), (False, False), _matmul),
    Case("matmul", "k,bkn->bn", (floats(3), floats(2, 3, 5)), (False, False), _matmul),
    Case("matmul", "k,bnk->bn", (floats(3), floats(2, 5, 3)), (True, True), _matmul),
    Case("matmul", "bhmk,bhkn->bhmn", (floats(2, 2, 3, 2), floats(2, 2, 2, 3)), (), _matmul),
    Case("matmul", "a.mk,.ckn->acmn", (floats(2, 1, 3, 2), floats(1, 3, 2, 2)), (False, False), _matmul),
    Case("matmul", "amk,kn->amn", (floats(2, 3, 4), floats(4, 5)), (False, False), _matmul),
    Case("matmul", "mk,kn->mn", (floats(5, 0), floats(0, 4)), (False, False), _matmul),
    Case("addmm", "n,mk,kn->mn", (floats(4), floats(5, 3), floats(3, 4)), (), lambda o, s: 2 * o[0] + o[1] @ o[2]),
    Case("addmm", "m.,mk,kn->mn", (floats(5, 1), floats(5, 3), floats(3, 4)), (), lambda o, s: o[0] + o[1] @ o[2]),
    Case("addmm", ".n,mk,kn->mn", (floats(1, 4), floats(5, 3), floats(3, 4)), (), lambda o, s: o[0] + o[1] @ o[2]),
    Case("addmm", ",mk,kn->mn", (floats(), floats(5, 3), floats(3, 4)), (), lambda o, s: o[0] + o[1] @ o[2]),
    Case(
        "einsum",
        "bij,bjk->bik",
        (floats(2, 3, 4), floats(2, 4, 5)),
        ("bij, bjk -> bik",),
        lambda o, s: np.einsum(s[0], *o),
    ),
    Case("einsum", "ba,ac->bc", (floats(2, 3), floats(3, 4)), ("ba,ac",), lambda o, s: np.einsum(s[0], *o)),
    Case("einsum", "i,j,ij->", (floats(3), floats(4), floats(3, 4)), ("i,j,ij->",), lambda o, s: np.einsum(s[0], *o)),
    Case("einsum", "ab->ba", (floats(3, 4),), ("ab->ba",), lambda o, s: np.einsum(s[0], *o)),
]

REDUCTION = [
    *(
        Case(op, labels, (x,), (dims, keepdim), native)
        for op, native in (
            ("sum", lambda o, s: np.sum(o[0], axis=_axes(s[0]), keepdims=s[1])),
            ("mean", _mean),
            ("amax", lambda o, s: np.max(o[0], axis=_axes(s[0]), keepdims=s[1])),
            ("amin", lambda o, s: np.min(o[0], axis=_axes(s[0]), keepdims=s[1])),
        )
        for labels, x, dims, keepdim in (
            ("ab->a", floats(5, 4), (1,), False),
            ("ab->.b", floats(5, 4), (-2,), True),
            ("abc->b", floats(5, 3, 2), (0, 2), False),
            ("ab->", floats(5, 3), None, False),
            ("ab->..", floats(5, 3), (), True),
            ("->", floats(), None, False),
            ("ab->b", floats(5, 0), (0,), False),
        )
    ),
    Case("reduce_whole", "a.c->ac", (floats(5, 3, 2),), ((1,), False), lambda o, s: np.argmax(o[0], axis=1)),
    # The largest element is late, so that no rank's own number is right by chance.
    Case(
        "reduce_whole",
        "..->",
        (np.array([[0, 0, 5], [0, 1, 0], [0, 0, 0], [0, 9, 0], [0, 0, 0.5]]),),
        (None, False),
        _largest,
    ),
    Case("reduce_whole", "a.->a.", (floats(5, 3),), ((-1,), True), lambda o, s: np.var(o[0], axis=-1, keepdims=True)),
    Case(
        "reduce_pair",
        ".b->b,b",
        (floats(5, 3),),
        ((0,), False),
        lambda o, s: [np.max(o[0], axis=0), np.argmax(o[0], axis=0)],
    ),
    *(
        Case("vector_norm", labels, (floats(*shape),), (p, dims, keepdim), _norm)
        for p in (2, 2.0, 1, 0, 3, math.inf, -math.inf, -2)
        for labels, shape, dims, keepdim in (
            ("ab->a", (5, 4), (1,), False),
            ("ab->.b", (5, 4), (0,), True),
            ("ab->", (5, 3), None, False),
            ("abc->b", (4, 3, 2), (0, -1), False),
        )
    ),
]

VIEW = [
    *(
        Case("reshape", labels, (floats(*shape),), (new,), _reshape)
        for labels, shape, new in (
            ("a.c->ac.", (4, 8, 6), (32, 2, 3)),
            ("a.c->ac.", (4, 2, 6), (8, 6, -1)),
            ("abc->abc.", (5, 3, 8), (5, 3, 4, 2)),
            ("abc.->abc", (5, 3, 4, 2), (5, 3, -1)),
            ("a.->a", (5, 4), (20,)),
            ("a->a.", (20,), (5, 4)),
            ("a->a.", (12,), (4, -1)),
            ("a.->a.", (4, 6), (8, 3)),
            (".a.b->ab", (1, 5, 1, 3), (5, 3)),
            ("ab->.a.b", (5, 3), (1, 5, 1, 3)),
            ("a..b->a.b", (2, 3, 1, 4), (6, 1, 4)),
            ("ab->ab", (1, 1), (1, 1)),
            ("abc.->abc.", (1, 1, 4, 6), (1, 1, 8, 3)),
            ("a.b->ab", (1, 1, 5), (1, 5)),
            ("->.", (), (1,)),
            (".->", (1,), ()),
            ("ab.->ab", (3, 0, 4), (3, 0)),
            ("a.->a.", (0, 4), (0, 7)),
            ("..->..", (4, 0), (0, 2)),
        )
    ),
    Case("permute", "abc->cab", (floats(5, 3, 2),), ((2, 0, -2),), lambda o, s: o[0].transpose(s[0])),
    Case("permute", "->", (floats(),), ((),), lambda o, s: o[0].transpose(s[0])),
    Case("expand", "a.c->a.c", (floats(5, 1, 2),), ((-1, 4, 2),), _expand),
    Case("expand", "a.->..a.", (floats(5, 1),), ((3, 2, 5, 4),), _expand),
    Case("expand", "ab->ab", (floats(1, 5),), ((1, -1),), _expand),
    Case("squeeze", ".a.b->ab", (floats(1, 5, 1, 2),), (None,), _squeeze),
    Case("squeeze", "xa.b->xab", (floats(1, 4, 1, 2),), ((1, -2),), _squeeze),
    Case("squeeze", "ab->ab", (floats(4, 2),), ((0,),), _squeeze),
    Case("squeeze", "ab->ab", (floats(4, 2),), (None,), _squeeze),
    Case("squeeze", "a.->a", (floats(4, 1),), (-1,), _squeeze),
    Case("squeeze", "->", (floats(),), ((0,),), _squeeze),
    Case("unsqueeze", "ab->a.b", (floats(5, 4),), (1,), lambda o, s: np.expand_dims(o[0], s[0])),
    Case("unsqueeze", "ab->ab.", (floats(5, 4),), (-1,), lambda o, s: np.expand_dims(o[0], s[0])),
    Case("unsqueeze", "->.", (floats(),), (0,), lambda o, s: np.expand_dims(o[0], s[0])),
    Case("repeat", "a.->.a.", (floats(5, 4),), ((2, 1, 3),), lambda o, s: np.tile(o[0], s[0])),
    Case("repeat_interleave", "ab->ab", (floats(5, 4),), (3, -1), lambda o, s: np.repeat(o[0], s[0], axis=s[1])),
    Case("repeat_interleave", "ab->ab", (floats(6, 3),), (2, 0), lambda o, s: np.repeat(o[0], s[0], axis=s[1])),
    Case("pad", "a.->a.", (floats(5, 4),), (((0, 0), (1, 2)),), _pad),
]

INDEXING = [
    _get("xyc->..c", floats(5, 4, 3), _S(1, 3), _S(None, None, 2)),
    _get("ab->ab", floats(5, 4), _ALL, _S(0, 4)),
    _get("ab->ab", floats(5, 4), _S(-5, None), _S(None, 4)),
    _get("xby->b", floats(5, 4, 3), 1, ..., -1),
    _get("abc->.ab.c", floats(5, 4, 3), None, _ALL, _ALL, None),
    _get("abx->ab", floats(5, 4, 3), ..., 0),
    _get("xy->", floats(5, 4), 1, 2),
    _get("ab->ab", floats(5, 4), ...),
    _get("->.", floats(), None),
    _get(".b,t->tb", floats(5, 4), ints(5, 6)),
    _get("a.,tu->atu", floats(5, 4), _ALL, ints(4, 2, 3)),
    _get("acd,t.,tu->atu", floats(5, 4, 3), _ALL, ints(4, 2, 1), ints(3, 2, 3)),
    _get("abd,t,t->tb", floats(5, 4, 3), ints(5, 6), _ALL, ints(3, 6)),
    _get("abd,t,t->t.b", floats(5, 4, 3), ints(5, 6), None, _ALL, ints(3, 6)),
    _get(".d.,t->t.", floats(5, 4, 3), 2, ints(4, 5), _S(0, 2)),
    _get("a.c,t->tc", floats(5, 4, 3), ints(5, 5), 1),
    _get("aced,t,ut->autd", floats(2, 4, 3, 5), _ALL, ints(4, 3), ints(3, 2, 3)),
    _get("ac,->a", floats(5, 4), _ALL, ints(4)),
    _get("cd.,,t->t.", floats(5, 4, 3), ints(5), ints(4, 3), _S(1, 3)),
    _get("cb,t->tb", floats(9, 4), np.array([8, -9, 0, 8])),
    _get("cbd,t,t->tb", floats(9, 4, 7), ints(9, 3), _ALL, np.array([-1, 2, -7])),
    _get("cbd,t,t->t.b", floats(9, 4, 7), ints(9, 3), None, _ALL, ints(7, 3)),
    _get("acde,t,ut->aut.e", floats(2, 9, 7, 3), _ALL, ints(9, 2), ints(7, 3, 2), None),
    _get("cd,.t,u.->ut", floats(2, 9), ints(2, 1, 2), ints(9, 4, 1)),
    _get(".b,t->tb", floats(5, 4), ints(5, 6), _S(0, 4)),
    _set("ab,ab->ab", floats(5, 4), floats(5, 4), _ALL, _S(0, 4)),
    _set("ab,a.->ab", floats(5, 4), floats(5, 2), _ALL, _S(1, 3)),
    _set("ab,b->ab", floats(5, 4), floats(4), 2),
    _set("ab,.b->ab", floats(5, 4), floats(1, 4), 2),
    _set("abc,..c->abc", floats(5, 4, 3), floats(1, 1, 3), _S(0, 2)),
    _set("ab,_->ab", floats(5, 4), 3.0, ..., 1),
    _set("ab,->ab", floats(5, 4), floats(), ..., 1),
    _set("ab,.b,.->ab", floats(5, 4), floats(3, 4), np.array([3, 0, 2])),
    _set("ab,b,.->ab", floats(5, 4), floats(4), np.array([3, -5, 2])),
    _set("abc,a.,.,.->abc", floats(4, 3, 5), floats(4, 2), _ALL, np.array([1, 0]), np.array([2, 4])),
    _set("abc,.b,.,.->abc", floats(4, 3, 5), floats(2, 3), np.array([1, 0]), _ALL, np.array([2, 4])),
    Case("narrow", "ax->a.", (floats(5, 4),), (1, 1, 2), _narrow),
    Case("narrow", "ax->a.", (floats(5, 4),), (-1, -2, 2), _narrow),
    Case("narrow", "ab->ab", (floats(5, 4),), (0, 0, 5), _narrow),
    Case("narrow", "ab->ab", (floats(5, 4),), (0, -5, 5), _narrow),
    Case("gather", "a.,at->at", (floats(5, 4), ints(4, 5, 3)), (1,), _gather),
    Case("gather", ",.->.", (floats(), np.array([0])), (0,), lambda o, s: o[0][None]),
    Case("gather", ".b,tb->tb", (floats(5, 4), ints(5, 7, 4)), (-2,), _gather),
    Case("gather", "ac.,at.->at.", (floats(5, 4, 3), ints(4, 5, 2, 2)), (1,), _gather),
    Case(
        "index_select", "a.c,t->atc", (floats(5, 4, 3), ints(4, 6)), (-2,), lambda o, s: np.take(o[0], o[1], axis=s[0])
    ),
    Case("index_select", "a.,->a.", (floats(5, 4), ints(4)), (1,), lambda o, s: np.take(o[0], o[1].reshape(1), axis=1)),
    Case("index_select", "ac,t->at", (floats(5, 9), ints(9, 4)), (1,), lambda o, s: np.take(o[0], o[1], axis=1)),
    Case("index_select", ",.->", (floats(), np.array([0])), (0,), lambda o, s: o[0]),
    Case("one_hot", "ab->ab.", (ints(6, 5, 3),), (6,), lambda o, s: np.eye(s[0])[o[0]]),
]

JOIN = [
    Case("cat", "a.c,a.c->a.c", (floats(5, 2, 3), floats(5, 4, 3)), (-2,), lambda o, s: np.concatenate(o, axis=s[0])),
    Case("cat", ".->.", (floats(5, 2)[0],), (0,), lambda o, s: np.concatenate(o, axis=s[0])),
    Case(
        "stack", "ab,ab,ab->a.b", (floats(5, 3), floats(5, 3), floats(5, 3)), (1,), lambda o, s: np.stack(o, axis=s[0])
    ),
    Case("stack", ",->.", (floats(), floats()), (-1,), lambda o, s: np.stack(o, axis=s[0])),
    Case("split", ".b->.b,.b,.b", (floats(5, 3),), (2, 0), _split),
    Case("split", "a.->a.,a.", (floats(5, 4),), ((3, 1), -1), _split),
    Case("split", "a.->a.", (floats(5, 0),), (2, 1), _split),
    Case("chunk", ".b->.b,.b,.b", (floats(5, 3),), (4, 0), _chunk),
    Case("chunk", "a.->a.,a.", (floats(5, 0),), (2, 1), _chunk),
    Case("unbind", "a.c->ac,ac,ac", (floats(5, 3, 2),), (1,), lambda o, s: list(np.moveaxis(o[0], s[0], 0))),
]

ALONG = [
    Case("softmax", "abc->abc", (floats(5, 3, 4),), (-1, None), lambda o, s: _softmax(o, (s[:1],))),
    Case("softmax", "ab->ab", (floats(5, 3),), (0, None), lambda o, s: _softmax(o, (s[:1],))),
    Case("softmax", "ab->ab", (floats(0, 3),), (1, None), lambda o, s: _softmax(o, (s[:1],))),
    Case("log_softmax", "abc->abc", (floats(5, 3, 4),), (1, None), lambda o, s: np.log(_softmax(o, (s[:1],)))),
    Case("log_softmax", "a->a", (1e4 * floats(5),), (0, None), _log_softmax),
    Case("log_softmax", "->", (floats(),), (0, None), lambda o, s: o[0] * 0),
    Case("logsumexp", "abc->ab", (floats(5, 3, 4),), ((-1,), False), _log_sum_exp),
    Case("logsumexp", "ab->a.", (floats(5, 3),), ((1,), True), _log_sum_exp),
    Case("logsumexp", "ab->b", (np.where(floats(5, 3) > 0, -np.inf, 1e4),), ((0,), False), _log_sum_exp),
    Case("logsumexp", "..->", (floats(5, 3),), (None, False), _log_sum_exp),
    Case("logsumexp", "a..->a", (floats(5, 3, 4),), ((1, 2), False), _log_sum_exp),
    Case("along_dims", "ab.->ab.", (floats(5, 3, 4),), ((-1,), 1), _softmax),
    Case("along_linear", ".b.->.b.", (floats(5, 3, 4),), ((0, 2), None), lambda o, s: np.flip(o[0], s[0])),
    Case("along_dims", "..->..", (floats(5, 3),), (None, 1), lambda o, s: np.sort(o[0], axis=None).reshape(5, 3)),
    Case("along_dims", ".b->.b,.b", (floats(5, 3),), ((0,), 2), _sort),
    Case("along_dims", ".b->.b", (floats(5, 3),), ((0,), 1), lambda o, s: np.cumprod(o[0], axis=s[0][0])),
    Case("along_linear", "a..->a..", (floats(5, 3, 4),), ((-2, -1), None), lambda o, s: np.tril(o[0])),
    Case("topk", "a.->a.,a.", (floats(5, 6),), (3, -1), _topk),
    Case("topk", "->,", (floats(),), (1, 0), lambda o, s: [o[0], np.zeros((), int)]),
]

FUSED = [
    Case("glu", "a.->a.", (floats(5, 6),), (-1,), _glu),
    Case("glu", "a.b->a.b", (floats(5, 4, 3),), (1,), _glu),
    Case("rotary", "abc.,c.,c.->abc.", (floats(2, 3, 5, 4), floats(5, 4), floats(5, 4)), ("half",), _rotary),
    Case("rotary", "ab.,.b.,..->ab.", (floats(3, 5, 4), floats(1, 5, 4), floats(1, 4)), ("half",), _rotary),
]

NORM = [
    Case("layer_norm", "ab.,.,.->ab.", (floats(5, 3, 4), floats(4), floats(4)), (1, 0), _layer_norm),
    Case("layer_norm", "a..,..,_->a..,a..,a..", (floats(5, 3, 4), floats(3, 4), None), (2, 2), _layer_norm),
    Case("layer_norm", "a.,_,_->a.", (floats(5, 3), None, None), (1, 0), _layer_norm),
    Case("rms_norm", "ab.,.->ab.,ab.", (floats(5, 3, 4), floats(4)), (1, 1), _rms_norm),
    Case(
        "add_rms_norm",
        "ab.,ab.,.->ab.,ab.,ab.",
        (floats(5, 3, 4), floats(5, 3, 4), floats(4)),
        (1e-5,),
        _add_rms_norm,
    ),
]

EMBEDDING = [
    Case("embedding", "ab,vf->abf", (ints(7, 5, 3), floats(7, 4)), (None,), _embedding),
    Case("embedding", "a,vf->af", (ints(5, 6), floats(5, 3)), (2,), _embedding),
    Case("embedding", "a,vf->af", (ints(5, 6), floats(5, 3)), (-1,), _embedding),
    Case("embedding", ",vf->f", (ints(5), floats(5, 3)), (None,), _embedding),
    Case("embedding", "a,vf->af", (ints(2, 6), floats(2, 3)), (None,), _embedding),
]

ATTENTION = [
    Case(
        "attention",
        "bhs.,bhs.,bhs.->bhs.",
        (floats(2, 4, 5, 3), floats(2, 4, 5, 3), floats(2, 4, 5, 2)),
        (True, 0.0),
        _attention,
    ),
    Case(
        "attention",
        "bhs.,bh..,bh..,_->bhs.",
        (floats(3, 8, 2, 3), floats(3, 4, 5, 3), floats(3, 4, 5, 2), None),
        (False, 0.0),
        _attention,
    ),
    Case(
        "attention",
        "bhs.,bh..,bh..,.hs.->bhs.",
        (floats(2, 8, 2, 3), floats(2, 4, 5, 3), floats(2, 4, 5, 2), floats(1, 8, 2, 5)),
        (False,),
        _attention,
    ),
    Case(
        "attention",
        "bhs.,b...,b...,b...->bhs.",
        (floats(3, 5, 2, 3), floats(3, 1, 5, 3), floats(3, 1, 5, 2), floats(3, 1, 1, 5)),
        (False, 0.0),
        _attention,
    ),
    Case(
        "attention",
        "hs.,h..,h..,s.->hs.",
        (floats(5, 2, 3), floats(5, 4, 3), floats(5, 4, 2), floats(2, 4)),
        (False, 0.0),
        _attention,
    ),
    Case(
        "attention",
        "bhs.,b.s.,b.s.->bhs.",
        (floats(2, 4, 3, 3), floats(2, 1, 3, 3), floats(2, 1, 3, 2)),
        (True, 0.0, 0.3),
        lambda operands, static_args: _attention((operands[0] * 0.3 * math.sqrt(3), *operands[1:]), static_args),
    ),
    Case("attention", "..,..,..->..", (floats(2, 3), floats(4, 3), floats(4, 2)), (False, 0.0), _attention),
]


def _numbers(*shape: int) -> np.ndarray:
    return _FURTHER.standard_normal(shape)


_FURTHER = np.random.default_rng(11)

FLEX_ATTENTION = [
    Case(
        "flex_attention",
        "bh..,bh..,bh..->bh..",
        (_numbers(2, 5, 3, 3), _numbers(2, 5, 4, 3), _numbers(2, 5, 4, 2)),
        ((False, False), 0),
        _flex_attention,
    ),
    Case(
        "flex_attention",
        "bh..,.h..,.h..,.->bh..,bh.,bh.",
        (_numbers(3, 4, 2, 3), _numbers(1, 2, 4, 3), _numbers(1, 2, 4, 2), _numbers(4)),
        ((False, False), 2),
        _flex_attention,
    ),
    Case(
        "flex_attention",
        "b...,b...,b...,.->b...,b..",
        (_numbers(3, 4, 2, 3), _numbers(3, 4, 4, 3), _numbers(3, 4, 4, 2), _numbers(4)),
        ((False, True), 1),
        _flex_attention,
    ),
]


def _fused(labels: str, static_args: tuple, *operands: Any) -> Case:
    return Case("fused_attention", labels, operands, static_args, _fused_attention)


FUSED_ATTENTION = [
    _fused(
        "bh..,bh..,bh..->bh..,bh..,bh..",
        ("BNSD", 5, 1.0, False, 2, False),
        *(floats(3, 5, 2, 3), floats(3, 5, 4, 3), floats(3, 5, 4, 2)),
    ),
    _fused(
        "b.h.,b.h.,b.h.,bh..,b...,h->b.h.,bh..,bh..",
        ("BSND", 8, 1.0, False, 2, False),
        *(floats(2, 2, 8, 3), floats(2, 4, 4, 3), floats(2, 4, 4, 2)),
        *(floats(2, 8, 2, 4), floats(2, 1, 2, 4) > 0.5, floats(8)),
    ),
    _fused(
        "b.h,b.h,b.h,.h..->b.h,bh..,bh..",
        ("BSH", 4, 1.0, False, 3, False),
        *(floats(3, 2, 16), floats(3, 5, 8), floats(3, 5, 4), floats(1, 4, 2, 5)),
    ),
    _fused(
        ".bh,.b.,.b.,h,..->.bh,bh..,bh..",
        ("SBH", 4, 1.0, False, 1, False),
        *(floats(2, 3, 12), floats(5, 3, 3), floats(5, 3, 2), floats(4), floats(2, 5) > 0.5),
    ),
    _fused(
        "..h,..h,..h,_,....->..h,.h..,.h..",
        ("BSH", 4, 1.0, True, 1, False),
        *(floats(3, 2, 8), floats(3, 5, 8), floats(3, 5, 4), None, floats(3, 1, 2, 5) > 0.5),
    ),
    _fused(
        ".h.,.h.,.h.,_,_,_,.h.,.h.->.h.,h..,h..",
        ("TND", 4, 1.0, True, 2, False),
        *(floats(6, 4, 3), floats(7, 4, 3), floats(7, 4, 2), None, None, None, floats(6, 4, 2), floats(7, 4, 2)),
    ),
    _fused(
        ".h.,...,...,_,_,h->.h.,.h.,.h.",
        ("TND", 4, 1.0, False, 2, True),
        *(floats(6, 4, 3), floats(7, 1, 3), floats(7, 1, 2), None, None, floats(4)),
    ),
    _fused(
        "b.h.,b.h.,b.h.,bh->b.h.,bh..,bh..",
        ("BSND", 4, 1.0, False, 1, False),
        *(floats(2, 3, 4, 3), floats(2, 3, 4, 3), floats(2, 3, 4, 3), floats(2, 4)),
    ),
    _fused(
        "....,....,....->....,....,....",
        ("BNSD", 4, 0.5, False, 1, False),
        *(floats(2, 4, 3, 3), floats(2, 4, 3, 3), floats(2, 4, 3, 3)),
    ),
]


def _losses() -> list[Case]:
    cases = []
    target, one = ints(4, 5), ints(4)
    target[1] = -1
    grid = ints(4, 3, 2)
    grid[0, 1] = 2
    weight = np.abs(floats(4)) + 0.5
    for reduction, n, nd in (("none", "n", "nd"), ("sum", "", ""), ("mean", "", "")):
        for smoothing in (0.0, 0.1):
            static_args = (reduction, -1, smoothing)
            cases += [
                Case("cross_entropy", f"nc,n->{n}", (floats(5, 4), target), static_args, _cross_entropy),
                Case("cross_entropy", f"nc,n,c->{n}", (floats(5, 4), target, weight), static_args, _cross_entropy),
                Case(
                    "cross_entropy",
                    f"nc,nc,_->{n}",
                    (floats(5, 4), _probabilities(5, 4), None),
                    static_args,
                    _cross_entropy,
                ),
                Case(
                    "cross_entropy",
                    f"ncd,nd,_->{nd}",
                    (floats(3, 4, 2), grid, None),
                    (reduction, 2, smoothing),
                    _cross_entropy,
                ),
                Case(
                    "cross_entropy",
                    f"ncd,ncd,c->{nd}",
                    (floats(3, 4, 2), _probabilities(3, 4, 2), weight),
                    static_args,
                    _cross_entropy,
                ),
                Case("cross_entropy", "c,->", (floats(4), one), static_args, _cross_entropy),
            ]
        cases += [
            Case("nll_loss", f"nc,n->{n}", (floats(5, 4), target), (reduction, -1), _nll_loss),
            Case("nll_loss", f"ncd,nd,c->{nd}", (floats(3, 4, 2), grid, weight), (reduction, 2), _nll_loss),
        ]
    return cases


LOSS = _losses()


def _labelled() -> list[Case]:
    def whole(x: np.ndarray, *dims: int) -> np.ndarray:
        """A kernel that fails for nothing, and knows its dimensions."""
        assert x.size, "no elements"
        return x

    def convolve(operands: tuple, static_args: tuple) -> Any:
        x, weight, bias = (*operands, None)[:3]
        groups = max(static_args[2], 1)
        whole(x), whole(weight)
        windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2], 2)  # (n, i, l, k)
        channels = np.split(windows, groups, 1), np.split(weight, groups, 0)
        y = np.concatenate([np.einsum("nilk,oik->nol", *each) for each in zip(*channels, strict=True)], 1)
        return y if bias is None else y + bias[:, None]

    def shuffle(operands: tuple, static_args: tuple) -> Any:
        n, c, h, w = whole(operands[0]).shape
        return operands[0].reshape(n, c // 4, 2, 2, h, w).transpose(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)

    def normalise(operands: tuple, static_args: tuple) -> Any:
        x, weight = whole(operands[0]), operands[1]
        groups = x.reshape(x.shape[0], static_args[2], -1)
        groups = (groups - groups.mean(-1, keepdims=True)) / (groups.std(-1, keepdims=True) + 1e-5)
        return groups.reshape(x.shape) * weight[:, None]

    def largest(operands: tuple, static_args: tuple) -> Any:
        windows = np.lib.stride_tricks.sliding_window_view(whole(operands[0]), 2, 2)
        return [windows.max(-1), windows.argmax(-1)]

    plain, grouped = "ni.,oi.,o->no.|01+2", "ng.,g..,g->ng.|01+2"
    x, bias = floats(5, 4, 6), floats(4)
    return [
        Case("labelled", "ni.,oi.,o->no.", (x, floats(4, 4, 3), bias), (plain, ((5, 4, 4),), 0), convolve),
        Case("labelled", "ni.,oi.,_->no.", (x, floats(6, 4, 2), None), (plain, ((5, 6, 5),), 0), convolve),
        Case("labelled", "ng.,g..,g->ng.", (x, floats(8, 2, 3), floats(8)), (grouped, ((5, 8, 4),), 2), convolve),
        # As many channels as before: cut anywhere, groups would come apart.
        Case("labelled", "ng.,g..,g->ng.", (x, floats(4, 2, 3), bias), (grouped, ((5, 4, 4),), 2), convolve),
        Case("labelled", "ng.,g..,g->ng.", (x, floats(4, 1, 3), bias), (grouped, ((5, 4, 4),), 4), convolve),
        Case("labelled", "nchw->nchw", (floats(3, 16, 2, 4),), ("nchw->nchw|0", ((3, 4, 4, 8),), 0), shuffle),
        Case("labelled", "ng.,g->ng.", (floats(5, 8, 3), floats(8)), ("ng.,g->ng.|1", ((5, 8, 3),), 4), normalise),
        Case("labelled", "nc.->nc.,nc.", (floats(5, 4, 4),), ("nc.->nc.,nc.", ((5, 4, 3),) * 2, 0), largest),
    ]


LABELLED = _labelled()

DROPOUT = [
    Case("dropout", "ab->ab", (floats(5, 4),), (0.5, True), _dropout),
    Case("dropout", "ab->ab", (floats(5, 4),), (0.5, False), _dropout),
    Case("dropout", "->", (floats(),), (0.5, True), _dropout),
]

#: Operations that have their rule from another one, and differ from it in the memory that their results share.
SAME_RULE = [
    Case("alias", "ab->ab", (floats(5, 4),), (), lambda o, s: o[0]),
    Case("contiguous", "ab->ab", (floats(5, 4),), (), lambda o, s: o[0]),
    *(Case(name, "a.c->ac.", (floats(4, 8, 6),), ((32, 2, 3),), _reshape) for name in ("view", "reshape_copy")),
]

CASES = [
    *ELEMENTWISE,
    *MATMUL,
    *REDUCTION,
    *VIEW,
    *INDEXING,
    *JOIN,
    *ALONG,
    *FUSED,
    *NORM,
    *EMBEDDING,
    *ATTENTION,
    *FLEX_ATTENTION,
    *FUSED_ATTENTION,
    *LOSS,
    *LABELLED,
    *DROPOUT,
    *SAME_RULE,
    *MORE,
]
