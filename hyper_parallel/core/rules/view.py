"""Operations that rearrange elements. All of them are linear, so partial sums stay partial."""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.layouts.strides import (
    Shape,
    Strides,
    expanded_strides,
    permuted_strides,
    reshaped_strides,
)
from hyper_parallel.core.rules.labels import (
    all_elements,
    axis,
    named,
    replaced,
    unary,
    whole,
    without,
)
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule

_LINEAR = ((0,),)
_TAKES = "x | *sizes"
_RESHAPED: dict[str, Any] = {"repeatable": True, "view_index": all_elements, "view_strides": reshaped_strides}


def _local_shape(static_args: tuple, operand_layouts: tuple, result_layouts: tuple) -> tuple:
    """Return the static arguments of a local call, with the local shape of the result as the first one."""
    return (tuple(result_layouts[0].local_shape), *static_args[1:])


@rule("reshape_copy", _TAKES, repeatable=True, memory="fresh")
@rule("view", _TAKES, memory="shared", **_RESHAPED)
@rule("reshape", _TAKES, memory="viewable", **_RESHAPED)
def reshape(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Tensor in another shape.

    Dimensions form groups with the same number of elements before and after. In ``(4, 8, 6) -> (32, 2, 3)``, the groups
    are ``4, 8 -> 32`` and ``6 -> 2, 3``. Sharding the outermost dimension of a group splits it into contiguous ranges
    on both sides. For that, the number of shards must divide both sizes. The other dimensions of a group are unsharded.
    """
    x = shapes[0]
    shape = _filled(static_args[0], math.prod(x))
    if shape is None or math.prod(shape) != math.prod(x):
        return None
    before: list[str | None] = [None] * len(x)
    after: list[str | None] = [None] * len(shape)
    pairs = _same_leading(x, shape) if 0 in x else _outermost_pairs(x, shape)
    unpack = []
    for i, j in pairs:
        before[i] = after[j] = f"d{i}"
        if 0 < shape[j] < x[i] and x[i] % shape[j] == 0:
            # (3 * heads * size) -> (3, heads, size), with packed query, key and value, is sharded by heads.
            unpack.append((i, (x[i] // shape[j],) * shape[j], j + 1))
    return unary(tuple(before), tuple(after), shape, terms=_LINEAR, localize=_local_shape, unpack=tuple(unpack))


def _filled(shape: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Return ``shape`` with its -1 replaced by the size that gives ``count`` elements."""
    if -1 not in shape:
        return tuple(shape)
    known = -math.prod(shape)
    if known <= 0 or count % known:
        return None
    return tuple(count // known if size == -1 else size for size in shape)


def _same_leading(x: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    # Groups of an empty tensor are ambiguous. Leading dimensions of equal size are assumed to be the same.
    pairs: list[tuple[int, int]] = []
    for i, (size, other) in enumerate(zip(x, shape, strict=False)):
        if size != other:
            break
        pairs.append((i, i))
    return pairs


def _outermost_pairs(x: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the outermost dimensions, before and after, of each group.

    Dimensions of size 1 belong to no group. Unchanged leading dimensions of size 1, such as a batch of one sample, stay
    separate.
    """
    before = [i for i, size in enumerate(x) if size != 1]
    after = [j for j, size in enumerate(shape) if size != 1]
    pairs = [(i, j) for i, j in _same_leading(x, shape) if x[i] == 1]
    while before:
        pairs.append((before[0], after[0]))
        count, other = x[before.pop(0)], shape[after.pop(0)]
        while count != other:
            if count < other:
                count *= x[before.pop(0)]
            else:
                other *= shape[after.pop(0)]
    return pairs


@rule("permute", "x | *order", repeatable=True, memory="shared", view_strides=permuted_strides)
def permute(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Permutation of dimensions."""
    x = shapes[0]
    order = tuple(axis(d, len(x)) for d in static_args[0])
    if sorted(order) != list(range(len(x))):
        return None
    labels = named(x)
    return unary(labels, tuple(labels[d] for d in order), tuple(x[d] for d in order), terms=_LINEAR)


@rule("expand", _TAKES, repeatable=True, memory="shared", view_strides=expanded_strides)
def expand(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Expansion of dimensions of size 1, with new leading dimensions. Both kinds of dimensions are unsharded."""
    x, wanted = shapes[0], static_args[0]
    new = len(wanted) - len(x)
    if new < 0 or -1 in wanted[:new]:
        return None
    shape = (*wanted[:new], *(old if size == -1 else size for old, size in zip(x, wanted[new:], strict=True)))
    if any(old not in (1, size) for old, size in zip(x, shape[new:], strict=True)):
        return None
    labels = tuple(label if old == size else None for label, old, size in zip(named(x), x, shape[new:], strict=True))
    return unary(labels, (None,) * new + labels, shape, terms=_LINEAR, localize=_local_shape)


@rule("squeeze", "x | removed=None", memory="shared", **_RESHAPED)
def squeeze(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Removal of dimensions of size 1.

    The local call gets these dimensions as a tuple, which may be empty. Without the tuple, it would also drop a larger
    dimension whose shard has size 1.
    """
    x, dims = shapes[0], static_args[0]
    if isinstance(dims, int):
        dims = (dims,)
    wanted = range(len(x)) if dims is None else [axis(d, len(x)) for d in dims if x]
    dropped = tuple(sorted({d for d in wanted if x[d] == 1}))
    labels = whole(named(x), dropped)
    return unary(
        labels,
        without(labels, dropped),
        without(x, dropped),
        terms=_LINEAR,
        localize=lambda static_args, operand_layouts, result_layouts: (dropped, *static_args[1:]),
    )


@rule("unsqueeze", "x | dim", memory="shared", **_RESHAPED)
def unsqueeze(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """New dimension of size 1."""
    x = shapes[0]
    dim, labels = axis(static_args[0], len(x) + 1), named(x)
    return unary(labels, (*labels[:dim], None, *labels[dim:]), (*x[:dim], 1, *x[dim:]), terms=_LINEAR)


@rule("repeat", "x | *tiles")
def repeat(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Repetition of the tensor as tiles, with new leading dimensions. Unrepeated dimensions can be sharded."""
    x, repeats = shapes[0], static_args[0]
    new = len(repeats) - len(x)
    if new < 0 or any(count < 0 for count in repeats):
        return None
    sizes = (1,) * new + tuple(x)
    shape = tuple(size * count for size, count in zip(sizes, repeats, strict=True))
    labels = tuple(label if count == 1 else None for label, count in zip(named(x), repeats[new:], strict=True))
    return unary(labels, (None,) * new + labels, shape, terms=_LINEAR)


@rule("repeat_interleave", "x | repeats repeated_dim/dim=None")
def repeat_interleave(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Repetition of every element along a dimension ``repeats`` times in a row, so that shards stay contiguous."""
    x, (repeats, dim) = shapes[0], static_args[:2]
    if not isinstance(repeats, int) or repeats < 0 or dim is None or not x:
        return None
    dim, labels = axis(dim, len(x)), named(x)
    return unary(labels, labels, replaced(x, dim, x[dim] * repeats), terms=_LINEAR)


@rule("pad", "x | pairs mode='constant'")
def pad(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Padding with elements (or cropping, if negative) before and after. Such dimensions are unsharded.

    Partial sums are completed first: a constant added on each rank would be summed too. If the added elements are
    copies of existing elements, a rank whose shard is empty computes with a filler element.
    """
    x, pads = shapes[0], static_args[0]
    copies = len(static_args) > 1 and static_args[1] != "constant"
    if len(pads) != len(x):
        return None
    labels = tuple(label if tuple(p) == (0, 0) else None for label, p in zip(named(x), pads, strict=True))
    shape = tuple(before + size + after for size, (before, after) in zip(x, pads, strict=True))
    return unary(labels, labels, shape, filled=labels if copies else ())


def _strides_of_windows(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides:
    dim, _, step = static_args[:3]
    strides = strides or (1,)
    dim = axis(dim, len(shape))
    return (*replaced(strides, dim, strides[dim] * step), strides[dim]) if shape else strides


@rule("windows", "x | dim size step", repeatable=True, memory="shared", view_strides=_strides_of_windows)
def windows(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Windows that slide along an unsharded dimension, and become the last dimension (torch: ``unfold``)."""
    x, (dim, size, step) = shapes[0], static_args[:3]
    dim, length = axis(dim, len(x)), x[axis(dim, len(x))] if x else 1
    if size < 0 or size > length or step <= 0:
        return None
    labels = whole(named(x), (dim,))
    count = (length - size) // step + 1
    return unary(labels, (*labels, None), (*(replaced(x, dim, count) if x else ()), size), terms=_LINEAR)


def _strides_in_pairs(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides:
    return (*(2 * step for step in strides), 1)


@rule("real_pairs", repeatable=True, memory="shared", view_strides=_strides_in_pairs)
def real_pairs(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Complex numbers as pairs of real numbers, in a new last dimension."""
    x, labels = shapes[0], named(shapes[0])
    return unary(labels, (*labels, None), (*x, 2), terms=_LINEAR)


def _strides_of_pairs(static_args: tuple, shape: Shape, strides: Strides, result_shape: Shape) -> Strides:
    return tuple(step // 2 for step in strides[:-1])


@rule("complex_pairs", repeatable=True, memory="shared", view_strides=_strides_of_pairs)
def complex_pairs(shapes: tuple, static_args: Any) -> OpSharding | None:
    """Pairs of real numbers, in the last dimension, as complex numbers."""
    x = shapes[0]
    if not x or x[-1] != 2:
        return None
    labels = whole(named(x), (len(x) - 1,))
    return unary(labels, labels[:-1], x[:-1], terms=_LINEAR)
