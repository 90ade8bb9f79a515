"""Reading and writing of elements by slices, ints and index tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.rules.labels import (
    Labels,
    Shape,
    axis,
    broadcast,
    named,
    replaced,
    unary,
    whole,
)
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.core.rules.own_part import Cut, Taking, Writing, whole_along
from hyper_parallel.core.rules.registry import rule
from hyper_parallel.core.rules.selection import rows_at_mask
from hyper_parallel.platform.indexing import FULL_SLICE, Place, region_of

_LINEAR = ((0,),)


@dataclass(frozen=True)
class _Indexing:
    """Effect of ``x[index]`` on the dimensions.

    Attributes:
        region: positions in x of the items of the index.
        x: labels of x; None for dimensions that the index cuts.
        tensors: labels of the index tensors.
        labels, shape: labels and shape of the result.
        behind: number of result dimensions after those of the index tensors.
        local_index: the index for shards if it differs, else None. A slice over all elements becomes ``:``, because its
            bounds are global.
    """

    region: tuple[Place, ...]
    x: Labels
    tensors: tuple[Labels, ...]
    labels: Labels
    shape: Shape
    behind: int
    local_index: tuple | None

    @property
    def dims(self) -> tuple[tuple[int, int], ...]:
        """(dimension of x, number of the tensor) for each index tensor."""
        return tuple((p.dim, p.tensor) for p in self.region if p.dim is not None and p.tensor is not None)

    def localize(self) -> Any:
        """Return `OpSharding.localize` for an index that differs on shards, else None."""
        local_index = self.local_index
        if local_index is None:
            return None
        return lambda static_args, operand_layouts, result_layouts: (local_index, *static_args[1:])


def analyse(x: Shape, index: tuple, tensor_shapes: tuple) -> _Indexing | None:
    """Return the effect of an encoded index on the dimensions of ``x``, or None for unsupported indices.

    Masks are unsupported, because the size of their result depends on the data. Mixtures of ints and index tensors on
    which frameworks disagree are unsupported, too.
    """
    if any(isinstance(item, tuple) and (item[0] == "bool" or (item[0] == "tensor" and item[3])) for item in index):
        return None
    region = region_of(index, x)
    items = tuple(place.item for place in region)
    if Ellipsis in items or len(items) - items.count(None) > len(x):
        return None
    together = broadcast(tensor_shapes, "t")
    if together is None:
        return None
    block_shape, block_labels, tensor_labels = together

    place = _place_of_block(index, items)
    if place is None:
        return None

    x_labels: list[str | None] = []
    labels: list[str | None] = []
    shape: list[int] = []
    local_items = list(items)
    before = 0
    for position, (_, dim, picked) in enumerate(region):
        if position == place:
            before = len(labels)
            labels += block_labels
            shape += block_shape
        if dim is None:
            labels.append(None)
            shape.append(1)
            continue
        label = None
        if region[position].is_slice and picked is not None:
            if picked == range(x[dim]):
                label, local_items[position] = f"d{dim}", FULL_SLICE
            labels.append(label)
            shape.append(len(picked))
        x_labels.append(label)
    local_index = tuple(local_items) if local_items != [*items] else None
    behind = len(labels) - before - len(block_labels)
    return _Indexing(region, tuple(x_labels), tensor_labels, tuple(labels), tuple(shape), behind, local_index)


def _is_mask(index: tuple) -> bool:
    """Return whether an encoded index consists of one mask."""
    return len(index) == 1 and _is_tensor(index[0]) and index[0][3]


def _is_tensor(item: Any) -> bool:
    return isinstance(item, tuple) and item[0] == "tensor"


def _place_of_block(index: tuple, items: tuple) -> int | None:
    """Return the position in ``items`` before which the dimensions of the index tensors are inserted; -1 without index
    tensors.

    The rules are NumPy's: the dimensions of adjacent index tensors stay in place, and those of separated index tensors
    come first.

    NumPy treats an int or 0-d tensor as an index tensor, and torch selects it first. An ``...`` that represents no
    dimension separates index tensors in NumPy only. The result is None if these differences change the position.
    """
    tensors = [i for i, item in enumerate(items) if _is_tensor(item) and item[2] > 0]
    if not tensors:
        return -1
    scalars = [i for i, item in enumerate(items) if isinstance(item, int) or (_is_tensor(item) and item[2] == 0)]
    both = sorted(tensors + scalars)
    adjacent = both[-1] - both[0] + 1 == len(both)
    advanced = [i for i, item in enumerate(index) if isinstance(item, int) or _is_tensor(item)]
    dots = index.index(Ellipsis) if Ellipsis in index else len(index)
    if (scalars and not adjacent) or (adjacent and advanced[0] < dots < advanced[-1]):
        return None
    return tensors[0] if adjacent else 0


def _index_of_view(static_args: tuple, shape: tuple, result_shapes: list) -> tuple | None:
    """Return the index, in a tuple, if it gives a view: if it consists of ints, slices, None and ellipses. Otherwise
    return None."""
    index = static_args[0]
    return None if any(isinstance(item, tuple) and item[0] != "slice" for item in index) else (index,)


@rule("getitem", "x *tensors | index", memory="shared", view_index=_index_of_view)
def getitem(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``x[index]``, where dimensions that are selected in full, and dimensions of index tensors, can be sharded.

    If few elements of x are selected, dimensions that index tensors select from can be sharded, too (see `gather`).
    Without index tensors, dimensions that ints and slices select from can be sharded. The result is then the sum over
    the ranks. A mask over the first dimensions may be sharded together with these dimensions.
    """
    if _is_mask(static_args[0]):
        return rows_at_mask(shapes)
    found = analyse(shapes[0], static_args[0], shapes[1:])
    if found is None:
        return None
    if not found.tensors:
        return _cut(shapes[0], found)
    dims = found.dims
    return OpSharding(
        operands=(labels_along(found.x, dims) if _is_few(found.shape, shapes[0]) else found.x, *found.tensors),
        results=(found.labels,),
        result_shapes=(found.shape,),
        terms=_LINEAR,
        reduce="sum",
        localize=found.localize(),
        call=Taking(dims, found.behind).take,
        native_if=whole_along(dim for dim, _ in dims),
    )


def _cut(x: Shape, found: _Indexing) -> OpSharding:
    """Return the sharding for an index of ints and slices."""
    cut = Cut.of(found.region, found.x) if 0 not in found.shape and _is_few(found.shape, x) else None
    if cut is None:
        return OpSharding((found.x,), (found.labels,), (found.shape,), _LINEAR, localize=found.localize())
    labels = labels_along(found.x, tuple((dim, 0) for dim in cut.dims))
    return OpSharding(
        operands=(labels,),
        results=(found.labels,),
        result_shapes=(found.shape,),
        terms=_LINEAR,
        reduce="call",
        localize=found.localize(),
        call=cut.take,
        # Only the native operation returns a view that shares memory.
        native_if=lambda layouts: all(layouts[0].shard_count(dim) == 1 for dim in cut.dims),
    )


def _is_few(taken: Shape, x: Shape) -> bool:
    """Return whether a sum of the taken elements over ranks moves no more than a gather of ``x``."""
    return 2 * math.prod(taken) <= math.prod(x)


@rule("setitem_", "x value=None *tensors | index")
def setitem_(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``x[index] = value``: value broadcasts to ``x[index]``.

    Dimensions of x that index tensors select from, or that ints and slices cut, may be sharded. Each rank then writes
    the elements of its shard. If there are index tensors, cut dimensions must be unsharded. A mask over the first
    dimensions may be sharded together with these dimensions, if one value is written.
    """
    return assigned(shapes, static_args, in_place=True)


def assigned(shapes: tuple, static_args: tuple, in_place: bool) -> OpSharding | None:
    """Return the sharding for ``x[index] = value``, written to x or to a copy of x."""
    x, value = shapes[:2]
    if _is_mask(static_args[0]) and not value and tuple(x[: len(shapes[2])]) == tuple(shapes[2]):
        # One value, which each rank writes where its mask is true.
        all_of_x, own = named(x), None if value is None else ()
        return OpSharding((all_of_x, own, all_of_x[: len(shapes[2])]), (all_of_x,), (tuple(x),))
    found = analyse(x, static_args[0], shapes[2:])
    if found is None:
        return None
    value_labels = None
    if value is not None:
        # Dimensions of size 1 in front are ignored in an assignment.
        extra = max(0, len(value) - len(found.shape))
        if any(size != 1 for size in value[:extra]):
            return None
        start = len(found.shape) - len(value) + extra
        target = tuple(zip(found.shape, found.labels, strict=True))[start:]
        if any(size not in (1, full) for size, (full, _) in zip(value[extra:], target, strict=True)):
            return None
        # Values along an index tensor may go to any element of x, so they match no dimension of the result.
        value_labels = (None,) * extra + tuple(
            label if size == full and label in found.x else None
            for size, (full, label) in zip(value[extra:], target, strict=True)
        )
    labels: Labels = found.x
    cut: Writing | Cut | None
    along: Iterable[int] = ()
    if found.tensors:
        dims = found.dims
        cut, along, labels = Writing(dims, in_place), (dim for dim, _ in dims), labels_along(labels, dims)
    elif cut := Cut.of(found.region, found.x):
        along, labels = cut.dims, tuple(f"c{dim}" if label is None else label for dim, label in enumerate(labels))
    return OpSharding(
        operands=(labels, value_labels, *(whole(labels, range(len(labels))) for labels in found.tensors)),
        results=(labels,),
        result_shapes=(tuple(x),),
        terms=() if value is None else ((0,), (1,)),
        localize=found.localize(),
        call=None if cut is None else cut.write,
        native_if=whole_along(along),
    )


def labels_along(labels: Labels, dims: tuple[tuple[int, int], ...]) -> Labels:
    """Return the ``labels`` of x with new labels for the dimensions that index tensors select from."""
    for dim, _ in dims:
        labels = replaced(labels, dim, f"c{dim}")
    return labels


def _narrowed(static_args: tuple, shape: tuple, result_shapes: list) -> tuple:
    dim, start, length = axis(static_args[0], len(shape)), static_args[1], static_args[2]
    start = start + shape[dim] if start < 0 else start
    return ((*(FULL_SLICE,) * dim, ("slice", start, start + length, None)),)


@rule("narrow", "x | dim start length", repeatable=True, memory="shared", view_index=_narrowed)
def narrow(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Elements from start to start + length along a dimension.

    The dimension can be sharded if all elements are selected, or few (see `getitem`).
    """
    x, (dim, start, length) = shapes[0], static_args[:3]
    if not x:
        return None
    dim = axis(dim, len(x))
    start = start + x[dim] if start < 0 else start
    if length < 0 or start < 0 or start + length > x[dim]:
        return None
    if length < x[dim]:
        return _narrow(x, dim, start, length)

    def localize(static_args: tuple, operand_layouts: tuple, result_layouts: tuple) -> tuple:
        return (dim, 0, result_layouts[0].local_shape[dim], *static_args[3:])

    return unary(named(x), named(x), x, terms=_LINEAR, localize=localize)


def _sliced(operands: tuple, static_args: tuple) -> Any:
    """Return a slice, because `narrow` would lose gradients of gradients on MindSpore."""
    return operands[0][tuple(slice(*item[1:]) for item in static_args[0])]


def _narrow(x: Shape, dim: int, start: int, length: int) -> OpSharding:
    index = (*(FULL_SLICE,) * dim, ("slice", start, start + length, None))
    found = analyse(x, index, ())
    assert found is not None
    sharding = replace(_cut(x, found), localize=None)
    take = sharding.call
    if take is None:
        return sharding

    def run(call: LocalCall) -> Any:
        return take(call._replace(native=_sliced, static_args=(index,)))

    return replace(sharding, call=run)


@rule("gather", "x index | dim")
def gather(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``result[i][j] = x[index[i][j]][j]`` for dim 0.

    If few elements of x are selected, x may be sharded along dim. Each rank takes elements of its shard, and the
    results are summed.
    """
    x, index = shapes
    if index is None:
        return None
    dim = axis(static_args[0], len(x))
    if len(x) != len(index):  # a 0-d tensor is compatible with a 1-d index
        own = ((None,) * len(x), (None,) * len(index))
        known = {len(x), len(index)} == {0, 1} or 0 in index  # an empty index may have any shape
        return OpSharding(own, own[1:], (tuple(index),), terms=_LINEAR) if known else None
    # A shorter index selects from the start of x, so that shards of the two would not match.
    labels = tuple(label if a == b else None for label, a, b in zip(named(x), x, index, strict=True))
    index_labels = tuple("t" if i == dim else label for i, label in enumerate(labels))
    return OpSharding(
        operands=(replaced(labels, dim, "c" if _is_few(index, x) else None), index_labels),
        results=(index_labels,),
        result_shapes=(tuple(index),),
        terms=_LINEAR,
        reduce="sum",
        call=Taking(((dim, 0),), 0, signed=True).take,
        native_if=whole_along((dim,)),
    )


@rule("index_select", "x index | dim")
def index_select(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """``x[:, index]`` for dim 1 and a 1-d index (see `gather`)."""
    x, index = shapes
    if index is None or len(index) > 1:
        return None
    dim = axis(static_args[0], len(x))
    labels = whole(named(x), (dim,))
    # A 0-d index or x counts as a 1-d tensor of one element.
    place, size = ("t", index[0]) if index and x else (None, 1)
    few = index and x and 2 * size <= x[dim]
    return OpSharding(
        operands=(replaced(labels, dim, "c") if few else labels, (place,) * len(index)),
        results=(replaced(labels, dim, place) if x else (),),
        result_shapes=(replaced(x, dim, size) if x else (),),
        terms=_LINEAR,
        reduce="sum",
        call=Taking(((dim, 0),), len(x) - 1 - dim, signed=True).take,
        native_if=whole_along((dim,)),
    )


@rule("one_hot", "x | num_classes=-1", memory="fresh")
def one_hot(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """One-hot encoding in a new last dimension. The number of classes must not depend on the data."""
    x, classes = shapes[0], static_args[0]
    if not isinstance(classes, int) or classes < 0:
        return None
    labels = named(x)
    return unary(labels, (*labels, None), (*x, classes))
