"""Embedding look-up, with a weight that may be sharded by vocabulary."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.rules.labels import named
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.core.rules.registry import rule


@rule("embedding", "ids weight(vocabulary,features) | padding_idx=None", repeatable=True, memory="fresh")
def embedding(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``weight[ids]``, or ``one_hot(ids) @ weight``: linear in the weight, with the vocabulary contracted."""
    ids, weight = shapes
    if len(weight) != 2:
        return None
    batch = named(ids)
    return OpSharding(
        operands=(batch, ("v", "f")),
        results=((*batch, "f"),),
        result_shapes=((*ids, weight[1]),),
        terms=((1,),),
        reduce="sum",
        call=look_up,
        native_if=lambda layouts: layouts[1].shard_count(0) == 1,
    )


def look_up(call: LocalCall) -> Any:
    """Return the embeddings of ids in this rank's shard, and zeros for other ids. The results of all ranks sum to the
    look-up."""
    platform = call.platform
    ids, weight = call.operands
    vocabulary, size = call.operand_layouts[1].shape[0], call.operand_layouts[1].local_shape[0]
    if size == vocabulary:
        return call.run()
    rows = ids - call.operand_layouts[1].local_offset[0]
    elsewhere = (rows < 0) | (rows >= size)
    # Ids outside the vocabulary stay unchanged, so that the look-up treats them as on a single device.
    known = (ids >= 0) & (ids < vocabulary)
    if size == 0:
        # A filler row keeps the result connected to the weight, whose backward may communicate.
        weight = platform.cat([weight, platform.zeros((1, call.operand_layouts[1].local_shape[1]), weight)], 0)
    found = call.native(
        (platform.masked_fill(rows, elsewhere & known, 0), weight),
        (_local_padding(call.static_args[0], call.operand_layouts[1]), *call.static_args[1:]),
    )
    return platform.masked_fill(found, platform.unsqueeze(elsewhere, -1), 0.0)


def _local_padding(padding: int | None, weight: Any) -> int | None:
    """Return the padding row, whose gradient is zero, as an index into this rank's shard.

    Return None if another rank holds it.
    """
    if padding is None:
        return None
    row = padding % weight.shape[0] - weight.local_offset[0]
    return row if 0 <= row < weight.local_shape[0] else None
