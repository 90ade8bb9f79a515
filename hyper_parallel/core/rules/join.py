"""Concatenation and splitting of tensors, along a dimension that is unsharded or packed with the same sizes.

All of these operations are linear, so partial sums stay partial.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hyper_parallel.core.rules.labels import axis, named, replaced, unary, whole
from hyper_parallel.core.rules.op_sharding import OpSharding
from hyper_parallel.core.rules.registry import rule
from hyper_parallel.platform.indexing import FULL_SLICE


@rule("cat", "*xs | dim=0", repeatable=True, memory="fresh")
def cat(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Concatenation along a dimension."""
    first = shapes[0] if shapes else None
    if not first or any(shape is None or len(shape) != len(first) for shape in shapes):
        return None
    dim = axis(static_args[0], len(first))
    if len({replaced(shape, dim) for shape in shapes}) > 1:
        return None
    labels = whole(named(first), (dim,))
    return OpSharding(
        operands=(labels,) * len(shapes),
        results=(labels,),
        result_shapes=(replaced(first, dim, sum(shape[dim] for shape in shapes)),),
        terms=tuple((i,) for i in range(len(shapes))),
    )


@rule("stack", "*xs | dim=0", repeatable=True, memory="fresh")
def stack(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Concatenation along a new dimension."""
    if not shapes or shapes[0] is None or len(set(shapes)) > 1:
        return None
    first = shapes[0]
    dim, labels = axis(static_args[0], len(first) + 1), named(first)
    return OpSharding(
        operands=(labels,) * len(shapes),
        results=((*labels[:dim], None, *labels[dim:]),),
        result_shapes=((*first[:dim], len(shapes), *first[dim:]),),
        terms=tuple((i,) for i in range(len(shapes))),
    )


def _parts(x: tuple[int, ...], dim: int, sizes: Sequence[int], localize: Any = None) -> OpSharding | None:
    """Return the sharding for ``x`` split into parts of ``sizes``."""
    if any(size < 0 for size in sizes) or sum(sizes) != x[dim]:
        return None
    labels = whole(named(x), (dim,))
    return OpSharding(
        operands=(labels,),
        results=(labels,) * len(sizes),
        result_shapes=tuple(replaced(x, dim, size) for size in sizes),
        terms=((0,),),
        localize=localize,
        # Unequal parts are split by their sizes. A number of chunks would split shards at other positions.
        unpack=((dim, tuple(sizes), dim),) if localize or len(set(sizes)) == 1 else (),
    )


def _pieces(length: int, size: int) -> list[int]:
    """Return the sizes of the pieces when ``length`` elements are split into pieces of ``size``. A length of 0 gives
    one piece of size 0."""
    return [min(size, length - start) for start in range(0, length, size)] or [0]


def _index_of_pieces(static_args: tuple, shape: tuple, result_shapes: list) -> tuple:
    """Return the index of each of the consecutive pieces along dimension ``static_args[1]``."""
    dim = axis(static_args[1], len(shape))
    ends = accumulate(result[dim] for result in result_shapes)
    return tuple(
        (*(FULL_SLICE,) * dim, ("slice", end - result[dim], end, None))
        for result, end in zip(result_shapes, ends, strict=True)
    )


@rule("split", "x | split_size dim=0", repeatable=True, memory="shared", view_index=_index_of_pieces)
def split(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """Pieces of one size, the last one possibly smaller, or of a list of sizes."""
    x, (size, dim) = shapes[0], static_args[:2]
    if not x or size == 0:
        return None
    dim = axis(dim, len(x))

    def localize(static_args: tuple, operand_layouts: tuple, result_layouts: tuple) -> tuple:
        here = tuple(layout.local_shape[dim] for layout in result_layouts)
        return static_args if sum(here) == x[dim] else (here, *static_args[1:])

    return _parts(x, dim, _pieces(x[dim], size) if isinstance(size, int) else tuple(size), localize)


@rule("chunk", "x | chunks dim=0", repeatable=True, memory="shared", view_index=_index_of_pieces)
def chunk(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """At most ``chunks`` pieces of one size, the last one possibly smaller."""
    x, (chunks, dim) = shapes[0], static_args[:2]
    if not x or chunks < 1:
        return None
    dim = axis(dim, len(x))
    if x[dim] == 0:
        return _parts(x, dim, [0] * chunks)
    pieces = _pieces(x[dim], -(-x[dim] // chunks))
    if len(pieces) == chunks or len(set(pieces)) > 1:
        return _parts(x, dim, pieces)
    # An empty shard would return the requested number of pieces, not the actual one.
    return _parts(x, dim, pieces, lambda static_args, *layouts: (len(pieces), *static_args[1:]))


def _index_of_slices(static_args: tuple, shape: tuple, result_shapes: list) -> tuple:
    """Return the index of each slice along dimension ``static_args[0]``."""
    return tuple((*(FULL_SLICE,) * axis(static_args[0], len(shape)), i) for i in range(len(result_shapes)))


@rule("unbind", "x | dim=0", memory="shared", view_index=_index_of_slices)
def unbind(shapes: tuple, static_args: tuple) -> OpSharding | None:
    """One result for each index of a dimension, without that dimension."""
    x = shapes[0]
    if not x:
        return None
    dim = axis(static_args[0], len(x))
    labels = whole(named(x), (dim,))
    return unary(labels, replaced(labels, dim), replaced(x, dim), results=x[dim], terms=((0,),))
