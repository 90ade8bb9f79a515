"""Assignment of rectangles to writing ranks. It follows from layouts alone, so all ranks compute it without
communication."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.rectangles import Rectangle, held_rectangles

__all__ = ["Wanted", "Writer", "entry_name", "share_out"]

#: Minimum bytes of a rectangle whose holders write a part each.
SHARED_FROM = 1 << 20


class Wanted(NamedTuple):
    """A tensor that is to be saved.

    Attributes:
        name: name in the checkpoint.
        layout: layout of a DTensor; None for a plain tensor, which all ranks hold.
        shape: global shape.
        itemsize: bytes of an element.
    """

    name: str
    layout: Layout | None
    shape: tuple[int, ...]
    itemsize: int


#: Rectangles, and the ranks that hold all of these.
_Held = tuple[tuple[Rectangle, ...], list[int]]


class Writer(NamedTuple):
    """A rectangle, and the rank that writes it."""

    rank: int
    rectangle: Rectangle


def share_out(tensors: Iterable[Wanted], members: Sequence[int]) -> dict[str, list[Writer]]:
    """Assign the rectangles of each tensor to ranks. Exactly one of the ranks that hold an element writes it. Ranks
    that hold the same elements divide them, so that all ranks write about equally many bytes.

    Args:
        tensors: all tensors of the checkpoint.
        members: global ranks of the writers.

    Raises:
        ValueError: if no writer holds some rectangle of a tensor.
    """
    load = dict.fromkeys(members, 0)
    known: dict[Layout, list[_Held]] = {}
    holders: list[_Held]
    found: dict[str, list[Writer]] = {}
    for x in tensors:
        if x.layout is None:
            whole = Rectangle((0,) * len(x.shape), x.shape, (0,) * len(x.shape))
            holders = [((whole,) if math.prod(x.shape) else (), [*members])]
        else:
            if x.layout not in known:
                known[x.layout] = [(held, [r for r in ranks if r in load]) for held, ranks in _holders(x.layout)]
            holders = known[x.layout]
            if not all(ranks for _, ranks in holders):
                raise ValueError(
                    f"{x.name!r} is sharded over {x.layout.mesh}, and the saving ranks {list(members)} do not hold "
                    "all of its shards: let all ranks of the mesh save"
                )
        found[x.name] = [writer for held, ranks in holders for writer in _share(held, ranks, x.itemsize, load)]
    return found


def _holders(layout: Layout) -> list[tuple[tuple[Rectangle, ...], list[int]]]:
    """Return rectangles with the ranks that hold them, in the order of the ranks' coordinates. Along dimensions of the
    root mesh that ``layout.mesh`` lacks, all ranks hold the same rectangles."""
    mesh = layout.mesh
    ranks = mesh.get_root_mesh().ranks
    by_part: dict[tuple[Rectangle, ...], list[int]] = {}
    known: dict[tuple[int, ...], tuple[Rectangle, ...]] = {}
    for place in np.ndindex(*ranks.shape):
        coordinate = tuple(
            _joint_index([place[d] for d in dims], [ranks.shape[d] for d in dims]) for dims in mesh.slices.along
        )
        if coordinate not in known:
            known[coordinate] = held_rectangles(layout, coordinate)
        if known[coordinate]:
            by_part.setdefault(known[coordinate], []).append(int(ranks[place]))
    return [*by_part.items()]


def _joint_index(indices: Sequence[int], sizes: Sequence[int]) -> int:
    """Return ``indices`` into dimensions of ``sizes`` as one row-major index."""
    joint = 0
    for index, size in zip(indices, sizes, strict=True):
        joint = joint * size + index
    return joint


def _share(held: Sequence[Rectangle], ranks: Sequence[int], itemsize: int, load: dict[int, int]) -> list[Writer]:
    nbytes = sum(math.prod(r.sizes) for r in held) * itemsize
    pieces: list[Writer] = []
    if nbytes >= SHARED_FROM and len(ranks) > 1:
        pieces = [Writer(rank, piece) for r in held for rank, piece in zip(ranks, _cut(r, len(ranks)), strict=False)]
    else:
        least = min(ranks, key=lambda rank: (load[rank], rank))
        pieces = [Writer(least, r) for r in held]
    for piece in pieces:
        load[piece.rank] += math.prod(piece.rectangle.sizes) * itemsize
    return pieces


def _cut(r: Rectangle, count: int) -> list[Rectangle]:
    """Return at most ``count`` rectangles of about equal size, cut along the first dimension that is long enough."""
    dim = next((d for d, n in enumerate(r.sizes) if n >= count), None)
    if dim is None:
        return [r]
    size, parts = r.sizes[dim], []
    for i in range(count):
        start, stop = size * i // count, size * (i + 1) // count
        offsets, sizes, local_offsets = map(list, r)
        offsets[dim] += start
        local_offsets[dim] += start
        sizes[dim] = stop - start
        parts.append(Rectangle(tuple(offsets), tuple(sizes), tuple(local_offsets)))
    return parts


def entry_name(name: str, shape: Sequence[int], r: Any) -> str:
    """Return the name of a rectangle in its file: the name of the tensor, with an index unless the rectangle is all of
    it."""
    if tuple(r.sizes) == tuple(shape):
        return name
    index = (":" if n == size else f"{o}:{o + n}" for o, n, size in zip(r.offsets, r.sizes, shape, strict=True))
    return f"{name}[{', '.join(index)}]"
