"""Operations of neural networks: embedding, norms, attention, losses, dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import Table, UnboundCallError, autocast_dtype, signature

__all__ = ["table"]

T: Any = torch.Tensor


def table() -> Table:
    """Rows of embedding, layer_norm, rms_norm, attention, cross_entropy, nll_loss and dropout."""
    rows: Table = {}
    rows[F.embedding] = NativeOp("embedding", _bind_embedding, _call_embedding)
    rows[torch.embedding] = NativeOp("embedding", _bind_raw_embedding, _call_embedding)
    rows[F.layer_norm] = NativeOp("layer_norm", _bind_layer_norm, _call_layer_norm)
    rows[torch.layer_norm] = NativeOp("layer_norm", _bind_torch_layer_norm, _call_layer_norm)
    rms_norm = NativeOp("rms_norm", _bind_rms_norm, _call_rms_norm)
    rows[F.rms_norm] = rows[torch.rms_norm] = rms_norm
    rows[F.scaled_dot_product_attention] = NativeOp("attention", _bind_attention, _call_attention)
    rows[F.cross_entropy] = NativeOp("cross_entropy", _bind_cross_entropy, _call_cross_entropy)
    rows[F.nll_loss] = NativeOp("nll_loss", _bind_nll_loss, _call_nll_loss)
    rows[F.dropout] = rows[torch.dropout] = NativeOp("dropout", _bind_dropout, _call_dropout)
    return rows


# ---------------------------------------------------------------------------------------------------- embedding

_embedding_arguments = signature(
    "input", "weight", padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False
)
_raw_embedding_arguments = signature("weight", "indices", padding_idx=-1, scale_grad_by_freq=False, sparse=False)


def _bind_embedding(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    ids, weight, padding_idx, max_norm, _, by_freq, sparse = _embedding_arguments(func, args, kwargs)
    if max_norm is not None:
        raise TypeError("embedding(max_norm=...) rewrites the weight in place: not with distributed tensors")
    _reject_counting(by_freq, sparse)
    return (ids, weight), (padding_idx,)


def _bind_raw_embedding(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    weight, ids, padding_idx, by_freq, sparse = _raw_embedding_arguments(func, args, kwargs)
    _reject_counting(by_freq, sparse)
    return (ids, weight), (None if padding_idx < 0 else padding_idx,)


def _reject_counting(by_freq: bool, sparse: bool) -> None:
    if by_freq or sparse:
        option = "scale_grad_by_freq" if by_freq else "sparse"
        raise TypeError(f"embedding({option}=True) is not supported with distributed tensors")


def _call_embedding(func: Any, operands: tuple, statics: tuple) -> Any:
    ids, weight = operands
    if not ids.numel():
        # Gradients of gradients of `F.embedding` raise where there are no ids, and the other ranks would wait.
        return weight.index_select(0, ids.reshape(-1)).reshape(*ids.shape, weight.shape[1])
    return F.embedding(ids, weight, statics[0])


# ---------------------------------------------------------------------------------------------------- norms

_layer_norm_arguments = signature("input", "normalized_shape", weight=None, bias=None, eps=1e-5)
_torch_layer_norm_arguments = signature(
    "input", "normalized_shape", weight=None, bias=None, eps=1e-5, cudnn_enable=True
)
_rms_norm_arguments = signature("input", "normalized_shape", weight=None, eps=None)


def _bind_layer_norm(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, shape, weight, bias, eps = _layer_norm_arguments(func, args, kwargs)
    return (x, weight, bias), (_count(shape), 0, eps)


def _bind_torch_layer_norm(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, shape, weight, bias, eps, _ = _torch_layer_norm_arguments(func, args, kwargs)
    return (x, weight, bias), (_count(shape), 0, eps)


def _bind_rms_norm(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, shape, weight, eps = _rms_norm_arguments(func, args, kwargs)
    return (x, weight), (_count(shape), 0, eps)


def _count(normalized_shape: Any) -> int:
    return 1 if isinstance(normalized_shape, int) else len(normalized_shape)


def _call_layer_norm(func: Any, operands: tuple, statics: tuple) -> Any:
    x, weight, bias = operands
    return torch.layer_norm(x, x.shape[-statics[0] :], weight, bias, statics[2])


def _call_rms_norm(func: Any, operands: tuple, statics: tuple) -> Any:
    x, weight = operands
    return torch.rms_norm(x, x.shape[-statics[0] :], weight, statics[2])


# ---------------------------------------------------------------------------------------------------- attention

_attention_arguments = signature(
    "query", "key", "value", attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
)


def _bind_attention(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    q, k, v, mask, dropout_p, is_causal, scale, enable_gqa = _attention_arguments(func, args, kwargs)
    return (q, k, v, mask), (bool(is_causal), dropout_p, scale, enable_gqa)


def _call_attention(func: Any, operands: tuple, statics: tuple) -> Any:
    q, k, v, mask = operands
    is_causal, dropout_p, scale, enable_gqa = statics
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


# ---------------------------------------------------------------------------------------------------- losses

_cross_entropy_arguments = signature(
    "input",
    "target",
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
)
_nll_arguments = signature(
    "input", "target", weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"
)


def _reject_deprecated(size_average: Any, reduce: Any) -> None:
    if size_average is not None or reduce is not None:
        raise TypeError("size_average and reduce are not supported on distributed tensors: use reduction=")


def _bind_cross_entropy(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, target, weight, average, ignore, reduce, reduction, smoothing = _cross_entropy_arguments(func, args, kwargs)
    _reject_deprecated(average, reduce)
    return (x, _classes(target), weight), (reduction, ignore, float(smoothing), autocast_dtype(x))


def _classes(target: Any) -> Any:
    """Targets may be bytes too, in which an index does not fit."""
    return target.long() if target.dtype is torch.uint8 else target


def _call_cross_entropy(func: Any, operands: tuple, statics: tuple) -> Any:
    x, target, weight = operands
    reduction, ignore_index, smoothing, _ = statics
    return F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing)


def _bind_nll_loss(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    x, target, weight, average, ignore, reduce, reduction = _nll_arguments(func, args, kwargs)
    _reject_deprecated(average, reduce)
    return (x, _classes(target), weight), (reduction, ignore, autocast_dtype(x))


def _call_nll_loss(func: Any, operands: tuple, statics: tuple) -> Any:
    x, target, weight = operands
    return F.nll_loss(x, target, weight, ignore_index=statics[1], reduction=statics[0])


# ---------------------------------------------------------------------------------------------------- dropout

_dropout_arguments = signature("input", p=0.5, training=True, inplace=False)


def _bind_dropout(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
    if func is torch.dropout:
        kwargs = {{"train": "training"}.get(k, k): v for k, v in kwargs.items()}
    x, p, training, inplace = _dropout_arguments(func, args, kwargs)
    if inplace:
        raise TypeError("dropout(inplace=True) is not supported on distributed tensors: use inplace=False")
    if not 0.0 <= p <= 1.0:
        raise UnboundCallError  # torch words the error
    return (x,), (float(p), bool(training))


def _call_dropout(func: Any, operands: tuple, statics: tuple) -> Any:
    return torch.dropout(operands[0], *statics)
