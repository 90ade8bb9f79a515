"""Writing or adding elements by index tensors, into a copy of a tensor; and reading elements by flat index.

Dimensions that an index selects from are unsharded, except for ``x[index] = value``. A source whose elements are added
may be sharded along the index. Each rank then adds its share, and the result is a partial sum.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.rules.indexing import analyse, assigned, labels_along
from hyper_parallel.core.rules.labels import Labels, axis, named, replaced, whole
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.own_part import Writing, whole_along
from hyper_parallel.core.rules.registry import rule

#: Combination of written elements with old ones -> `OpSharding.terms` of operands 0 and 2.
_TERMS = {"add": ((0,), (2,)), "replace": ((0,), (2,))}


def _written(shapes: tuple, labels: Labels, index: Labels, source: Labels | None, how: str) -> OpSharding:
    """Return the sharding for x, an index and a source. The source is None if a number is written."""
    terms = _TERMS.get(how, ()) if source is not None else ()
    if how != "add" or not terms:  # only sums can be split along the index
        index = tuple(label if label in labels else None for label in index)
        source = None if source is None else tuple(label if label in labels else None for label in source)
    return OpSharding(
        operands=(labels, index, source)[: len(shapes)],
        results=(labels,),
        result_shapes=(tuple(shapes[0]),),
        terms=terms,
        reduce="sum",
    )


@rule("scatter", "x index source=None | dim how='replace'")
def scatter(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``x[index[i][j]][j] = source[i][j]`` for dim 0, or added.

    In a dimension in which the index is shorter, it applies to the start of x and of the source. Shards of the three
    tensors would not match, so such dimensions are unsharded.
    """
    x, index, source = (*shapes, None)[:3]
    dim, how = static_args[:2]
    dim = axis(dim, len(x))
    if len(index) != len(x) or (source is not None and len(source) != len(x)):
        return None  # an empty index may have any shape
    if any(n > m for d, (n, m) in enumerate(zip(index, x, strict=True)) if d != dim):
        return None
    sizes = zip(x, index, index if source is None else source, strict=True)
    labels = tuple(
        ("t" if d == dim else f"d{d}") if (a == b or d == dim) and b == c else None for d, (a, b, c) in enumerate(sizes)
    )
    return _written(shapes, whole(labels, (dim,)), labels, None if source is None else labels, how)


@rule("index_write", "x index(n) source=None | dim how='replace'")
def index_write(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``x[:, index] = source`` for dim 1, or another combination of x and source, such as their sum."""
    x, index, source = (*shapes, None)[:3]
    dim, how = static_args[:2]
    dim = axis(dim, len(x))
    labels = whole(named(x), (dim,))
    if not x or len(index) != 1 or not source:
        # A 0-d x, or one value for all positions, has no dimensions to shard.
        own = None if source is None else (None,) * len(source)
        return _written(shapes, labels, (None,) * len(index), own, how) if not x or not source else None
    if replaced(source, dim) != replaced(x, dim) or source[dim] != index[0]:
        return None
    return _written(shapes, labels, ("t",), replaced(labels, dim, "t"), how)


@rule("setitem", "x value *tensors | index")
def setitem(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Copy of x with ``x[index] = value`` (see `setitem_`)."""
    return assigned(shapes, static_args, in_place=False)


@rule("index_add", "x value *tensors | index")
def index_add(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``x[index] += value``, repeated for elements that are indexed several times.

    Dimensions along index tensors may be sharded, as in `setitem_`.
    """
    x, value = shapes[:2]
    found = analyse(x, static_args[0], shapes[2:])
    if found is None or value is None or len(value) > len(found.shape):
        return None
    target = tuple(zip(found.shape, found.labels, strict=True))[len(found.shape) - len(value) :]
    if any(size not in (1, full) for size, (full, _) in zip(value, target, strict=True)):
        return None
    own = tuple(label if size == full else None for size, (full, label) in zip(value, target, strict=True))
    dims = found.dims
    labels = labels_along(found.x, dims)
    return OpSharding(
        operands=(labels, own, *(tuple(n if n in own else None for n in labels) for labels in found.tensors)),
        results=(labels,),
        result_shapes=(tuple(x),),
        terms=((0,), (1,)),
        reduce="sum",
        localize=found.localize(),
        call=Writing(dims, in_place=False).write,
        native_if=whole_along(dim for dim, _ in dims),
    )


@rule("take", "x index")
def take(shapes: tuple, static_args: Any) -> OpSharding | None:
    """``x.reshape(-1)[index]``: x is unsharded, the index may be sharded."""
    x, index = shapes
    labels = named(index, "t")
    return OpSharding(((None,) * len(x), labels), (labels,), (tuple(index),), terms=((0,),))


@rule("put", "x index source | how='replace'")
def put(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``x.reshape(-1)[index] = source``, or added."""
    x, index, source = shapes
    labels = named(index, "t") if tuple(index) == tuple(source) else None
    own = (labels or (None,) * len(index), labels or (None,) * len(source))
    return _written(shapes, (None,) * len(x), *own, static_args[0])
