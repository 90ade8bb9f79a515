"""Rectangular boxes of a tensor that a rank holds, for storing and resharding tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

from hyper_parallel.core.layouts.cuts import ranges_of
from hyper_parallel.core.layouts.layout import Layout

__all__ = ["Rectangle", "held_rectangles"]


class Rectangle(NamedTuple):
    """A box of a tensor, and its position in the shard of the rank that holds it.

    Attributes:
        offsets: index of the first element in the global tensor, per tensor dimension.
        sizes: size per tensor dimension, always positive.
        local_offsets: index of the first element in the rank's shard.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


def held_rectangles(layout: Layout, coordinate: Sequence[int]) -> tuple[Rectangle, ...]:
    """Return the rectangles of a tensor of ``layout`` that the rank at ``coordinate`` of the mesh holds, in row-major
    order.

    There is one rectangle, or one for each part of a packed dimension, or none for an empty shard. A rank with a
    partial tensor (`Partial`) counts as a rank with the full tensor.

    Args:
        layout: layout of a tensor of any number of dimensions; a 0-d tensor is one rectangle.
        coordinate: index of the rank along each mesh dimension.

    Example:
        >>> from hyper_parallel import PackedShard, Shard, init_device_mesh
        >>> from hyper_parallel.core.layouts.layout import get_layout
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> held_rectangles(get_layout(mesh, (Shard(0),), (4, 3)), (0,))
        (Rectangle(offsets=(0, 0), sizes=(4, 3), local_offsets=(0, 0)),)
    """
    pieces_of_dims = []
    for dim, size in enumerate(layout.shape):
        ranges = ranges_of(size, layout.shard_mesh_dims(dim), layout.placements, layout.mesh.shape, coordinate)
        local_starts = accumulate((length for _, length in ranges), initial=0)
        pieces_of_dims.append([(start, n, local) for (start, n), local in zip(ranges, local_starts, strict=False) if n])
    return tuple(
        Rectangle(*(tuple(piece[i] for piece in pieces) for i in range(3))) for pieces in product(*pieces_of_dims)
    )
