"""Operations of neural networks: embedding, norms, attention, losses, dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.torch.op_table.binding import Bound, Table, UnboundCallError, autocast_dtype, binds, rows

__all__ = ["table"]


def table() -> Table:
    """Rows of embedding, layer_norm, rms_norm, attention, cross_entropy, nll_loss, dropout and gated units."""
    layer_norm = "input normalized_shape weight=None bias=None eps=1e-5 cudnn_enable=True -> input weight bias"
    rms_norm = "input normalized_shape weight=None eps=None -> input weight | normalized_shape 0 eps"
    return {
        **rows("embedding", "embedding", _bind_embedding, _call_embedding, F),
        **rows("embedding", "embedding", _bind_raw_embedding, _call_embedding, torch),
        **rows("layer_norm", "layer_norm", f"{layer_norm} | normalized_shape 0 eps", _call_layer_norm),
        **rows("rms_norm", "rms_norm", rms_norm, _call_rms_norm),
        **rows("scaled_dot_product_attention", "attention", _ATTENTION, _call_attention, F),
        **rows("cross_entropy", "cross_entropy", _bind_cross_entropy, _call_cross_entropy, F),
        **rows("nll_loss", "nll_loss", _bind_nll_loss, _call_nll_loss, F),
        **rows("dropout", "dropout", _bind_dropout, _call_dropout, F, torch),
        **rows("dropout1d dropout2d dropout3d feature_dropout", "dropout", _bind_channels, _call_channels, F, torch),
        **rows("glu", "glu", "input dim=-1"),
    }


# ---------------------------------------------------------------------------------------------------- embedding


@binds("input weight padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False sparse=False")
def _bind_embedding(
    ids: Any, weight: Any, padding_idx: Any, max_norm: Any, norm: Any, by_freq: bool, sparse: bool
) -> Bound:
    if max_norm is not None:
        raise TypeError("embedding(max_norm=...) rewrites the weight in place: not with distributed tensors")
    _reject_counting(by_freq, sparse)
    return (ids, weight), (padding_idx,)


@binds("weight indices padding_idx=-1 scale_grad_by_freq=False sparse=False")
def _bind_raw_embedding(weight: Any, ids: Any, padding_idx: int, by_freq: bool, sparse: bool) -> Bound:
    _reject_counting(by_freq, sparse)
    return (ids, weight), (None if padding_idx < 0 else padding_idx,)


def _reject_counting(by_freq: bool, sparse: bool) -> None:
    if by_freq or sparse:
        option = "scale_grad_by_freq" if by_freq else "sparse"
        raise TypeError(f"embedding({option}=True) is not supported with distributed tensors")


def _call_embedding(func: Any, operands: tuple, static_args: tuple) -> Any:
    ids, weight = operands
    if not ids.numel():
        # Gradients of gradients of `F.embedding` raise where there are no ids, and the other ranks would wait.
        return weight.index_select(0, ids.reshape(-1)).reshape(*ids.shape, weight.shape[1])
    if not weight.shape[1] and ids.is_cuda:
        # No features: there backward reads memory that is not its own ("an illegal memory access", torch 2.15).
        return weight.sum(0).expand(*ids.shape, 0)
    return F.embedding(ids, weight, static_args[0])


# ---------------------------------------------------------------------------------------------------- norms


def _call_layer_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, weight, bias = operands
    return torch.layer_norm(x, x.shape[-static_args[0] :], weight, bias, static_args[2])


def _call_rms_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, weight = operands
    return torch.rms_norm(x, x.shape[-static_args[0] :], weight, static_args[2])


# ---------------------------------------------------------------------------------------------------- attention

_ATTENTION = (
    "query key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False"
    " -> query key value attn_mask | is_causal dropout_p scale enable_gqa"
)


def _call_attention(func: Any, operands: tuple, static_args: tuple) -> Any:
    q, k, v, mask = operands
    is_causal, dropout_p, scale, enable_gqa = static_args
    return func(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


# ---------------------------------------------------------------------------------------------------- losses

_NLL = "input target weight=None size_average=None ignore_index=-100 reduce=None reduction='mean'"


def _loss_operands(x: Any, target: Any, weight: Any, size_average: Any, reduce: Any) -> tuple:
    if size_average is not None or reduce is not None:
        raise TypeError("size_average and reduce are not supported on distributed tensors: use reduction=")
    # Targets may be bytes too, in which an index does not fit.
    return x, target.long() if target.dtype is torch.uint8 else target, weight


@binds(f"{_NLL} label_smoothing=0.0")
def _bind_cross_entropy(
    x: Any, target: Any, weight: Any, average: Any, ignore: int, reduce: Any, reduction: str, smoothing: float
) -> Bound:
    static_args = (reduction, ignore, float(smoothing), autocast_dtype(x))
    return _loss_operands(x, target, weight, average, reduce), static_args


def _call_cross_entropy(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, target, weight = operands
    reduction, ignore_index, smoothing, _ = static_args
    return F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing)


@binds(_NLL)
def _bind_nll_loss(x: Any, target: Any, weight: Any, average: Any, ignore: int, reduce: Any, reduction: str) -> Bound:
    return _loss_operands(x, target, weight, average, reduce), (reduction, ignore, autocast_dtype(x))


def _call_nll_loss(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, target, weight = operands
    return F.nll_loss(x, target, weight, ignore_index=static_args[1], reduction=static_args[0])


# ---------------------------------------------------------------------------------------------------- dropout


@binds("input p=0.5 training/train=True inplace=False")
def _bind_dropout(x: Any, p: float, training: bool, inplace: bool) -> Bound:
    if inplace:
        raise TypeError("dropout(inplace=True) is not supported on distributed tensors: use inplace=False")
    if not 0.0 <= p <= 1.0:
        raise UnboundCallError  # torch words the error
    return (x,), (float(p), bool(training))


def _bind_channels(func: Any, args: tuple, kwargs: dict) -> Bound:
    operands, static_args = _bind_dropout(func, args, kwargs)
    return operands, (*static_args, None, None, True)


def _call_dropout(func: Any, operands: tuple, static_args: tuple) -> Any:
    return torch.dropout(operands[0], *static_args)


def _call_channels(func: Any, operands: tuple, static_args: tuple) -> Any:
    """Call ``func`` on whole channels. It finds their dimension by their number."""
    return func(operands[0], *static_args[:2])
