"""Rows of the op table for layers: linear maps, norms, embeddings, attention, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint, ops

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.op_table.binding import Bound, Choose, by_name, instead, row
from hyper_parallel.platform.mindspore.processes.launch import device_target

__all__ = ["OPS", "RESULTS", "VARIANTS"]


# -------------------------------------------------------------------- products
def _matmul(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> Any:
    if not (transpose_a or transpose_b):
        return mint.matmul(a, b)
    if a.ndim == b.ndim == 2:
        return _MATMUL[transpose_a, transpose_b](a, b)
    return mint.matmul(mint.transpose(a, -1, -2) if transpose_a else a, mint.transpose(b, -1, -2) if transpose_b else b)


_MATMUL = {(ta, tb): ops.MatMul(ta, tb) for ta in (False, True) for tb in (False, True)}


def _addmm(c: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
    """Compute ``Addmm``, which has no kernel on CPU, from other operations."""
    product = mint.matmul(a, b)
    return (c if beta == 1 else c * beta) + (product if alpha == 1 else product * alpha)


# -------------------------------------------------------------------- norms
def _layer_norm_old(func: Any, xs: tuple, static_args: tuple) -> Any:
    begin = xs[0].ndim - static_args[0]
    return func(*xs, begin, begin, static_args[2])


def _layer_norm(func: Any, xs: tuple, static_args: tuple) -> Any:
    x, weight, bias = xs
    return func(x, tuple(x.shape[x.ndim - static_args[0] :]), weight, bias, static_args[2])


def _rms_norm(func: Any, xs: tuple, static_args: tuple) -> Any:
    return func(*xs, static_args[2])


# -------------------------------------------------------------------- embeddings
def _look_up(ids: Any, weight: Any, padding: None) -> Any:
    return ops.gather(weight, ids, 0)


def _embedding(func: Any, xs: tuple, static_args: tuple) -> Any:
    """Look up rows of the weight. ``Embedding`` has no kernel on CPU. Calls with max_norm do not come here; padding
    affects the gradient only."""
    ids, weight = xs
    padding = static_args[0]
    if padding is not None and device_target() != "CPU":
        return func(ids, weight, padding, None, 2.0, False)
    rows = ops.gather(weight, ids, 0)
    if padding is None:
        return rows
    keep = ops.expand_dims(ops.not_equal(ids, padding % max(1, weight.shape[0])), -1)
    return ops.select(keep.broadcast_to(rows.shape), rows, ops.stop_gradient(rows))


_GATHERED_ROWS = row("embedding", "weight ids", instead(_look_up))
_INDEX_SELECT = row("index_select", "", instead(ops.gather))
_EMBEDDING = row("embedding", "ids/x/input weight padding_idx=None", _embedding)


def _choose_gather(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for ``Gather(x, ids, axis, batch_dims)``: an embedding look-up, an index_select, or
    none."""
    x, ids, axis = args[:3]
    if kwargs or (len(args) > 3 and args[3]) or not isinstance(ids, Tensor):
        return None
    if len(x.shape) == 2 and axis in (0, -2):
        return _GATHERED_ROWS
    return _INDEX_SELECT if len(ids.shape) == 1 else None


def _choose_embedding(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for an embedding without max_norm."""
    return _EMBEDDING if len(args) < 4 or args[3] is None else None


def _choose_embedding_lookup(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for a look-up in a matrix, without an offset."""
    return _GATHERED_ROWS if len(args[0].shape) == 2 and (len(args) < 3 or args[2] == 0) else None


# -------------------------------------------------------------------- attention
#: Positions in FlashAttentionScore(q, k, v, shift, dropout mask, padding mask, attention mask, prefix, query lengths,
#: key lengths, heads, keep_prob, scale, pre_tokens, next_tokens, inner_precise, layout, sparse_mode).
_MASK, _HEADS, _LAYOUT, _SPARSE = 6, 10, 16, 17
_RARE = (3, 4, 5, 7, 8, 9)
_BNSD = 1
_CAUSAL_MODES = (2, 3)


def _bind_flash_attention(func: Any, args: tuple, kwargs: dict) -> Bound:
    keep, scale, *rest = args[_HEADS + 1 :]
    # Its masks and modes refer to full sequences.
    return (*args[:3], args[_MASK]), (args[_SPARSE] in _CAUSAL_MODES, 1.0 - keep, scale, keep, True, *rest)


def _flash_attention(func: Any, xs: tuple, static_args: tuple) -> Any:
    q, k, v, mask = xs
    _, _, scale, keep, _, *rest = static_args
    return func(q, k, v, None, None, None, mask, None, None, None, q.shape[1], keep, scale, *rest)[3]


_FLASH_ATTENTION = row("attention", _bind_flash_attention, _flash_attention)


def _choose_flash_attention(args: tuple, kwargs: dict) -> NativeOp | None:
    """Choose the op-table row for attention with dimensions (batch, heads, length, features).

    Calls with rare operands have no rule.
    """
    known = len(args) == 18 and args[_LAYOUT] == _BNSD and all(args[i] is None for i in _RARE)
    return _FLASH_ATTENTION if known else None


# -------------------------------------------------------------------- losses
def _nll(func: Any, xs: tuple, static_args: tuple) -> Any:
    return ops.nll_loss(*xs, ignore_index=static_args[1], reduction=static_args[0])


def _cross_entropy(func: Any, xs: tuple, static_args: tuple) -> Any:
    reduction, ignore, smoothing = static_args[:3]
    return ops.cross_entropy(*xs, ignore, reduction, smoothing)


_OLD_NORM = "x weight bias begin_norm begin_params eps"
_NORM = "x normalized/normalized_shape weight=None bias=None eps=1e-5 statistics:=2"

OPS: dict[str, NativeOp] = by_name(
    {
        "Dense": row("linear", "", instead(mint.nn.functional.linear)),
        "MatMul MatMulExt BatchMatMul BatchMatMulExt Mm MatMulV2 BatchMatMulV2 Bmm": row(
            "matmul",
            "",
            instead(_matmul),
        ),
        "Addmm": row("addmm", "", instead(_addmm)),
        "LayerNorm LayerNormV3": row("layer_norm", f"from_dim: {_OLD_NORM}", _layer_norm_old),
        "LayerNormExt": row("layer_norm", _NORM, _layer_norm),
        "RmsNorm": row("rms_norm", "by_weight: x weight/gamma eps=1e-6", _rms_norm),
        "NLLLoss": row(
            "nll_loss",
            "x target weight=None reduction='mean' ignore_index=-100",
            _nll,
        ),
        # these primitives have no options
        "SoftmaxCrossEntropyWithLogits": row("cross_entropy", "x target reduction:='none'", _cross_entropy),
        "SparseSoftmaxCrossEntropyWithLogits": row("cross_entropy", "x target", _cross_entropy),
    }
)

VARIANTS: dict[str, Choose] = {
    "Gather": _choose_gather,
    "DeprecatedGather": _choose_gather,
    "Embedding": _choose_embedding,
    "EmbeddingLookup": _choose_embedding_lookup,
    "FlashAttentionScore": _choose_flash_attention,
}

#: Primitives with more results than the canonical operation: a function from its result to those of the primitive.
RESULTS: dict[str, Callable[[Any], Any]] = {
    "NLLLoss": lambda y: (y, None),
    "SoftmaxCrossEntropyWithLogits": lambda y: (y, None),
    "FlashAttentionScore": lambda y: (None, None, None, y),
}
