"""Rows of the op table for layers: linear maps, norms, embeddings, attention, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.launch import device_target
from hyper_parallel.platform.mindspore.op_table.binding import Table, arguments, row

__all__ = ["OPS", "RESULTS", "VARIANTS"]

OPS = Table()
VARIANTS: dict[str, Callable[[tuple, dict], NativeOp | None]] = {}


# -------------------------------------------------------------------- products
def _bind_linear(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    return tuple(arguments(("x", "weight", "bias"), (None,), args, kwargs)), ()


def _bind_matmul(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    a, b, ta, tb = arguments(("x", "mat2", "transpose_a", "transpose_b"), (False, False), _by_place(args, kwargs), {})
    return (a, b), (bool(ta), bool(tb))


def _by_place(args: tuple, kwargs: dict) -> tuple:
    return (*args, *kwargs.values())


def _matmul(func: Any, xs: tuple, statics: tuple) -> Any:
    a, b = xs
    transpose_a, transpose_b = statics
    if not (transpose_a or transpose_b):
        return mint.matmul(a, b)
    if a.ndim == b.ndim == 2:
        return _MATMUL[statics](a, b)
    return mint.matmul(mint.transpose(a, -1, -2) if transpose_a else a, mint.transpose(b, -1, -2) if transpose_b else b)


_MATMUL = {(ta, tb): ops.MatMul(ta, tb) for ta in (False, True) for tb in (False, True)}


def _bind_addmm(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    c, a, b, beta, alpha = arguments(("x", "mat1", "mat2", "beta", "alpha"), (1, 1), args, kwargs)
    return (c, a, b), (beta, alpha)


def _addmm(func: Any, xs: tuple, statics: tuple) -> Any:
    """By hand: ``Addmm`` has no kernel on CPU."""
    c, a, b = xs
    beta, alpha = statics
    product = mint.matmul(a, b)
    return (c if beta == 1 else c * beta) + (product if alpha == 1 else product * alpha)


OPS.row("Dense", "linear", _bind_linear, lambda func, xs, statics: mint.nn.functional.linear(*xs))
OPS.row("MatMul MatMulExt BatchMatMul BatchMatMulExt Mm MatMulV2 BatchMatMulV2 Bmm", "matmul", _bind_matmul, _matmul)
OPS.row("Addmm", "addmm", _bind_addmm, _addmm)


# -------------------------------------------------------------------- norms
def _bind_layer_norm_old(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, weight, bias, begin, _, eps = args
    dims = x.ndim - begin % x.ndim
    return (x, weight, bias), (dims, 2, eps)


def _layer_norm_old(func: Any, xs: tuple, statics: tuple) -> Any:
    x, weight, bias = xs
    return func(x, weight, bias, x.ndim - statics[0], x.ndim - statics[0], statics[2])


def _bind_layer_norm(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, shape, weight, bias, eps = arguments(
        ("x", "normalized_shape", "weight", "bias", "eps"), (None, None, 1e-5), args, kwargs
    )
    return (x, weight, bias), (len(shape), 2, float(eps))


def _layer_norm(func: Any, xs: tuple, statics: tuple) -> Any:
    x, weight, bias = xs
    return func(x, tuple(x.shape[x.ndim - statics[0] :]), weight, bias, statics[2])


def _bind_rms_norm(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, weight, eps = arguments(("x", "gamma", "epsilon"), (1e-6,), args, kwargs)
    return (x, weight), (weight.ndim, 1, float(eps))


OPS.row("LayerNorm LayerNormV3", "layer_norm", _bind_layer_norm_old, _layer_norm_old)
OPS.row("LayerNormExt", "layer_norm", _bind_layer_norm, _layer_norm)
OPS.row("RmsNorm", "rms_norm", _bind_rms_norm, lambda func, xs, statics: func(*xs, statics[2]))


# -------------------------------------------------------------------- embeddings
def _embedding(func: Any, xs: tuple, statics: tuple) -> Any:
    return ops.gather(xs[1], xs[0], 0)


_EMBEDDING_OF_GATHER = row("embedding", lambda args, kwargs: ((args[1], args[0]), (None,)), _embedding)
_INDEX_SELECT_OF_GATHER = row(
    "index_select",
    lambda args, kwargs: (args[:2], (int(args[2]),)),
    lambda func, xs, statics: ops.gather(xs[0], xs[1], statics[0]),
)


def _choose_gather(args: tuple, kwargs: dict) -> NativeOp | None:
    """``Gather(x, ids, axis, batch_dims)`` is an embedding look-up, an index_select, or neither."""
    x, ids, axis = args[:3]
    if kwargs or (len(args) > 3 and args[3]) or not isinstance(ids, Tensor):
        return None
    if len(x.shape) == 2 and axis in (0, -2):
        return _EMBEDDING_OF_GATHER
    return _INDEX_SELECT_OF_GATHER if len(ids.shape) == 1 else None


VARIANTS["Gather"] = _choose_gather


def _bind_embedding(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    ids, weight, padding = arguments(("x", "weight", "padding_idx"), (None,), args, kwargs)
    return (ids, weight), (padding,)


def _embedding_ext(func: Any, xs: tuple, statics: tuple) -> Any:
    """``Embedding`` has no kernel on CPU and no max_norm here; padding only matters to the gradient."""
    if statics[0] is None or device_target() != "CPU":
        return _embedding(func, xs, statics) if statics[0] is None else func(*xs, statics[0], None, 2.0, False)
    ids = xs[0]
    keep = ops.expand_dims(ops.not_equal(ids, statics[0] % max(1, xs[1].shape[0])), -1)
    rows = _embedding(func, xs, statics)
    return ops.select(keep.broadcast_to(rows.shape), rows, ops.stop_gradient(rows))


_EMBEDDING = row("embedding", _bind_embedding, _embedding_ext)
VARIANTS["Embedding"] = lambda args, kwargs: _EMBEDDING if len(args) < 4 or args[3] is None else None
_EMBEDDING_LOOKUP = row("embedding", lambda args, kwargs: ((args[1], args[0]), (None,)), _embedding)
VARIANTS["EmbeddingLookup"] = lambda args, kwargs: (
    _EMBEDDING_LOOKUP if len(args[0].shape) == 2 and (len(args) < 3 or args[2] == 0) else None
)


# -------------------------------------------------------------------- attention
#: positions in FlashAttentionScore(q, k, v, shift, dropout mask, padding mask, attention mask, prefix, query lengths,
#: key lengths, heads, keep_prob, scale, pre_tokens, next_tokens, inner_precise, layout, sparse_mode)
_MASK, _HEADS, _LAYOUT, _SPARSE = 6, 10, 16, 17
_RARE = (3, 4, 5, 7, 8, 9)
_BNSD = 1
_CAUSAL_MODES = (2, 3)


def _bind_flash_attention(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    return (*args[:3], args[_MASK]), (args[_SPARSE] in _CAUSAL_MODES, 1.0 - args[_HEADS + 1], *args[_HEADS + 1 :])


def _flash_attention(func: Any, xs: tuple, statics: tuple) -> Any:
    q, k, v, mask = xs
    return func(q, k, v, None, None, None, mask, None, None, None, q.shape[1], *statics[2:])[3]


_FLASH_ATTENTION = row("attention", _bind_flash_attention, _flash_attention)


def _choose_flash_attention(args: tuple, kwargs: dict) -> NativeOp | None:
    """Only the layout (batch, heads, length, features), without the rarer operands, has a rule."""
    plain = len(args) == 18 and args[_LAYOUT] == _BNSD and all(args[i] is None for i in _RARE)
    return _FLASH_ATTENTION if plain else None


VARIANTS["FlashAttentionScore"] = _choose_flash_attention


# -------------------------------------------------------------------- losses
#: as generated code and the primitives' own attributes count them
_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def _bind_nll(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    x, target, weight, reduction, ignore = arguments(
        ("x", "target", "weight", "reduction", "ignore_index"), (None, "mean", -100), args, kwargs
    )
    return (x, target, weight), (_REDUCTIONS.get(reduction, reduction), int(ignore))


def _nll(func: Any, xs: tuple, statics: tuple) -> Any:
    return ops.nll_loss(xs[0], xs[1], xs[2], ignore_index=statics[1], reduction=statics[0])


def _bind_sparse_cross_entropy(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    return (args[0], args[1], None), ("mean", -100, 0.0)


def _cross_entropy(func: Any, xs: tuple, statics: tuple) -> Any:
    reduction, ignore, smoothing = statics[:3]
    return ops.cross_entropy(xs[0], xs[1], xs[2], ignore, reduction, smoothing)


def _bind_soft_cross_entropy(args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
    return (args[0], args[1], None), ("none", -100, 0.0)


OPS.row("NLLLoss", "nll_loss", _bind_nll, _nll)
OPS.row("SoftmaxCrossEntropyWithLogits", "cross_entropy", _bind_soft_cross_entropy, _cross_entropy)
OPS.row("SparseSoftmaxCrossEntropyWithLogits", "cross_entropy", _bind_sparse_cross_entropy, _cross_entropy)


#: primitives with more results than the canonical operation has: how the one becomes what MindSpore's wrapper takes
RESULTS: dict[str, Callable[[Any], Any]] = {
    "NLLLoss": lambda y: (y, None),
    "SoftmaxCrossEntropyWithLogits": lambda y: (y, None),
    "FlashAttentionScore": lambda y: (None, None, None, y),
}
