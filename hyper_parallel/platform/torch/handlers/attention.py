"""`torch.nn.MultiheadAttention` on DTensors: heads get their own dimension, so that they can be sharded.

Torch's own function merges samples and heads into one dimension, in which a shard of heads is no slice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.torch.basics.private import nested_left_aligned
from hyper_parallel.platform.torch.basics.tensor import handles, replaces
from hyper_parallel.platform.torch.op_table import UnboundCallError

__all__: list[str] = []


@handles(nested_left_aligned)
def is_left_aligned(func: Any, args: tuple, kwargs: dict) -> bool:
    """Return False: `nn.TransformerEncoder` then takes its path without nested tensors, which DTensors need."""
    return False


@replaces(F.multi_head_attention_forward)
def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Compute the projections, attention for each head, and the output projection.

    A weight in which query, key and value are packed (`PackedShard`) gives sharded heads, as `ColwiseParallel` does. An
    output projection sharded along its input then gives a partial sum, as `RowwiseParallel` does.
    """
    if static_k is not None or static_v is not None or (bias_k is None) != (bias_v is None):
        raise UnboundCallError
    if is_causal and attn_mask is None:
        raise UnboundCallError  # torch raises the error
    batched = query.dim() == 3
    if not batched:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if query.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads:
        raise UnboundCallError  # torch raises the error
    weights = (
        (q_proj_weight, k_proj_weight, v_proj_weight)
        if use_separate_proj_weight
        else _packed(query, key, value, in_proj_weight)
    )
    q, k, v = (_heads(x, num_heads) for x in _projected((query, key, value), weights, in_proj_weight, in_proj_bias))
    added = [] if bias_k is None else [(bias_k, bias_v)]
    for more in [*added, *([None] if add_zero_attn else [])]:
        k, v = (_with_one_more(x, None if more is None else more[i], num_heads) for i, x in enumerate((k, v)))
        attn_mask, key_padding_mask = (None if m is None else F.pad(m, (0, 1)) for m in (attn_mask, key_padding_mask))
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(attn_mask, key_padding_mask, num_heads, q.dtype)
    dropout_p = dropout_p if training else 0.0
    scores: Any = None
    if need_weights or dropout_p:
        # The noise is drawn by a rule, equals that of one device, and needs no gathering.
        causal_mask = _mask(attn_mask, None, num_heads, q.dtype) if causal else mask
        hides_all = None
        if causal_mask is not None and not need_weights:
            # Torch's kernel of attention returns zeros for a query without keys, its softmax NaN.
            hides_all = (causal_mask == -math.inf).all(-1, keepdim=True)
            causal_mask = causal_mask.masked_fill(hides_all, 0.0)
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        scores = F.softmax(scores if causal_mask is None else scores + causal_mask, dim=-1)
        scores = F.dropout(scores, dropout_p) if dropout_p else scores
        y = scores @ v
        y = y if hides_all is None else y.masked_fill(hides_all, 0.0)
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal)
    length, batch = query.shape[:2]
    y = F.linear(y.permute(2, 0, 1, 3).reshape(length, batch, embed_dim_to_check), out_proj_weight, out_proj_bias)
    if not need_weights:
        return y if batched else y.squeeze(1), None
    scores = scores.mean(dim=1) if average_attn_weights else scores
    return (y, scores) if batched else (y.squeeze(1), scores.squeeze(0))


def _packed(query: Any, key: Any, value: Any, weight: Any) -> Any:
    """Return the weights of query, key and value separately, or None if one product can compute all three."""
    return None if query is key and key is value else weight.chunk(3)


def _projected(xs: tuple, weights: Any, packed: Any, bias: Any) -> Any:
    if weights is None:
        return F.linear(xs[0], packed, bias).chunk(3, dim=-1)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return (F.linear(x, weight, b) for x, weight, b in zip(xs, weights, biases, strict=True))


def _heads(x: Any, count: int) -> Any:
    """Reshape (length, batch, features) to (batch, heads, length, features of a head)."""
    return x.reshape(*x.shape[:2], count, x.shape[2] // count).permute(1, 2, 0, 3)


def _with_one_more(x: Any, own: Any, heads: int) -> Any:
    """Append one key or value, the same for all samples: ``own``, or zeros."""
    one = (
        torch.zeros_like(x[:, :, :1])
        if own is None
        else _heads(own.reshape(1, 1, -1), heads).expand(x.shape[0], -1, -1, -1)
    )
    return torch.cat([x, one], dim=2)


def _mask(mask: Any, padding: Any, heads: int, dtype: torch.dtype) -> Any:
    """Return the tensor that is added to the scores."""
    mask, padding = _numbers(mask, dtype), _numbers(padding, dtype)
    if mask is not None and mask.dim() == 3:
        mask = mask.reshape(mask.shape[0] // heads, heads, *mask.shape[1:])
    if padding is not None:
        padding = padding.reshape(padding.shape[0], 1, 1, padding.shape[1])
    return padding if mask is None else mask if padding is None else mask + padding


def _numbers(mask: Any, dtype: torch.dtype) -> Any:
    """Convert a boolean mask, true for excluded keys, to numbers that are added to the scores."""
    if mask is None or mask.is_floating_point():
        return mask
    if mask.dtype is not torch.bool:
        raise UnboundCallError  # torch raises the error
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
