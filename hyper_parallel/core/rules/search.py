"""Look-up of elements in replicated tables, and counting of elements."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.rules.labels import named
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule("by_table", "x table=None", memory="ordered")
def by_table(shapes: tuple, static_args: Any) -> OpSharding | None:
    """One result for each element of x, computed from this element and from replicated tables: bucketize, isin."""
    x, labels = shapes[0], named(shapes[0])
    tables = (None if table is None else (None,) * len(table) for table in shapes[1:])
    return OpSharding((labels, *tables), (labels,), (tuple(x),))


@rule("searchsorted", "sequences values sorters=None")
def searchsorted(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Position of each value in its sequence, which is unsharded.

    If there is a single sequence, all values are searched in it. Otherwise sequences and values have the same leading
    dimensions. A value is then searched in the sequence at its leading index.
    """
    sequences, values = shapes[:2]
    count = len(sequences) - 1
    if values is None or (count and (count != len(values) - 1 or sequences[:-1] != values[:-1])):
        return None
    labels = named(values)
    own = (*labels[:count], None)
    operands = tuple(None if s is None else n for s, n in zip(shapes, (own, labels, own), strict=False))
    return OpSharding(operands, (labels,), (tuple(values),))


@rule("count", "x weights=None | bins", memory="fresh")
def count(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Number of elements of x, or their weight, in each bin. The results of the shards are summed."""
    x, weights = (*shapes, None)[:2]
    labels = named(x)
    if weights is not None and tuple(weights) != tuple(x):
        return None
    return OpSharding(
        operands=(labels, None if weights is None else labels)[: len(shapes)],
        results=((None,),),
        result_shapes=((static_args[0],),),
        terms=() if weights is None else ((1,),),
        reduce="sum",
    )
