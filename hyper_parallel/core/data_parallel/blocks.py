"""Positions of a parameter's elements in the flat buffers that ranks exchange; plain arithmetic on local tensors.

All ranks of the data-parallel mesh dimension send rows of one length. A parameter has the same columns in each row.
They have room for the largest shard, which is that of rank 0. Smaller shards are padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from hyper_parallel.core.layouts.chunking import chunk_sizes

__all__ = ["Block", "columns_of"]


class Block:
    """One parameter of a buffer, as data parallelism sees it: a tensor of which each rank holds a chunk.

    Args:
        shape: shape that is gathered: of the whole tensor, or of this rank's tensor-parallel part of it.
        dim: the dimension that is sharded; None for a parameter that every rank has whole.
        size: number of ranks.
        rank: this rank.

    Attributes:
        sent: number of elements of a rank's row that are the shard, in the all-gather; 0 where every rank has all.
        reduced: the same in the reduce-scatter. Where every rank has all, there is room for the summands of all ranks.
        in_order: whether the rows, one after the other, begin with the whole tensor: chunks of dimension 0.
        room: number of elements of the whole tensor, with the padding of `whole_from`.
    """

    def __init__(self, platform: Any, shape: tuple[int, ...], dim: int | None, size: int, rank: int) -> None:
        self.platform, self.shape, self.dim, self.size, self.rank = platform, shape, dim, size, rank
        self.count = math.prod(shape)
        self._rows = () if dim is None else chunk_sizes(shape[dim], size)
        self.local_shape = self._shape_on(rank)
        self.local_count, largest = math.prod(self.local_shape), math.prod(self._shape_on(0))
        self.sent = 0 if dim is None else largest
        # A parameter that every rank has whole must get the same bits everywhere, but a backend may add in another
        # order for each row. So each rank's summand has a place of its own, to which zeros are added. Then every rank
        # adds the places.
        self.reduced = size * self.count if dim is None else largest
        self.in_order = dim == 0
        self.room = self.size * self.sent if self.in_order else self.count

    def _shape_on(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's shard."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self._rows[rank], *self.shape[self.dim + 1 :])

    @cached_property
    def _parts(self) -> list[tuple[tuple[int, ...], int]]:
        """Return shape and number of elements on each rank, made on demand: there may be a million ranks."""
        shapes = [self._shape_on(rank) for rank in range(self.size)]
        return [(shape, math.prod(shape)) for shape in shapes]

    def whole_from(self, columns: Any, shard: Any) -> list[Any]:
        """Return tensors whose elements, one after the other, are the whole tensor with padding: `room` in number.

        Args:
            columns: the block's columns of the gathered rows, ``(ranks, sent)``; None where nothing is sent.
            shard: this rank's shard of a parameter of which nothing is sent: every rank has it whole, or it is empty.
        """
        if not self.sent:
            return [shard]
        if self.in_order:
            return [columns]
        platform = self.platform
        parts = [
            platform.narrow(platform.narrow(columns, 0, i, 1), 1, 0, n).reshape(shape)
            for i, (shape, n) in enumerate(self._parts)
        ]
        return [platform.cat(parts, self.dim)]

    def rows_of(self, cotangent: Any) -> Any:
        """Return ``(ranks, reduced)``: for each rank, its row of a cotangent of the whole tensor."""
        platform, size, width = self.platform, self.size, self.reduced
        if self.dim is None:
            zeros = platform.zeros(self.shape, cotangent)
            row = platform.join([cotangent if r == self.rank else zeros for r in range(size)]).reshape((1, width))
            return platform.cat([row] * size, 0)
        if self.in_order:
            if self.count < size * width:
                cotangent = platform.join([cotangent, platform.zeros((size * width - self.count,), cotangent)])
            return cotangent.reshape((size, width))
        start, parts = 0, []
        for shape, n in self._parts:
            parts.append(platform.narrow(cotangent, self.dim, start, shape[self.dim]))
            start += shape[self.dim]
            if n < width:
                parts.append(platform.zeros((width - n,), cotangent))
        return platform.join(parts).reshape((size, width))

    def part_of(self, whole: Any) -> Any:
        """Return this rank's shard of the whole tensor, as a view."""
        if self.dim is None:
            return whole
        start = sum(self._rows[: self.rank])
        return self.platform.narrow(whole, self.dim, start, self.local_shape[self.dim])

    def shard_from(self, row: Any) -> Any:
        """Return this rank's shard from its row of the reduced columns, ``(reduced,)``."""
        if self.dim is None:
            return row.reshape((self.size, self.count)).sum(0).reshape(self.local_shape)
        return self.platform.narrow(row, 0, 0, self.local_count).reshape(self.local_shape)


def columns_of(widths: Sequence[int]) -> list[int]:
    """Return the first column of each of several adjacent blocks with these widths."""
    return [sum(widths[:i]) for i in range(len(widths))]
