"""Attention whose scores are changed by user-defined functions of batch element and head."""

from __future__ import annotations

from hyper_parallel.core.rules.attention import by_heads
from hyper_parallel.core.rules.labels import Labels
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule(
    "flex_attention",
    "q(batch,heads,length,features) k(batch,heads,length,features) v(batch,heads,length,features) *whole"
    " | fixed statistics",
)
def flex_attention(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Attention with scores that functions change, and its statistics, independent for each batch element and head.

    A statistic is a number for each query. The last static argument of the local call contains this rank's (start,
    length) ranges of batch elements and heads. Packed shards have several ranges.
    """
    fixed, statistics = static_args[:2]
    found = by_heads(shapes[:3], (False, 0.0))
    if found is None or any(len(x) != 4 for x in shapes[:3]):
        return None
    gone = {label for label, whole in zip(found.results[0], fixed, strict=False) if whole}

    def shardable(labels: Labels) -> Labels:
        return tuple(None if label in gone else label for label in labels)

    read = tuple(None if x is None else (None,) * len(x) for x in shapes[3:])
    out, shape = shardable(found.results[0]), found.result_shapes[0]
    return OpSharding(
        operands=(*(shardable(x or ()) for x in found.operands), *read),
        results=(out, *(out[:3],) * statistics),
        result_shapes=(shape, *(shape[:3],) * statistics),
        localize=_own_pieces,
    )


def _own_pieces(static_args: tuple, operand_layouts: tuple, result_layouts: tuple) -> tuple:
    return (*static_args, result_layouts[0].local_ranges()[:2])
