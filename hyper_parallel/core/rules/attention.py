"""Scaled dot-product attention."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.rules import cut_attention
from hyper_parallel.core.rules.labels import broadcast
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule(
    "attention",
    "q(*,length,features) k(*,length,features) v(*,length,features) mask=None"
    " | is_causal=False dropout_p=0.0 scale=None enable_gqa=False whole=False",
    repeatable=True,
    memory="fresh",
)
def attention(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Scaled dot-product attention, independent for each batch element and head.

    Key and value heads may be fewer than query heads. Each then serves an equal number of consecutive query heads. So
    both are sharded consistently if the number of shards divides them. The sequence may also be sharded (see
    `cut_attention`).
    """
    found = by_heads(shapes, static_args)
    q, k, v, mask = (*shapes, None)[:4]
    if found is None or any(static_args[4:5]) or not cuts_sequence(q, k, v):
        return found
    rows = q[-2] == (mask or (1, 1))[-2] != 1
    together = q[-2] == k[-2]
    operands = tuple(
        None if labels is None else (*labels[:-2], "s" if cut else None, None)
        for labels, cut in zip(found.operands, (True, together, together, rows), strict=False)
    )
    # Replicated keys and values need not be sharded first.
    choice = tuple(
        None if labels is None else Shard(-2) if cut else Replicate()
        for labels, cut in zip(found.operands, (True, False, False, rows), strict=False)
    )
    return replace(
        found,
        operands=operands,
        results=((*found.results[0][:-2], "s", None),),
        choices=((choice, (Shard(-2),)),),
        call=cut_attention.attend,
        native_if=lambda layouts: not cut_attention.is_cut(layouts),
    )


def cuts_sequence(q: tuple, k: tuple, v: tuple) -> bool:
    """Return whether attention supports a sharded sequence: heads must be compatible, and batch dimensions equal."""
    return len(q) >= 3 and q[:-3] == k[:-3] == v[:-3] and k[-3] == v[-3] != 0 and q[-3] % k[-3] == 0


def by_heads(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Return the sharding of attention that shards batch and heads only, not sequences."""
    q, k, v, mask = (*shapes, None)[:4]
    if any(x is None or len(x) < 2 for x in (q, k, v)) or q[-1] != k[-1] or k[-2] != v[-2]:
        return None
    if len(static_args) > 1 and static_args[1]:
        # The native operation draws the noise. Only on gathered operands does it equal that of a single device.
        return None
    scores = (q[-2], k[-2])
    if mask is not None and (len(mask) < 2 or any(n not in (1, m) for n, m in zip(mask[-2:], scores, strict=True))):
        return None
    q_batch, k_batch, v_batch = q[:-2], k[:-2], v[:-2]
    if q_batch and k_batch and v_batch and k_batch[-1] == v_batch[-1] and 1 < k_batch[-1] < q_batch[-1]:
        if q_batch[-1] % k_batch[-1]:
            return None
        # Key heads get the label of the query heads, as if both had the same number.
        k_batch, v_batch = (*k_batch[:-1], q_batch[-1]), (*v_batch[:-1], q_batch[-1])
    common = broadcast((q_batch, k_batch, v_batch, None if mask is None else mask[:-2]), "b")
    if common is None:
        return None
    shape, labels, batches = common
    operands = tuple(None if batch is None else (*batch, None, None) for batch in batches)
    return OpSharding(
        operands=operands[: len(shapes)],
        results=((*labels, None, None),),
        result_shapes=((*shape, q[-2], v[-1]),),
        # For an empty batch torch uses another kernel, with another backward graph. The collectives of the gradients
        # would come in another order than on the other ranks.
        filled=labels,
    )
