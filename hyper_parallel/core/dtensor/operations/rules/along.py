"""Operations along dimensions that must be whole, independent along all others."""

from __future__ import annotations

from hyper_parallel.core.dtensor.operations.op_sharding import OpSharding
from hyper_parallel.core.dtensor.operations.rules.labels import axes, axis, named, replaced, unary, whole
from hyper_parallel.core.dtensor.operations.rules.registry import rule


@rule(
    "along_dims",
    static_args="dims that must be whole, number of results",
)
def along_dims(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Results of the shape of x: cumsum, sort, flip, roll, tril. Every rank needs an element: for none a backend may
    record nothing (cumprod), and this rank would leave out what the others communicate in gradients of gradients."""
    x, (dims, results) = shapes[0], static_args[:2]
    labels = whole(named(x), axes(dims, len(x)))
    return unary(labels, labels, x, results, nonempty=labels)


@rule("topk", static_args="k, dim; two results")
def topk(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """The k largest or smallest along a dimension: values and indices."""
    x, (k, dim) = shapes[0], static_args[:2]
    if not x:
        return None
    dim = axis(dim, len(x))
    if not 0 <= k <= x[dim]:
        return None
    labels = whole(named(x), (dim,))
    return unary(labels, labels, replaced(x, dim, k), results=2)
