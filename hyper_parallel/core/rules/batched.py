"""Operations on the last dimensions of their operands, such as matrices. These dimensions are unsharded. The leading
dimensions are a batch, which broadcasts and can be sharded."""

from __future__ import annotations

from hyper_parallel.core.rules.labels import broadcast
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule(
    "batched",
    "*xs | counts results",
    repeatable=True,
)
def batched(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Inverses, factorisations, solvers: independent for each element of the batch. Every rank needs an element,
    because kernels may reject empty batches."""
    counts, results = static_args[:2]
    if len(counts) != len(shapes) or any(len(x) < count for x, count in zip(shapes, counts, strict=True)):
        return None
    common = broadcast([x[: len(x) - count] for x, count in zip(shapes, counts, strict=True)], "b")
    if common is None:
        return None
    batch, labels, batches = common
    return OpSharding(
        operands=tuple((*own, *(None,) * count) for own, count in zip(batches, counts, strict=True)),
        results=tuple((*labels, *(None,) * len(shape)) for shape in results),
        result_shapes=tuple((*batch, *shape) for shape in results),
        nonempty=labels,
    )


@rule("pairs", "x y", repeatable=True, memory="fresh")
def pairs(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Distances between each row of x and each row of y.

    The result has shape (b, i, j) for operands of shapes (b, i, k) and (b, j, k). Rows are unsharded; the numbers of
    rows can be sharded.
    """
    x, y = shapes
    if len(x) < 2 or len(y) < 2 or x[-1] != y[-1]:
        return None
    common = broadcast((x[:-2], y[:-2]), "b")
    if common is None:
        return None
    batch, labels, (first, second) = common
    return OpSharding(
        operands=((*first, "i", None), (*second, "j", None)),
        results=((*labels, "i", "j"),),
        result_shapes=((*batch, x[-2], y[-2]),),
        nonempty=(*labels, "i", "j"),
    )
