"""The parameters of one dtype of a unit of `fully_shard`: gathered by one collective, as views of one storage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hyper_parallel.core.data_parallel.reduction import Block, Bucket, CustomCollectives, Reduction
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.contract.fast import Rows

__all__ = ["FlatBuffer"]


class FlatBuffer:
    """Unsharded parameters of one dtype, as views of one storage.

    Each rank sends a row, which holds its shards one after the other. All rows have the length of rank 0's row, because
    rank 0 has the largest shards. All tensors here are plain and local, and operations are not intercepted.

    Args:
        mesh: 1-D mesh, which shards, or 2-D mesh, whose first dimension replicates.
        blocks: the parameters.
        dtype: dtype in which the parameters are gathered and read.
        reduce_dtype: dtype in which the gradients are reduced.

    Attributes:
        reduce_dtype: the argument.
        collectives: the collectives that are called.
        part: this rank's part of `whole`, and the mesh whose last dimension divides `whole`. It is set while the
            parameters are sharded over fewer ranks than those of ``mesh``.
        whole: the storage, as a 1-D tensor, without memory while the parameters are sharded. None before the first
            recorded forward. Forwards that are not recorded have separate storage.
    """

    def __init__(self, mesh: DeviceMesh, blocks: Sequence[Block], dtype: Any, reduce_dtype: Any) -> None:
        self.mesh, self.platform, self.blocks = mesh, mesh.platform, list(blocks)
        self._dim, self._size = mesh.ndim - 1, mesh.shape[-1]
        self._dtype, self.reduce_dtype = dtype, reduce_dtype
        self._columns = _firsts([b.sent for b in blocks])
        self._length = sum(b.sent for b in blocks)
        self._room = _firsts([b.room for b in blocks])
        self._lengths = [b.sent for b in blocks if b.sent]
        #: Indices of parameters that are not sent: replicated ones and empty ones.
        self._not_sent = [i for i, b in enumerate(blocks) if not b.sent]
        self._fast = mesh.platform.fast
        self.collectives = CustomCollectives()
        self.part: tuple[Any, DeviceMesh] | None = None
        self._flat: Any = None  # storage of this rank's shards, if they share one
        self._sent_flat: Any = None  # `sent(_flat)`, if that is the same memory
        self.whole: Any = None
        self._views: list[Any] = []  # of `whole`
        self._rows: Rows | None = None  # a fast path to fill `whole`
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self._pending: Any = None

    def move(self, parameters: Sequence[Any]) -> None:
        """Move the shards into one storage where possible, before the program can hold a reference to a shard."""
        if self._fast is not None and self._length:
            self._flat = None
            flat = self._fast.move_to_one_storage(self._sent_of(parameters), self._lengths)
            if flat is not None:
                self._keep(flat)

    def _sent_of(self, parameters: Sequence[Any]) -> Sequence[Any]:
        """Return the shards that are sent, without those of replicated or empty parameters."""
        if not self._not_sent:
            return parameters
        return [x for block, x in zip(self.blocks, parameters, strict=True) if block.sent]

    def _keep(self, flat: Any) -> None:
        """Store ``flat`` as the storage to gather from."""
        sent = self.sent(flat)
        self._flat, self._sent_flat = flat, sent if self.platform.same_memory(sent, flat) else None

    def start(self, parameters: Sequence[Any], again: bool = False) -> None:
        """Start the all-gather, unless one is pending.

        Args:
            parameters: the shards, which must not be written to before `take`.
            again: whether the shards are the same as in the last all-gather.
        """
        if self._pending is not None:
            return
        work, gathered, own, rows = None, None, {}, None
        if self._length:
            row = self._sent_flat if again else None
            if row is None:
                row = self._row(parameters)
            rows = self._rows if self.collectives.all_gather is None else None
            if rows is not None:
                gathered = rows.take()
            else:
                row = self.collectives.operand("all_gather", row, self.mesh)
                gathered = self.collectives.buffer("all_gather", self._size * self._length, row, self.mesh)
            work = self.collectives.start("all_gather", gathered, row, self.mesh, self._dim)
        if self._not_sent:
            own = {i: self.sent(parameters[i]) for i in self._not_sent}
        self._pending = work, gathered, own, rows

    def shrink(self, mesh: DeviceMesh) -> None:
        """Save this rank's part of `whole`, from which backward gathers `whole` over the last dimension of ``mesh``.
        The caller frees `whole` afterwards.

        The parts of all ranks have one size, so the last parts are padded with zeros.
        """
        platform, count, size = self.platform, self.whole.shape[0], mesh.shape[-1]
        width = -(-count // size)
        start = min(mesh.get_local_rank(mesh.ndim - 1) * width, count)
        length = min(width, count - start)
        part = platform.clone(platform.narrow(platform.detach(self.whole), 0, start, length))
        if length < width:
            part = platform.join([part, platform.zeros((width - length,), part)])
        self.part = part, mesh

    def start_from_part(self) -> None:
        """Start the all-gather of the parts that `shrink` has saved, unless one is pending."""
        if self._pending is None:
            assert self.part is not None
            part, mesh = self.part
            gathered = self.collectives.buffer("all_gather", mesh.shape[-1] * part.shape[0], part, mesh)
            work = self.collectives.start("all_gather", gathered, part, mesh, mesh.ndim - 1)
            self._pending = work, gathered, None, None

    def sent(self, x: Any) -> Any:
        """Return a shard on the device and in the dtype of the all-gather."""
        platform = self.platform
        return platform.to_dtype(platform.to_device(platform.detach(x)), self._dtype)

    def _row(self, parameters: Sequence[Any]) -> Any:
        """Return the row that this rank sends: its shards, each padded to the size of rank 0's shard."""
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
        """Wait for the pending all-gather, and return the storage of unsharded parameters.

        With ``keep`` that storage is `whole`.
        """
        work, gathered, own, rows = self._pending
        self._pending = None
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
        """Return the result of `take` on a platform without a fast path."""
        platform = self.platform
        rows = None if gathered is None else gathered.reshape((self._size, self._length))
        parts = []
        for i, (block, start) in enumerate(zip(self.blocks, self._columns, strict=True)):
            columns = platform.narrow(rows, 1, start, block.sent) if block.sent else None
            parts.extend(block.whole_from(columns, own.get(i)))
        if not keep:
            return platform.join(parts)
        if self.whole is None:
            with platform.for_training(), platform.no_grad():  # `unshard` may be called in inference
                self.whole = platform.join(parts)
                self._views = [*map(platform.counted_apart, self._cut(platform.detach(self.whole)))]
                if self._fast is not None and all(b.in_order and b.sent for b in self.blocks):
                    self._rows = self._fast.gathered_rows(self.whole, self._size, self._lengths)
        else:
            platform.refill_storage(self.whole, parts)
        return self.whole

    def free(self) -> None:
        """Free the storage of `whole`."""
        if self.whole is not None:
            self.platform.free_storage(self.whole)

    def drop(self) -> None:
        """Discard the pending all-gather."""
        if self._pending is not None:
            work, _, _, rows = self._pending
            self._pending = None
            if work is not None:
                work.wait()
            if rows is not None:
                rows.free()

    def is_current(self, values: Any, parameters: Sequence[Any]) -> bool:
        """Return whether ``values``, a result of `take`, still has the values of this rank's shards."""
        platform = self.platform
        with platform.no_grad():
            wholes = self._cut(platform.detach(values))
            for block, whole, x in zip(self.blocks, wholes, parameters, strict=True):
                if block.local_count and platform.bytes_of(block.part_of(whole)) != platform.bytes_of(self.sent(x)):
                    return False
        return True

    def views(self, values: Any) -> list[Any]:
        """Return each unsharded parameter, as a new view of ``values``, a result of `take`."""
        if values is self.whole:
            return list(map(self.platform.detach, self._views))
        return self._cut(self.platform.detach(values))

    def lasting_views(self, values: Any) -> list[Any]:
        """Return each unsharded parameter, as `views` does, but for `whole` return the same views in each call.

        The method is for callers that take over the data of the views.
        """
        return self._views if values is self.whole else self._cut(self.platform.detach(values))

    def _cut(self, values: Any) -> list[Any]:
        platform = self.platform
        return [
            platform.narrow(values, 0, start, block.count).reshape(block.shape)
            for start, block in zip(self._room, self.blocks, strict=True)
        ]

    def holds(self, x: Any) -> bool:
        """Return whether a plain tensor is stored in the memory that `free` frees."""
        if self.whole is None or 0 in self.platform.shape_of(x):
            return False
        return self.platform.same_memory(self.whole, x) and 0 not in self.whole.shape

    # ---------------------------------------------------------------------- gradients
    def reduce(self, indices: Sequence[int], cotangents: Sequence[Any], op: str) -> Reduction:
        """Start the reduce-scatter of cotangents of the unsharded parameters.

        Args:
            indices: the blocks of these parameters, the same on all ranks.
            cotangents: one cotangent for each index; None for a parameter that this rank has not used.
            op: ``"sum"`` or ``"avg"``.
        """
        key = tuple(indices)
        bucket = self._buckets.get(key)
        if bucket is None:
            blocks = [self.blocks[i] for i in key]
            bucket = Bucket(self.mesh, blocks, self.reduce_dtype, self._dtype == self.reduce_dtype)
            self._buckets[key] = bucket
        return bucket.reduce(cotangents, op, self.collectives)


def _firsts(widths: Sequence[int]) -> list[int]:
    """Return the first column of each of several adjacent blocks with these widths."""
    return list(accumulate(widths, initial=0))[:-1]
