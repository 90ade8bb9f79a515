"""The parameters of one dtype of a unit of `fully_shard`: gathered, and their gradients reduced, by one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.data_parallel.blocks import Block, columns_of
from hyper_parallel.core.dtensor.communication import asynchronous
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh

__all__ = ["FlatBuffer", "Reduction"]


class FlatBuffer:
    """Whole parameters as views of one storage.

    Each rank sends its shards one after the other, in a row of as many elements as rank 0 has, whose shards are the
    largest. All tensors here are plain local ones, and operations are not intercepted.

    Args:
        mesh: of one dimension, which shards, or of two, of which the first replicates.
        blocks: the parameters.
        dtype: in which they are gathered and read.
        reduce_dtype: in which their gradients are reduced.

    Attributes:
        reduce_dtype: see there.
        whole: the storage, as a 1-D tensor, which has no memory while the parameters are sharded. None before it is
            first needed in a forward that is recorded; others have their own.
    """

    def __init__(self, mesh: DeviceMesh, blocks: Sequence[Block], dtype: Any, reduce_dtype: Any) -> None:
        self.mesh, self.platform, self.blocks = mesh, mesh.platform, list(blocks)
        self._dim, self._size = mesh.ndim - 1, mesh.shape[-1]
        self._dtype, self.reduce_dtype = dtype, reduce_dtype
        self._columns = columns_of([b.sent for b in blocks])
        self._length = sum(b.sent for b in blocks)
        self._room = columns_of([b.room for b in blocks])
        self.whole: Any = None
        self._under_way: Any = None

    # ---------------------------------------------------------------------- parameters
    def start(self, shards: Sequence[Any]) -> None:
        """Begin to gather, unless that has begun; ``shards`` are this rank's, and are not written to before `take`."""
        if self._under_way is not None:
            return
        platform, work, gathered = self.platform, None, None
        shards = [platform.to_dtype(platform.to_device(x), self._dtype) for x in shards]
        if self._length:
            pieces = []
            for block, x in zip(self.blocks, shards, strict=True):
                if block.sent:
                    pieces.append(x)
                    if block.local_count < block.sent:
                        pieces.append(platform.zeros((block.sent - block.local_count,), x))
            mine = platform.join(pieces)
            gathered = platform.factory("empty", (self._size * self._length,), None, self._dtype)
            work = asynchronous.start("all_gather", gathered, mine, self.mesh, self._dim)
        self._under_way = work, gathered, shards

    def take(self, keep: bool) -> Any:
        """Wait for what was begun: the storage of whole parameters; with ``keep`` it is `whole`."""
        platform, (work, gathered, shards) = self.platform, self._under_way
        self._under_way = None
        columns: Any = [None] * len(self.blocks)
        if work is not None:
            work.wait()
            rows = gathered.reshape((self._size, self._length))
            columns = [
                platform.narrow(rows, 1, start, block.sent) if block.sent else None
                for start, block in zip(self._columns, self.blocks, strict=True)
            ]
        parts = [
            part
            for block, of_block, shard in zip(self.blocks, columns, shards, strict=True)
            for part in block.whole_from(of_block, shard)
        ]
        if not keep:
            return platform.join(parts)
        if self.whole is None:
            self.whole = platform.join(parts)
        else:
            platform.refill_storage(self.whole, parts)
        return self.whole

    def drop(self) -> None:
        """Forget what was begun: nobody needs it."""
        if self._under_way is not None:
            work, _, _ = self._under_way
            self._under_way = None
            if work is not None:
                work.wait()

    @property
    def is_under_way(self) -> bool:
        """Whether gathering has begun, and nobody has waited for it."""
        return self._under_way is not None

    def views(self, values: Any) -> list[Any]:
        """Each whole tensor, as a view of what `take` gave."""
        platform = self.platform
        return [
            platform.narrow(values, 0, start, block.count).reshape(block.shape)
            for start, block in zip(self._room, self.blocks, strict=True)
        ]

    def holds(self, x: Any) -> bool:
        """Whether a plain tensor lies in the storage that is freed."""
        if self.whole is None or 0 in (*self.whole.shape, *self.platform.shape_of(x)):
            return False
        return self.platform.same_memory(self.whole, x)

    # ---------------------------------------------------------------------- gradients
    def reduce(self, indices: Sequence[int], cotangents: Sequence[Any], op: str) -> Reduction:
        """Begin to reduce cotangents of the whole tensors.

        Args:
            indices: which of the blocks they belong to, the same on all ranks.
            cotangents: one each; None for a tensor that this rank has not used.
            op: ``"sum"`` or ``"avg"``.
        """
        platform, size = self.platform, self._size
        blocks = [self.blocks[i] for i in indices]
        like = next((g for g in cotangents if g is not None), None)
        if like is None:
            like = platform.factory("empty", (0,), None, self.reduce_dtype)
        like = platform.to_dtype(like, self.reduce_dtype)
        rows = []
        for block, g in zip(blocks, cotangents, strict=True):
            if not block.reduced:
                continue
            if g is None:
                rows.append(platform.zeros((size, block.reduced), like))
            else:
                rows.append(block.rows_of(platform.to_dtype(g, self.reduce_dtype)))
        used = [g is not None for g in cotangents]
        flags = len(used) if platform.tells_unused else 0
        if flags:
            rows.extend(_flags(used, size, platform, like))
        summands = platform.cat(rows, 1).reshape((-1,))
        length = sum(b.reduced for b in blocks) + flags
        return Reduction(self.mesh, blocks, used, summands, length, op)


def _flags(used: Sequence[bool], size: int, platform: Any, like: Any) -> list[Any]:
    """Columns that say for each parameter whether this rank has used it."""
    if all(used):
        return [platform.ones((size, len(used)), like)]
    return [(platform.ones if use else platform.zeros)((size, 1), like) for use in used]


class Reduction:
    """Gradients on their way to the ranks that hold the shards.

    Args:
        mesh, blocks: of the buffer.
        used: of each block, whether this rank has a cotangent.
        summands: the rows of all ranks, one after the other.
        length: of a row.
        op: as in `FlatBuffer.reduce`.
    """

    def __init__(
        self, mesh: DeviceMesh, blocks: Sequence[Block], used: Sequence[bool], summands: Any, length: int, op: str
    ) -> None:
        self.mesh, self.platform, self.blocks, self.used = mesh, mesh.platform, blocks, used
        self._op, self._mine = op, self.platform.factory("empty", (length,), None, summands.dtype)
        self._summands = summands  # until it was sent
        self._work: Any = asynchronous.start("reduce_scatter", self._mine, summands, mesh, mesh.ndim - 1, op)

    def row(self) -> Any:
        """Wait. This rank's row."""
        if self._work is not None:
            self._work.wait()
            self._work = self._summands = None
        return self._mine

    def all_reduce(self, more: Any) -> None:
        """Begin to reduce the row, to which ``more`` is added unless it is None, over the dimension that replicates."""
        self._mine = self.row() if more is None else self.row() + more
        self._work = asynchronous.start("all_reduce", self._mine, self._mine, self.mesh, 0, self._op)

    def shards(self, factor: float = 1.0) -> list[Any]:
        """Wait. This rank's shard of each gradient, times ``factor``; None for what no rank has used."""
        platform, whole = self.platform, self.row()
        flags = sum(b.reduced for b in self.blocks)
        mine = whole if factor == 1.0 else whole * factor
        found: list[Any] = []
        start = 0
        for i, block in enumerate(self.blocks):
            row = platform.narrow(mine, 0, start, block.reduced)
            start += block.reduced
            # Another rank may have used it; those that have know without looking.
            unused = (
                platform.tells_unused and not self.used[i] and not float(platform.narrow(whole, 0, flags + i, 1).sum())
            )
            found.append(None if unused else block.shard_from(row))
        return found
