"""Operations of neural networks: embedding, norms, attention, losses, dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.torch.op_table.binding import (
    WORDS,
    Bound,
    Table,
    UnboundCallError,
    autocast_dtype,
    rows,
)

__all__ = ["SKIPPING", "table"]


def table() -> Table:
    """Return the op-table rows for embedding, norms, attention, losses, dropout and gated units."""
    normalized = "x normalized/normalized_shape weight=None"
    counted = "+scale_grad_by_freq=False +sparse=False"
    padded, raw = f"padding_idx=None +max_norm=None norm_type=2.0 {counted}", f"padding_idx=-1 {counted}"
    dropout = "x p=0.5 training/train=True +inplace=False"
    return {
        **rows("embedding", "embedding", f"ids/input weight {padded}", _call_embedding, F, adjust=_looked_up),
        **rows("embedding", "embedding", f"weight ids/indices {raw}", _call_embedding, torch, adjust=_looked_up_raw),
        **rows("layer_norm", "layer_norm", f"{normalized} bias=None eps=1e-5 cudnn_enable=True", _call_layer_norm),
        **rows("rms_norm", "rms_norm", f"{normalized} eps=None", _call_rms_norm),
        **rows("scaled_dot_product_attention", "attention", _ATTENTION, _call_attention, F, adjust=_one_mask),
        **rows("cross_entropy", "cross_entropy", f"{_NLL} label_smoothing=0.0", _call_cross_entropy, F, adjust=_loss),
        **rows("nll_loss", "nll_loss", _NLL, _call_nll_loss, F, adjust=_loss),
        **rows("dropout", "dropout", dropout, _call_dropout, F, torch, adjust=_dropout),
        **rows(_OF_CHANNELS, "dropout", f"{dropout} channels:=True", _call_channels, F, torch, adjust=_dropout),
        **rows("glu", "glu"),
    }


_OF_CHANNELS = "dropout1d dropout2d dropout3d feature_dropout"


# ---------------------------------------------------------------------------------------------------- embedding


def _looked_up(func: Any, operands: tuple, static_args: tuple) -> Bound:
    padding_idx, max_norm, *counted = static_args
    if max_norm is not None:
        raise TypeError(
            "embedding(max_norm=...) changes the weight in place, which is not supported with distributed tensors: "
            "leave max_norm out"
        )
    _reject_counting(*counted)
    return operands, (padding_idx,)


def _looked_up_raw(func: Any, operands: tuple, static_args: tuple) -> Bound:
    padding_idx, *counted = static_args
    _reject_counting(*counted)
    return operands, (None if padding_idx < 0 else padding_idx,)


def _reject_counting(by_freq: bool, sparse: bool) -> None:
    if by_freq or sparse:
        option = "scale_grad_by_freq" if by_freq else "sparse"
        raise TypeError(f"embedding({option}=True) is not supported with distributed tensors")


def _call_embedding(func: Any, operands: tuple, static_args: tuple) -> Any:
    ids, weight = operands
    if not ids.numel():
        # Gradients of gradients of `F.embedding` raise without ids, and the other ranks would wait.
        return weight.index_select(0, ids.reshape(-1)).reshape(*ids.shape, weight.shape[1])
    if not weight.shape[1] and ids.is_cuda:
        # No features: `F.embedding` then reads invalid memory in backward ("an illegal memory access", torch 2.15).
        return weight.sum(0).expand(*ids.shape, 0)
    return F.embedding(ids, weight, static_args[0])


def _call_skipping(func: Any, operands: tuple, static_args: tuple) -> Any:
    ids, padding = operands[0], static_args[0]
    found = _call_embedding(func, operands, static_args)
    return found if padding is None else found.masked_fill((ids == padding).unsqueeze(-1), 0)


#: Row of a look-up that returns zeros for the padding row, whatever its values.
SKIPPING = NativeOp("embedding", "", _call_skipping, words=WORDS)


# ---------------------------------------------------------------------------------------------------- norms


def _call_layer_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, weight, bias = operands
    return torch.layer_norm(x, x.shape[-static_args[0] :], weight, bias, static_args[2])


def _call_rms_norm(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, weight = operands
    return torch.rms_norm(x, x.shape[-static_args[0] :], weight, static_args[2])


# ---------------------------------------------------------------------------------------------------- attention

_ATTENTION = "q/query k/key v/value mask/attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False"


def _one_mask(func: Any, operands: tuple, static_args: tuple) -> Bound:
    if operands[3] is not None and static_args[0]:
        raise UnboundCallError  # torch raises the error: it takes a mask, or is_causal
    return operands, static_args


def _call_attention(func: Any, operands: tuple, static_args: tuple) -> Any:
    q, k, v, mask = operands
    is_causal, dropout_p, scale, enable_gqa, _ = static_args
    return func(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


# ---------------------------------------------------------------------------------------------------- losses

_NLL = "x target weight=None +size_average=None ignore_index=-100 +reduce=None reduction='mean'"


def _loss(func: Any, operands: tuple, static_args: tuple) -> Bound:
    *found, _, size_average, reduce = static_args
    if size_average is not None or reduce is not None:
        raise TypeError("size_average and reduce are not supported on distributed tensors: use reduction=")
    x, target, weight = operands
    # Targets may be uint8, in which an index does not fit.
    target = target.long() if target.dtype is torch.uint8 else target
    return (x, target, weight), (*found, autocast_dtype(x))


def _call_cross_entropy(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, target, weight = operands
    reduction, ignore_index, smoothing, _ = static_args
    return F.cross_entropy(x, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=smoothing)


def _call_nll_loss(func: Any, operands: tuple, static_args: tuple) -> Any:
    x, target, weight = operands
    return F.nll_loss(x, target, weight, ignore_index=static_args[1], reduction=static_args[0])


# ---------------------------------------------------------------------------------------------------- dropout


def _dropout(func: Any, operands: tuple, static_args: tuple) -> Bound:
    p, training, *of_noise, inplace = static_args
    if inplace:
        raise TypeError("dropout(inplace=True) is not supported on distributed tensors: use inplace=False")
    if not 0.0 <= p <= 1.0:
        raise UnboundCallError  # torch raises the error
    return operands, (float(p), training, *of_noise)


def _call_dropout(func: Any, operands: tuple, static_args: tuple) -> Any:
    return torch.dropout(operands[0], *static_args[:2])


def _call_channels(func: Any, operands: tuple, static_args: tuple) -> Any:
    """Call ``func`` on unsharded channels. The function finds the dimension of the channels from the number of
    dimensions."""
    return func(operands[0], *static_args[:2])
