"""Buckets of gradients of one dtype, each reduced by one reduce-scatter or one all-reduce.

Positions of elements in the buffers of collectives follow from arithmetic alone. All ranks of the data-parallel mesh
dimension send rows of one length. A parameter has the same columns in each row. The columns have room for the largest
shard, the shard of rank 0. Smaller shards are padded with zeros.

All tensors here are plain local ones, and operations are not intercepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import repeat
from operator import is_not
from typing import Any

from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.communication.recorder import LISTENERS, record
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform.contract.collectives import FINISHED, Work

__all__ = ["Block", "Bucket", "Buckets", "CustomCollectives", "Reduction"]


class Block:
    """One parameter of a buffer, as data parallelism shards it: a tensor with one chunk per rank.

    Args:
        shape: unsharded shape of the plain tensor; with tensor parallelism, of this rank's local tensor.
        dim: the sharded dimension; None for a parameter that is replicated.
        size: number of ranks that shard.
        rank: index of this rank among them.

    Attributes:
        sent: number of columns of the shard in a row of the all-gather; 0 for a replicated parameter.
        reduced: number of columns in a row of the reduce-scatter; for a replicated parameter, of all summands.
        in_order: whether the joined rows start with the full tensor, because chunks are along dimension 0.
        room: number of elements of the full tensor, including the padding of `whole_from`.
    """

    def __init__(self, platform: Any, shape: tuple[int, ...], dim: int | None, size: int, rank: int) -> None:
        self.platform, self.shape, self.dim, self.size, self.rank = platform, shape, dim, size, rank
        self.count = math.prod(shape)
        self._rows = () if dim is None else chunk_sizes(shape[dim], size)
        self.local_shape = self._shape_on(rank)
        self.local_count, largest = math.prod(self.local_shape), math.prod(self._shape_on(0))
        self.sent = 0 if dim is None else largest
        # A replicated parameter must get the same bits on all ranks, but a backend may add each row in another order.
        # So each rank's summand has its own columns, to which the reduction adds zeros, and every rank adds these.
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
        """Return shape and number of elements on each rank. They are computed on demand: ranks may be many."""
        shapes = [self._shape_on(rank) for rank in range(self.size)]
        return [(shape, math.prod(shape)) for shape in shapes]

    def whole_from(self, columns: Any, shard: Any) -> list[Any]:
        """Return the full tensor and its padding, `room` elements in all, as a list of tensors to concatenate.

        Args:
            columns: the block's columns of the gathered rows, ``(ranks, sent)``; None where nothing is sent.
            shard: this rank's shard of a parameter that is not sent, because it is replicated or empty.
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
        """Return the rows of a cotangent of the full tensor, one for each rank, shaped ``(ranks, reduced)``."""
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
        """Return this rank's shard of the full tensor, as a view."""
        if self.dim is None:
            return whole
        start = sum(self._rows[: self.rank])
        return self.platform.narrow(whole, self.dim, start, self.local_shape[self.dim])

    def shard_from(self, row: Any) -> Any:
        """Return this rank's shard from its row of the reduced columns, ``(reduced,)``."""
        if self.dim is None:
            return row.reshape((self.size, self.count)).sum(0).reshape(self.local_shape)
        return self.platform.narrow(row, 0, 0, self.local_count).reshape(self.local_shape)


class CustomCollectives:
    """The collectives of one unit: custom collectives that the program has set, or else the platform's.

    Attributes:
        all_gather, reduce_scatter: an object with ``allocate(size, *, dtype, device)`` and ``__call__(output_tensor,
            input_tensor, group[, op], async_op=True)``, as in ``torch.distributed.fsdp``; None for the platform's
            collective.
        all_reduce_hook: function of this rank's row of reduced gradients, which it may change in place, or None.
    """

    def __init__(self) -> None:
        self.all_gather: Any = None
        self.reduce_scatter: Any = None
        self.all_reduce_hook: Callable[[Any], object] | None = None

    def buffer(self, collective: str, count: int, like: Any, mesh: DeviceMesh) -> Any:
        """Return a buffer of ``count`` elements for a collective, with the dtype of the plain tensor ``like``."""
        comm = getattr(self, collective)
        if comm is None:
            return mesh.platform.empty((count,), like)
        return comm.allocate((count,), dtype=like.dtype, device=getattr(like, "device", None))

    def operand(self, collective: str, x: Any, mesh: DeviceMesh) -> Any:
        """Return ``x`` in the memory from which the collective reads, which may be a copy."""
        platform = mesh.platform
        if getattr(self, collective) is None:
            return x
        found = self.buffer(collective, platform.shape_of(x)[0], x, mesh)
        platform.write(found, x)
        return found

    def start(self, collective: str, out: Any, x: Any, mesh: DeviceMesh, mesh_dim: int, op: str = "") -> Work:
        """Start a collective, as `asynchronous.start` does."""
        comm = getattr(self, collective)
        if comm is None or mesh.shape[mesh_dim] == 1:
            return asynchronous.start(collective, out, x, mesh, mesh_dim, op)
        if LISTENERS:
            record(collective, mesh, mesh_dim, x, op)
        ops = (mesh.platform.native_op(op),) if op else ()
        work: Work | None = comm(out, x, mesh.get_group(mesh_dim), *ops, async_op=True)
        return FINISHED if work is None else work


class Bucket:
    """Parameters whose gradients are reduced together, and facts about these parameters that never change.

    The gradients are sent as rows, one for each rank. A row ends with one flag for each parameter. After the reduction,
    a flag is zero if no rank has used its parameter. A backend that does not report unused parameters has no flags.

    Args:
        mesh: 1-D mesh, or 2-D mesh whose first dimension replicates and whose second shards.
        blocks: the parameters.
        dtype: dtype in which the gradients are reduced.
        is_computed: whether cotangents come in that dtype.
        shards: whether the last dimension of ``mesh`` shards. If not, gradients are all-reduced over it.

    Attributes:
        mesh, blocks, shards: the arguments.
        width: number of gradient elements in a row. The flags follow after these.
        length: number of elements in a row.
    """

    def __init__(
        self, mesh: DeviceMesh, blocks: Sequence[Block], dtype: Any, is_computed: bool = True, shards: bool = True
    ) -> None:
        platform, fast = mesh.platform, mesh.platform.fast
        self.mesh, self.platform, self.blocks, self.shards = mesh, platform, blocks, shards
        self._size, self._dtype = mesh.shape[-1] if shards else 1, dtype
        self.width = sum(b.reduced for b in blocks)
        self._flags = len(blocks) if platform.tells_unused else 0
        self.length = self.width + self._flags
        #: Shapes of this rank's shards, if no shard is padded; otherwise None.
        self._shapes = [b.local_shape for b in blocks] if all(b.local_count == b.reduced for b in blocks) else None
        #: A fast path that splits a row into shards; None if there is none.
        self._cut = None if fast is None or self._shapes is None else fast.cut(self._shapes)
        self._pack = None
        if fast is not None and is_computed and all(b.in_order and b.reduced for b in blocks):
            self._pack = fast.pack_rows
        self._ones: Any = None  # flags of parameters that this rank has used

    def reduce(self, cotangents: Sequence[Any], op: str, custom: CustomCollectives | None = None) -> Reduction:
        """Start to reduce gradients.

        Args:
            cotangents: one cotangent for each parameter; None if this rank has not used the parameter.
            op: ``"sum"`` or ``"avg"``.
            custom: custom collectives of the program.
        """
        used = list(map(is_not, cotangents, repeat(None)))
        return Reduction(self, used, self._rows_of(cotangents, used), op, custom or CustomCollectives())

    def _rows_of(self, cotangents: Sequence[Any], used: Sequence[bool]) -> Any:
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
        if self._flags and all(used):
            columns.append(platform.ones((size, self._flags), like))
        elif self._flags:
            columns += [(platform.ones if use else platform.zeros)((size, 1), like) for use in used]
        return platform.cat(columns, 1).reshape((-1,)) if columns else platform.zeros((0,), like)

    def split(self, mine: Any, used: Sequence[bool], hooked: bool) -> list[Any]:
        """Return this rank's shard of each gradient, from its row of reduced gradients.

        Args:
            mine: the row.
            used: for each parameter, whether this rank has used it.
            hooked: whether a hook may have changed the row, so that all parameters count as used.

        Returns:
            The shards, as views of the row. None for a parameter that no rank has used.
        """
        platform = self.platform
        if all(used) and self._cut is not None:
            return self._cut(mine)
        if all(used) and self._shapes is not None:
            return platform.part(platform.narrow(mine, 0, 0, self.width), self._shapes)
        if not all(used) and self._flags and not hooked:
            # Read the flags as late as possible, because on an accelerator the host waits for them.
            flags = platform.clone(platform.narrow(mine, 0, self.width, self._flags))
            values, width = platform.bytes_of(flags), flags.itemsize
            used = [use or any(values[i * width : (i + 1) * width]) for i, use in enumerate(used)]
        elif not all(used):
            used = [True] * len(used)
        found: list[Any] = []
        start = 0
        for block, use in zip(self.blocks, used, strict=True):
            found.append(block.shard_from(platform.narrow(mine, 0, start, block.reduced)) if use else None)
            start += block.reduced
        return found


class Reduction:
    """A pending reduction of gradients.

    Args:
        bucket: the parameters.
        used: for each parameter, whether this rank has a cotangent.
        rows: the summands, which are joined rows for all ranks.
        op: argument of `Bucket.reduce`.
        custom: the collectives.
    """

    def __init__(self, bucket: Bucket, used: Sequence[bool], rows: Any, op: str, custom: CustomCollectives) -> None:
        self._bucket, self._used, self._op, self._custom = bucket, used, op, custom
        self._work: Any = None
        self._summands: Any = None
        mesh = bucket.mesh
        if not bucket.shards:
            self._mine = rows
            self.all_reduce()
            return
        self._mine = custom.buffer("reduce_scatter", bucket.length, rows, mesh)
        if bucket.length:  # zero where tensor parallelism left no elements
            self._summands = custom.operand("reduce_scatter", rows, mesh)  # kept alive until it is sent
            self._work = custom.start("reduce_scatter", self._mine, self._summands, mesh, mesh.ndim - 1, op)

    def row(self) -> Any:
        """Wait for the reduction, and return this rank's row."""
        if self._work is not None:
            self._work.wait()
            self._work = self._summands = None
        return self._mine

    def let_go(self) -> None:
        """Free the memory of the sent rows, if their reduction is complete."""
        ask = getattr(self._work, "is_completed", None)
        if ask is not None and ask():
            self.row()

    def all_reduce(self, more: Any = None) -> None:
        """Start the all-reduce of the row, plus ``more`` unless that is None, over the replicating mesh dimension."""
        mesh, op = self._bucket.mesh, self._op
        self._mine = self.row() if more is None else self.row() + more
        if not self._bucket.length or mesh.shape[0] == 1:
            return
        if op == "avg" and not mesh.platform.supports("all_reduce", "avg", self._mine):
            self._mine /= mesh.shape[0]  # before the sum, which could overflow in a narrow dtype
            op = "sum"
        self._work = asynchronous.start("all_reduce", self._mine, self._mine, mesh, 0, op)

    def shards(self, divisor: float = 1.0) -> list[Any]:
        """Wait, and return this rank's shard of each gradient, divided by ``divisor``. An entry is None if no rank has
        used the parameter, neither now nor in gradients that were accumulated before."""
        mine, hook, bucket = self.row(), self._custom.all_reduce_hook, self._bucket
        if hook is not None:
            hook(mine if bucket.width == bucket.length else bucket.platform.narrow(mine, 0, 0, bucket.width))
        return bucket.split(mine if divisor == 1.0 else mine / divisor, self._used, hook is not None)


class Buckets:
    """The trained and the frozen parameters of a unit of `replicate`, and the bucket of each trained parameter.

    Args:
        mesh: 1-D.
        parameters: the parameters, without duplicates. Interception is off.
        bucket_bytes: capacity of a bucket, which `_assign` takes as ``cap``.

    Attributes:
        parameters: the argument.
        frozen, trained: indices of parameters. The attributes below use positions in ``trained``.
        keys: ids of the trained parameters, by which gradients are accumulated.
        members: for each bucket, the trained parameters in it.
        buckets: the buckets, in the order of sending.
        roots: for each dtype, the trained parameters of that dtype, and a 0-D zero.
        dense: numbers of buckets that have received only dense gradients so far.
    """

    def __init__(self, mesh: DeviceMesh, parameters: list[Any], bucket_bytes: float) -> None:
        platform, self.mesh, self.parameters = mesh.platform, mesh, parameters
        self.trained = [i for i, p in enumerate(parameters) if p.requires_grad]
        self.frozen = [i for i, p in enumerate(parameters) if not p.requires_grad]
        trained = [parameters[i] for i in self.trained]
        self.keys = [id(p) for p in trained]
        # By sizes of even shards all ranks create the same buckets, even if tensor parallelism sharded unevenly.
        sizes = []
        for p in trained:
            layout = p._layout
            parts = math.prod(map(layout.shard_count, range(layout.ndim)))
            sizes.append((p.dtype, p.itemsize * math.prod(layout.shape) / parts))
        self.members = _assign(sizes, bucket_bytes)
        shapes = [tuple(platform.shape_of(p)) for p in trained]
        blocks = [Block(platform, shape, 0 if shape else None, 1, 0) for shape in shapes]
        self.buckets = [Bucket(mesh, [blocks[i] for i in m], trained[m[0]].dtype, shards=False) for m in self.members]
        of_dtype: dict[Any, list[int]] = {}
        for i, p in enumerate(trained):
            of_dtype.setdefault(p.dtype, []).append(i)
        self.roots = [(m, platform.zeros((), platform.detach(trained[m[0]]))) for m in of_dtype.values()]
        self.dense: set[int] = set()


def _assign(sizes: Sequence[tuple[Any, float]], cap: float) -> list[list[int]]:
    """Assign parameters to buckets, which are all-reduced one at a time.

    The last parameter is assigned first, because its gradient is computed first. A bucket is full when it has ``cap``
    bytes or more. Buckets are sent in the order in which their gradients become complete.

    Args:
        sizes: (dtype, bytes) of each parameter, in the order in which the module holds them.
        cap: bytes of a full bucket.

    Returns:
        For each bucket, in the order of sending, the indices of its parameters, which have one dtype.

    Example:
        >>> _assign([("f", 8), ("f", 4), ("h", 4), ("f", 4)], cap=8)
        [[2], [3, 1], [0]]
    """
    filling: dict[Any, tuple[list[int], float]] = {}
    full = []
    for i in reversed(range(len(sizes))):
        dtype, size = sizes[i]
        members, filled = filling.pop(dtype, ([], 0))
        members.append(i)
        if filled + size >= cap:
            full.append(members)
        else:
            filling[dtype] = members, filled + size
    full += [members for members, _ in filling.values()]
    return sorted(full, key=lambda members: -members[-1])
