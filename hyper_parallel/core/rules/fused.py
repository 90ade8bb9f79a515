"""Fused operations of backends: a gated activation, rotary embeddings, a norm of a sum."""

from __future__ import annotations

from hyper_parallel.core.rules.labels import axis, broadcast, named, replaced, unary, whole
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule


@rule("glu", "x | dim=-1")
def glu(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """First half along ``static_args[0]``, gated by a function of the second half."""
    x = shapes[0]
    if not x:
        return None
    dim = axis(static_args[0], len(x))
    if x[dim] % 2:
        return None
    labels = whole(named(x), (dim,))
    return unary(labels, labels, replaced(x, dim, x[dim] // 2))


@rule("rotary", "x r1 r2 | mode='half'")
def rotary(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Rotary embedding. Cosines and sines broadcast to x. The last dimension, in which pairs are rotated, is
    unsharded."""
    x = shapes[0]
    if not all(shapes) or any(shape[-1] != x[-1] for shape in shapes):
        return None
    common = broadcast([shape[:-1] for shape in shapes])
    if common is None or common[0] != tuple(x[:-1]):
        return None
    _, labels, operands = common
    return OpSharding(
        operands=tuple((*operand, None) for operand in operands),
        results=((*labels, None),),
        result_shapes=(tuple(x),),
        terms=((0,),),  # linear in x
    )


@rule("add_rms_norm", "x1 x2 gamma | epsilon=1e-6")
def add_rms_norm(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Norm of the sum of two tensors of one shape, its statistic, and the sum.

    The norm is over the dimensions of the weight, the third operand. The statistic keeps these dimensions with size 1.
    """
    x, other, weight = shapes
    batch = len(x or ()) - len(weight or ())
    if not x or x != other or not weight or batch < 0 or tuple(weight) != tuple(x[batch:]):
        return None
    labels = whole(named(x), range(batch, len(x)))
    return OpSharding(
        operands=(labels, labels, (None,) * len(weight)),
        results=(labels,) * 3,
        result_shapes=(tuple(x), (*x[:batch], *(1,) * len(weight)), tuple(x)),
    )
