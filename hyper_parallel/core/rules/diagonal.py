"""Diagonals of matrices, extracted or inserted. The two matrix dimensions are unsharded, all others can be sharded."""

from __future__ import annotations

from hyper_parallel.core.layouts.strides import Shape, Strides
from hyper_parallel.core.rules.labels import axis, named, unary, whole, without
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule

_LINEAR = ((0,),)


def _length(rows: int, columns: int, offset: int) -> int:
    """Return the number of elements of a diagonal."""
    return max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)


def _strides_of_diagonal(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides:
    pair = [axis(dim, len(shape)) for dim in static_args[1:3]]
    return (*without(strides, pair), sum(strides[dim] for dim in pair))


@rule("diagonal", "x | offset=0 dim1=0 dim2=1", repeatable=True, memory="shared", view_strides=_strides_of_diagonal)
def diagonal(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """The diagonal of matrices, as the last dimension."""
    x, offset = shapes[0], static_args[0]
    if len(x) < 2:
        return None
    rows, columns = (axis(dim, len(x)) for dim in static_args[1:3])
    if rows == columns:
        return None
    labels = whole(named(x), (rows, columns))
    pair = (rows, columns)
    return unary(
        labels,
        (*without(labels, pair), None),
        (*without(x, pair), _length(x[rows], x[columns], offset)),
        terms=_LINEAR,
    )


@rule("diag_embed", "x | offset=0 dim1=-2 dim2=-1", repeatable=True)
def diag_embed(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Matrices that have the last dimension of x as a diagonal, and zeros elsewhere."""
    x, offset = shapes[0], static_args[0]
    if not x:
        return None
    pair = tuple(axis(dim, len(x) + 1) for dim in static_args[1:3])
    if pair[0] == pair[1]:
        return None
    labels, size = whole(named(x), (len(x) - 1,)), x[-1] + abs(offset)
    others, sizes = iter(labels[:-1]), iter(x[:-1])
    made = [(None, size) if dim in pair else (next(others), next(sizes)) for dim in range(len(x) + 1)]
    return unary(labels, tuple(label for label, _ in made), tuple(n for _, n in made), terms=_LINEAR)
