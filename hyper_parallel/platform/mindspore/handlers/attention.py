"""`nn.MultiheadAttention` of MindSpore: heads get their own dimension, so that they can be sharded.

MindSpore's function merges samples and heads into one dimension, in which a shard of heads is no slice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import mint, ops

from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, is_dispatching

__all__ = ["PARAMETERS", "attention_by_heads"]

#: Parameter names of MindSpore's function.
PARAMETERS = """
query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p
out_proj_weight out_proj_bias training key_padding_mask attn_mask use_separate_proj_weight q_proj_weight k_proj_weight
v_proj_weight static_k static_v average_attn_weights is_causal k_is_v q_is_k dtype
"""


def attention_by_heads(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Replace ``multi_head_attention_forward``: the projections, attention for each head, and the output projection.

    The replacement applies to weights that are DTensors. A weight in which query, key and value are packed
    (`PackedShard`) gives sharded heads, as `ColwiseParallel` does. An output projection sharded along its input then
    gives a partial sum, as `RowwiseParallel` does. Biases of keys and values, dropout in training and masks of each
    head are left to MindSpore's function.
    """
    if not is_dispatching():
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    a = given.arguments
    weights = (a["in_proj_weight"], a["q_proj_weight"], a["out_proj_weight"])
    if not any(isinstance(w, InterceptedTensor) for w in weights) or not _is_served(a):
        return original(*args, **kwargs)
    query, heads = a["query"], a["num_heads"]
    length, batch, features = query.shape
    q, k, v = (
        x.reshape((*x.shape[:2], heads, features // heads)).permute((1, 2, 0, 3)) for x in _projected(**_of_inputs(a))
    )
    if a["add_zero_attn"]:
        k, v = (_with_zeros(x, 2) for x in (k, v))
    scores = mint.matmul(q / math.sqrt(features // heads), k.swapaxes(-1, -2))
    for mask in _masks(a, q.dtype):
        scores = scores + (_with_zeros(mask, 3) if a["add_zero_attn"] else mask)
    scores = ops.softmax(scores, -1)
    y = mint.matmul(scores, v).permute((2, 0, 1, 3)).reshape((length, batch, features))
    y = ops.dense(y, a["out_proj_weight"], a["out_proj_bias"])
    return y, (mint.sum(scores, 1) / heads if a["average_attn_weights"] else scores)


def _is_served(a: dict[str, Any]) -> bool:
    """Return whether a call, given by argument name, uses only features that this module supports."""
    none = ("bias_k", "bias_v", "static_k", "static_v")
    query, mask = a["query"], a["attn_mask"]
    return (
        all(a[name] is None for name in none)
        and not a["is_causal"]
        and not (a["training"] and a["dropout_p"])
        and query.ndim == a["key"].ndim == a["value"].ndim == 3
        and query.shape[-1] == a["embed_dim_to_check"]
        and query.shape[-1] % a["num_heads"] == 0
        and (mask is None or (mask.ndim == 2 and _is_numbers(mask)))
        and (a["key_padding_mask"] is None or _is_numbers(a["key_padding_mask"]))
    )


def _is_numbers(mask: Any) -> bool:
    return mask.dtype == ms.bool_ or ops.is_floating_point(mask)


def _of_inputs(a: dict[str, Any]) -> dict[str, Any]:
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return {
        "xs": (a["query"], a["key"], a["value"]),
        "weights": tuple(a[n] for n in names) if a["use_separate_proj_weight"] else None,
        "packed": a["in_proj_weight"],
        "bias": a["in_proj_bias"],
        "same": a["k_is_v"] and a["q_is_k"],
    }


def _projected(xs: tuple, weights: tuple | None, packed: Any, bias: Any, same: bool) -> Any:
    """Return query, key and value, computed by one product if they have the same input."""
    if weights is None and same:
        return mint.chunk(ops.dense(xs[0], packed, bias), 3, -1)
    weights = mint.chunk(packed, 3, 0) if weights is None else weights
    biases = (None,) * 3 if bias is None else mint.chunk(bias, 3, 0)
    return [ops.dense(x, weight, b) for x, weight, b in zip(xs, weights, biases, strict=True)]


def _with_zeros(x: Any, dim: int) -> Any:
    """Append zeros of size 1 along ``dim``, as for an additional key and value that no mask excludes."""
    return mint.cat([x, ops.zeros_like(mint.narrow(x, dim, 0, 1))], dim)


def _masks(a: dict[str, Any], dtype: Any) -> list[Any]:
    """Return the tensors that are added to the scores (batch, heads, query, key)."""
    found = []
    if a["attn_mask"] is not None:
        found.append(_numbers(a["attn_mask"], dtype).reshape((1, 1, *a["attn_mask"].shape)))
    if a["key_padding_mask"] is not None:
        batch, length = a["key_padding_mask"].shape
        found.append(_numbers(a["key_padding_mask"], dtype).reshape((batch, 1, 1, length)))
    return found


def _numbers(mask: Any, dtype: Any) -> Any:
    """Convert a boolean mask, true for excluded keys, to numbers that are added to the scores."""
    return ops.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf) if mask.dtype == ms.bool_ else mask
