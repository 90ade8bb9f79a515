"""Operations along unsharded dimensions, independent along all other dimensions."""

from __future__ import annotations

from hyper_parallel.core.rules.labels import axes, axis, named, replaced, unary, whole, without
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule(
    "along_dims",
    "x | dims results=1",
)
def along_dims(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Functions along dimensions that keep the shape of x: cumprod, sort, cummax.

    A rank without elements computes with a filler element. For empty tensors, a backend may record no operation
    (cumprod). The rank would then skip collectives in gradients of gradients.
    """
    x, (dims, results) = shapes[0], static_args[:2]
    labels = whole(named(x), axes(dims, len(x)))
    return unary(labels, labels, x, results, filled=labels)


@rule("along_linear", "x | dims=None shape=None")
def along_linear(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Linear functions along unsharded dimensions, whose size may change: cumsum, flip, roll, tril, Fourier transforms,
    differences.

    A rank without elements computes with a filler element, as in `along_dims`.
    """
    x, (dims, shape) = shapes[0], static_args[:2]
    shape, dims = x if shape is None else shape, axes(dims, len(x))
    if without(shape, dims) != without(x, dims):
        return None
    labels = whole(named(x), dims)
    return unary(labels, labels, shape, terms=((0,),), filled=labels)


@rule("topk", "x | k dim=-1 largest=True sorted=True")
def topk(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """The k largest or smallest elements along a dimension: values and indices."""
    x, (k, dim) = shapes[0], static_args[:2]
    dim = axis(dim, len(x))
    if not 0 <= k <= (x[dim] if x else 1):
        return None
    labels = whole(named(x), (dim,))
    return unary(labels, labels, replaced(x, dim, k) if x else (), results=2)


@rule("quantile", "x q=None | dim=None keepdim=False")
def quantile(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Quantiles along an unsharded dimension. The dimension of the requested quantiles comes first in the result, and
    may be sharded."""
    x, wanted, (dim, keepdim) = shapes[0], (*shapes, None)[1], static_args[:2]
    reduced = axes(dim, len(x))
    labels, asked = whole(named(x), reduced), () if wanted is None else named(wanted, "q")
    return OpSharding(
        operands=(labels, None if wanted is None else asked)[: len(shapes)],
        results=((*asked, *without(labels, reduced, keepdim)),),
        result_shapes=((*(wanted or ()), *without(x, reduced, keepdim, 1)),),
        filled=labels,
    )
