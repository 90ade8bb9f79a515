"""The parameters of one dtype of a unit of `fully_shard`: gathered, and their gradients reduced, by one collective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_not
from typing import Any

from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.data_parallel.blocks import Block, columns_of
from hyper_parallel.core.data_parallel.comms import Comms
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.contract.fast import Rows

__all__ = ["FlatBuffer", "Reduction"]


class FlatBuffer:
    """Whole parameters as views of one storage.

    Each rank sends its shards one after the other, in a row. All rows are as long as that of rank 0, whose shards are
    the largest. All tensors here are plain local ones, and operations are not intercepted.

    Args:
        mesh: 1-D mesh, which shards, or 2-D mesh, whose first dimension replicates.
        blocks: the parameters.
        dtype: dtype in which they are gathered and read.
        reduce_dtype: dtype in which their gradients are reduced.

    Attributes:
        reduce_dtype: see there.
        is_reduced_as_read: whether that is ``dtype``.
        comms: functions that do its collectives.
        part: while the parameters are sharded over fewer ranks than those of ``mesh``, this rank's part of `whole`, and
            the mesh of these ranks, in its last dimension.
        whole: the storage, as a 1-D tensor, without memory while the parameters are sharded. None before the first
            forward that is recorded. Other forwards have storage of their own.
    """

    def __init__(self, mesh: DeviceMesh, blocks: Sequence[Block], dtype: Any, reduce_dtype: Any) -> None:
        self.mesh, self.platform, self.blocks = mesh, mesh.platform, list(blocks)
        self._dim, self._size = mesh.ndim - 1, mesh.shape[-1]
        self._dtype, self.reduce_dtype = dtype, reduce_dtype
        self.is_reduced_as_read = dtype == reduce_dtype
        self._columns = columns_of([b.sent for b in blocks])
        self._length = sum(b.sent for b in blocks)
        self._room = columns_of([b.room for b in blocks])
        self._lengths = [b.sent for b in blocks if b.sent]
        #: Parameters that every rank has whole, and empty ones.
        self._not_sent = [i for i, b in enumerate(blocks) if not b.sent]
        self._fast = mesh.platform.fast
        self.comms = Comms()
        self.part: tuple[Any, DeviceMesh] | None = None
        self._flat: Any = None  # the storage of this rank's shards, where they share one
        self._sent_flat: Any = None  # the same as it is gathered, where that is the same memory
        self.whole: Any = None
        self._views: list[Any] = []  # of `whole`
        self._rows: Rows | None = None  # a fast path to fill it
        self._selections: dict[tuple[int, ...], Selection] = {}
        self._under_way: Any = None

    # ---------------------------------------------------------------------- parameters
    def move(self, parameters: Sequence[Any]) -> None:
        """Move the shards into one storage where possible, before the program can hold any of them."""
        if self._fast is not None and self._length:
            self._flat = None
            flat = self._fast.move_to_one_storage(self._sent_of(parameters), self._lengths)
            if flat is not None:
                self._keep(flat)

    def _sent_of(self, parameters: Sequence[Any]) -> Sequence[Any]:
        """Return the shards without those of parameters that every rank has whole."""
        if not self._not_sent:
            return parameters
        return [x for block, x in zip(self.blocks, parameters, strict=True) if block.sent]

    def _keep(self, flat: Any) -> None:
        """Remember ``flat`` as the storage to gather from."""
        sent = self.sent(flat)
        self._flat, self._sent_flat = flat, sent if self.platform.same_memory(sent, flat) else None

    def start(self, parameters: Sequence[Any], again: bool = False) -> None:
        """Begin the all-gather, unless one is pending.

        Args:
            parameters: the shards, which are not written to before `take`.
            again: whether they are the shards of the last all-gather.
        """
        if self._under_way is not None:
            return
        work, gathered, own, rows = None, None, {}, None
        if self._length:
            row = self._sent_flat if again else None
            if row is None:
                row = self._row(parameters)
            rows = self._rows if self.comms.all_gather is None else None
            if rows is not None:
                gathered = rows.take()
            else:
                row = self.comms.operand("all_gather", row, self.mesh)
                gathered = self.comms.buffer("all_gather", self._size * self._length, row, self.mesh)
            work = self.comms.start("all_gather", gathered, row, self.mesh, self._dim)
        if self._not_sent:
            own = {i: self.sent(parameters[i]) for i in self._not_sent}
        self._under_way = work, gathered, own, rows

    def shrink(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of `whole`, which is freed afterwards. Parts over the last dimension of ``mesh`` have
        one size, with zeros at the end."""
        platform, count, size = self.platform, self.whole.shape[0], mesh.shape[-1]
        width = -(-count // size)
        start = min(mesh.get_local_rank(mesh.ndim - 1) * width, count)
        length = min(width, count - start)
        part = platform.clone(platform.narrow(platform.detach(self.whole), 0, start, length))
        if length < width:
            part = platform.join([part, platform.zeros((width - length,), part)])
        self.part = part, mesh

    def start_from_part(self) -> None:
        """Begin the all-gather of the parts that `shrink` has kept, unless one is pending."""
        if self._under_way is None:
            assert self.part is not None
            part, mesh = self.part
            gathered = self.comms.buffer("all_gather", mesh.shape[-1] * part.shape[0], part, mesh)
            work = self.comms.start("all_gather", gathered, part, mesh, mesh.ndim - 1)
            self._under_way = work, gathered, None, None

    def sent(self, x: Any) -> Any:
        """Return a shard as it is gathered."""
        platform = self.platform
        return platform.to_dtype(platform.to_device(platform.detach(x)), self._dtype)

    def _row(self, parameters: Sequence[Any]) -> Any:
        """Return the row that this rank sends: its shards, each padded to the size on rank 0."""
        platform = self.platform
        parameters = self._sent_of(parameters)
        if self._fast is not None:
            flat = self._fast.in_one_storage(parameters, self._lengths, self._flat)
            if flat is not None:
                if flat is not self._flat:
                    self._keep(flat)
                return self.sent(flat) if self._sent_flat is None else self._sent_flat
            self._flat = self._sent_flat = None
        pieces: list[Any] = []
        with platform.no_grad():
            for block, x in zip([b for b in self.blocks if b.sent], parameters, strict=True):
                pieces.append(self.sent(x))
                if block.local_count < block.sent:
                    pieces.append(platform.zeros((block.sent - block.local_count,), pieces[-1]))
            return platform.join(pieces)

    def take(self, keep: bool) -> Any:
        """Wait for the pending all-gather, and return the storage of whole parameters: with ``keep``, `whole`."""
        work, gathered, own, rows = self._under_way
        self._under_way = None
        if own is None:
            work.wait()
            with self.platform.no_grad():
                pieces = [self.platform.narrow(gathered, 0, 0, self.whole.shape[0])]
                self.platform.refill_storage(self.whole, pieces)
            return self.whole
        if work is not None:
            work.wait()
        if keep and rows is not None:
            rows.unpack()
            return self.whole
        with self.platform.no_grad():
            found = self._arranged(gathered, own, keep)
        if rows is not None:
            rows.free()
        return found

    def _arranged(self, gathered: Any, own: dict[int, Any], keep: bool) -> Any:
        """Return the result of `take` without the fast path."""
        platform = self.platform
        rows = None if gathered is None else gathered.reshape((self._size, self._length))
        parts = []
        for i, (block, start) in enumerate(zip(self.blocks, self._columns, strict=True)):
            columns = platform.narrow(rows, 1, start, block.sent) if block.sent else None
            parts.extend(block.whole_from(columns, own.get(i)))
        if not keep:
            return platform.join(parts)
        if self.whole is None:
            self.whole = platform.join(parts)
            self._views = [*map(platform.counted_apart, self._cut(platform.detach(self.whole)))]
            if self._fast is not None and all(b.in_order and b.sent for b in self.blocks):
                self._rows = self._fast.gathered_rows(self.whole, self._size, self._lengths)
        else:
            platform.refill_storage(self.whole, parts)
        return self.whole

    def free(self) -> None:
        """Free the storage of `whole`."""
        if self.whole is not None and self.platform.frees_storage:
            self.platform.free_storage(self.whole)

    def drop(self) -> None:
        """Discard the pending all-gather."""
        if self._under_way is not None:
            work, _, _, rows = self._under_way
            self._under_way = None
            if work is not None:
                work.wait()
            if rows is not None:
                rows.free()

    def is_current(self, values: Any, parameters: Sequence[Any]) -> bool:
        """Return whether ``values``, a result of `take`, has the values of this rank's shards: it is not stale."""
        platform = self.platform
        with platform.no_grad():
            wholes = self._cut(platform.detach(values))
            for block, whole, x in zip(self.blocks, wholes, parameters, strict=True):
                if block.local_count and platform.bytes_of(block.part_of(whole)) != platform.bytes_of(self.sent(x)):
                    return False
        return True

    def joined(self, values: Any, wholes: Sequence[Any]) -> Any:
        """Return new storage of whole parameters that have the values of ``wholes``; the rest is as in ``values``."""
        narrow, places = self.platform.narrow, zip(self._room, self.blocks, strict=True)
        rest = [narrow(values, 0, start + block.count, block.room - block.count) for start, block in places]
        return self.platform.join([x for pair in zip(wholes, rest, strict=True) for x in pair])

    def views(self, values: Any) -> list[Any]:
        """Return each whole tensor, as a new view of a result of `take`."""
        if values is self.whole:
            return list(map(self.platform.detach, self._views))
        return self._cut(self.platform.detach(values))

    def lasting_views(self, values: Any) -> list[Any]:
        """Return the same as `views`, but of `whole` the same views each time, for callers that take their data."""
        return self._views if values is self.whole else self._cut(self.platform.detach(values))

    def _cut(self, values: Any) -> list[Any]:
        platform = self.platform
        return [
            platform.narrow(values, 0, start, block.count).reshape(block.shape)
            for start, block in zip(self._room, self.blocks, strict=True)
        ]

    def holds(self, x: Any) -> bool:
        """Return whether a plain tensor lies in the storage that `free` frees."""
        if self.whole is None or 0 in self.platform.shape_of(x):
            return False
        return self.platform.same_memory(self.whole, x) and 0 not in self.whole.shape

    # ---------------------------------------------------------------------- gradients
    def reduce(self, indices: Sequence[int], cotangents: Sequence[Any], op: str) -> Reduction:
        """Begin the reduce-scatter of cotangents of the whole tensors.

        Args:
            indices: the blocks that they belong to, the same on all ranks.
            cotangents: one each; None for a tensor that this rank has not used.
            op: ``"sum"`` or ``"avg"``.
        """
        key = tuple(indices)
        selection = self._selections.get(key)
        if selection is None:
            selection = self._selections[key] = Selection(self, [self.blocks[i] for i in key])
        used = list(map(is_not, cotangents, repeat(None)))
        rows = selection.rows_of(cotangents, used)
        return Reduction(self.mesh, selection, used, rows, op, self.comms)


class Selection:
    """Facts that stay the same each time that gradients of the same parameters of a buffer are reduced.

    Attributes:
        blocks: blocks of the parameters.
        width: number of elements of a row that are gradients. Flags that say who has used a parameter follow.
        length: number of elements of a row.
        shapes: shapes of this rank's shards, where each is as large as that of rank 0; otherwise None.
        cut: a fast path to cut a row into them; None where there is none.
    """

    def __init__(self, buffer: FlatBuffer, blocks: Sequence[Block]) -> None:
        self.blocks, self._buffer = blocks, buffer
        platform, size, fast = buffer.platform, buffer.mesh.shape[-1], buffer.mesh.platform.fast
        self.platform, self._size, self._dtype = platform, size, buffer.reduce_dtype
        self.width = sum(b.reduced for b in blocks)
        self._flags = len(blocks) if platform.tells_unused else 0
        self.length = self.width + self._flags
        self.shapes = [b.local_shape for b in blocks] if all(b.local_count == b.reduced for b in blocks) else None
        self.cut = None if fast is None or self.shapes is None else fast.cut(self.shapes)
        self._pack = None
        if (
            fast is not None
            and size > 1
            and buffer.is_reduced_as_read
            and all(b.in_order and b.reduced for b in blocks)
        ):
            self._pack = fast.pack_rows
        self._ones: Any = None  # flags of parameters that this rank has used

    def rows_of(self, cotangents: Sequence[Any], used: Sequence[bool]) -> Any:
        """Return the rows of all ranks, one after the other."""
        platform, size, dtype = self.platform, self._size, self._dtype
        if self._pack is not None and all(used):
            xs = list(cotangents)
            if self._flags:
                if self._ones is None:
                    self._ones = platform.ones((size * self._flags,), xs[0])
                xs.append(self._ones)
            rows = self._pack(xs, size)
            if rows is not None:
                return rows.reshape((-1,))
        like = next((g for g in cotangents if g is not None), None)
        if like is None:
            like = platform.factory("empty", (0,), None, dtype)
        like = platform.to_dtype(like, dtype)
        columns = []
        for block, g in zip(self.blocks, cotangents, strict=True):
            if not block.reduced:
                continue
            if g is None:
                columns.append(platform.zeros((size, block.reduced), like))
            else:
                columns.append(block.rows_of(platform.to_dtype(g, dtype)))
        if self._flags:
            columns.extend(_flags(used, size, platform, like))
        return platform.cat(columns, 1).reshape((-1,)) if columns else platform.zeros((0,), like)


def _flags(used: Sequence[bool], size: int, platform: Any, like: Any) -> list[Any]:
    """Return columns that say for each parameter whether this rank has used it."""
    if all(used):
        return [platform.ones((size, len(used)), like)]
    return [(platform.ones if use else platform.zeros)((size, 1), like) for use in used]


class Reduction:
    """A pending reduction of gradients.

    Args:
        mesh: mesh of the buffer.
        selection: facts about its parameters.
        used: for each parameter, whether this rank has a cotangent.
        summands: the rows of all ranks, one after the other.
        op: as in `FlatBuffer.reduce`.
        comms: of the buffer.
    """

    def __init__(
        self, mesh: DeviceMesh, selection: Selection, used: Sequence[bool], summands: Any, op: str, comms: Comms
    ) -> None:
        self.mesh, self._selection, self.used, self._op, self._comms = mesh, selection, used, op, comms
        self._mine = comms.buffer("reduce_scatter", selection.length, summands, mesh)
        self._work: Any = None
        self._summands: Any = None
        if selection.length:  # else tensor parallelism has left nothing on this rank, nor on those it reduces with
            self._summands = comms.operand("reduce_scatter", summands, mesh)  # kept until it was sent
            self._work = comms.start("reduce_scatter", self._mine, self._summands, mesh, mesh.ndim - 1, op)

    def row(self) -> Any:
        """Wait for the reduction, and return this rank's row."""
        if self._work is not None:
            self._work.wait()
            self._work = self._summands = None
        return self._mine

    def let_go(self) -> None:
        """Free the memory of the sent rows, if they are reduced by now."""
        ask = getattr(self._work, "is_completed", None)
        if ask is not None and ask():
            self.row()

    def all_reduce(self, more: Any) -> None:
        """Begin the all-reduce of the row over the dimension that replicates, with ``more`` added unless it is None."""
        self._mine = self.row() if more is None else self.row() + more
        if self._selection.length:
            self._work = asynchronous.start("all_reduce", self._mine, self._mine, self.mesh, 0, self._op)

    def shards(self, divisor: float = 1.0) -> list[Any]:
        """Wait, and return this rank's shard of each gradient, divided by ``divisor``. It is None where no rank has
        used the parameter, neither now nor in gradients accumulated before."""
        selection, whole, hook = self._selection, self.row(), self._comms.all_reduce_hook
        platform, flags = selection.platform, selection.width
        if hook is not None:
            hook(whole if whole.shape[0] == flags else platform.narrow(whole, 0, 0, flags))
        mine = whole if divisor == 1.0 else whole / divisor
        if selection.cut is not None and all(self.used):
            return selection.cut(mine)
        if selection.shapes is not None and all(self.used):
            return platform.part(platform.narrow(mine, 0, 0, flags), selection.shapes)
        found: list[Any] = []
        start = 0
        for i, block in enumerate(selection.blocks):
            row = platform.narrow(mine, 0, start, block.reduced)
            start += block.reduced
            # Another rank may have used it. Ranks that have used it themselves need not look.
            unused = (
                hook is None
                and platform.tells_unused
                and not self.used[i]
                and not float(platform.narrow(whole, 0, flags + i, 1).sum())
            )
            found.append(None if unused else block.shard_from(row))
        return found
