"""Where the elements of a parameter lie in the flat buffers that ranks exchange; plain arithmetic on local tensors.

All ranks of the data-parallel mesh dimension send rows of one length. A parameter has the same columns in each row:
room for the largest shard, which is that of rank 0, and zeros where a rank has less.
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
        shape: of what is to be gathered: the whole tensor, or this rank's tensor-parallel part of it.
        dim: the dimension that is cut; None for a parameter that every rank has whole.
        size: number of ranks.
        rank: this one.

    Attributes:
        sent: how many elements of a rank's row are the shard, in the all-gather; 0 for what every rank has.
        reduced: the same in the reduce-scatter; room for the summands of all ranks of what every rank has.
        in_order: whether the rows, one after the other, begin with the whole tensor: chunks of dimension 0.
    """

    def __init__(self, platform: Any, shape: tuple[int, ...], dim: int | None, size: int, rank: int) -> None:
        self.platform, self.shape, self.dim, self.size, self.rank = platform, shape, dim, size, rank
        self.count = math.prod(shape)
        self._rows = () if dim is None else chunk_sizes(shape[dim], size)
        self.local_shape = self._shape_on(rank)
        self.local_count, largest = math.prod(self.local_shape), math.prod(self._shape_on(0))
        self.sent = 0 if dim is None else largest
        # What every rank has whole must get the same bits everywhere, in whichever order a backend adds for each row:
        # so each rank's summand has a place of its own, zeros are added to it, and every rank adds the places.
        self.reduced = size * self.count if dim is None else largest
        self.in_order = dim == 0
        self.room = self.size * self.sent if self.in_order else self.count

    def _shape_on(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what a rank holds."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self._rows[rank], *self.shape[self.dim + 1 :])

    @cached_property
    def _parts(self) -> list[tuple[tuple[int, ...], int]]:
        """Shape and number of elements on each rank, made when they are needed: there may be a million ranks."""
        shapes = [self._shape_on(rank) for rank in range(self.size)]
        return [(shape, math.prod(shape)) for shape in shapes]

    def whole_from(self, columns: Any, shard: Any) -> list[Any]:
        """Tensors of which the elements, one after the other, are the whole tensor, and `room` in number.

        Args:
            columns: (ranks, `sent`) of the gathered rows; None where that is nothing.
            shard: this rank's, of a parameter of which nothing is sent: every rank has it whole, or it is empty.
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
        """(ranks, `reduced`): of a cotangent of the whole tensor what each rank gets."""
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
        """This rank's shard of the whole tensor, as a view."""
        if self.dim is None:
            return whole
        start = sum(self._rows[: self.rank])
        return self.platform.narrow(whole, self.dim, start, self.local_shape[self.dim])

    def shard_from(self, row: Any) -> Any:
        """This rank's shard, of its row of the reduced columns, ``(reduced,)``."""
        if self.dim is None:
            return row.reshape((self.size, self.count)).sum(0).reshape(self.local_shape)
        return self.platform.narrow(row, 0, 0, self.local_count).reshape(self.local_shape)


def columns_of(widths: Sequence[int]) -> list[int]:
    """Where columns of these widths begin."""
    return [sum(widths[:i]) for i in range(len(widths))]
