"""Collectives on plain local tensors along one mesh dimension: uneven sizes and the features that a backend lacks, in
one place.

Nothing here is differentiable; `transitions` pairs these into autograd functions. A mesh dimension of size 1 and a
tensor without elements cause no communication. Where a rank is lost, each raises `CollectiveError`. All pass `_bind`,
which tells the recorder of them.

Collectives that run often are given as a function of the tensor alone (`bind_all_reduce` and its like), after all
look-ups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.errors import explain_along
from hyper_parallel.core.communication.padding import joined, padded, padded_parts, part_of
from hyper_parallel.core.communication.recorder import LISTENERS, record
from hyper_parallel.platform.contract.autograd import TensorFunction

if TYPE_CHECKING:
    import numpy as np

    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

_DIM, _SIZES, _SOURCE = "the tensor dimension", "the sizes of shards", "the source"


def _bind(
    kind: str,
    mesh: DeviceMesh,
    mesh_dim: int,
    send: Callable[..., Any],
    emulate: Callable[..., Any],
    nothing: TensorFunction,
    *,
    args: tuple = (),
    op: str = "",
    details: Mapping[str, Any] | None = None,
    uneven: tuple[int, int] | None = None,
) -> TensorFunction:
    """The collective ``kind`` as a function of the local tensor alone, on a mesh dimension of more than one rank.

    Args:
        kind, mesh, mesh_dim, op, details, uneven: for `record`.
        send: ``send(x, *args)`` communicates by the backend's own verb of this name.
        emulate: ``emulate(x, *args)`` does so by other verbs, for dtypes that the backend's own does not take.
        nothing: ``nothing(x)`` is the result where no rank has elements. None where only some ranks have none.
        args: see there.
    """
    supports = mesh.platform.supports
    known: set[Any] = set()  # dtypes that the backend takes

    def run(x: Any) -> Any:
        way, done = send, None
        if LISTENERS or x.dtype not in known or 0 in x.shape:
            if LISTENERS:
                done = record(kind, mesh, mesh_dim, x, op, details, uneven)
            if 0 in x.shape and (y := nothing(x)) is not None:
                return y
            if supports(kind, op, x):
                known.add(x.dtype)
            else:
                way = emulate
        try:
            y = way(x, *args)
        except RuntimeError as error:
            explain_along(error, kind, x, mesh, mesh_dim)
            raise
        if done is not None:
            done()
        return y

    return run


def _itself(x: Any) -> Any:
    return x


def bind_all_reduce(mesh: DeviceMesh, mesh_dim: int, op: str = "sum") -> TensorFunction:
    """`all_reduce` as ``reduce(x)``."""
    return _ALL_REDUCE[mesh, mesh_dim, op]


def _bind_all_reduce(key: tuple[DeviceMesh, int, str]) -> TensorFunction:
    mesh, mesh_dim, op = key
    if mesh.shape[mesh_dim] == 1:
        return _itself

    def emulate(x: Any, *args: Any) -> Any:
        return _reduce(x, mesh, mesh_dim, op)

    args = (op, mesh.platform_group(mesh_dim))
    return _bind("all_reduce", mesh, mesh_dim, mesh.platform.all_reduce, emulate, _itself, args=args, op=op)


_ALL_REDUCE: Table = Table(_bind_all_reduce, 1 << 12, "bound collectives")


def all_reduce(x: Any, mesh: DeviceMesh, mesh_dim: int, op: str = "sum") -> Any:
    """Reduce ``x``, which is contiguous and may be overwritten, over the mesh dimension."""
    return _ALL_REDUCE[mesh, mesh_dim, op](x)


def all_reduce_extreme(x: Any, mesh: DeviceMesh, mesh_dim: int, op: str) -> Any:
    """`all_reduce` by ``"max"`` or ``"min"`` into a new tensor, with NaN where a rank has NaN. A backend's maximum of a
    number and NaN depends on the backend, and on which comes first. So they travel apart, in one message."""
    platform = mesh.platform
    shape = tuple(platform.shape_of(x))
    if (
        mesh.shape[mesh_dim] == 1
        or 0 in shape
        or not platform.is_floating_point(x)
        or not platform.supports("all_reduce", op, x)
    ):
        return all_reduce(platform.clone(x), mesh, mesh_dim, op)
    x, sign = x.reshape((1, *shape)), 1.0 if op == "max" else -1.0
    is_nan = x != x
    flags = platform.masked_fill(platform.zeros((1, *shape), x), is_nan, sign)
    both = all_reduce(platform.cat([platform.masked_fill(x, is_nan, -sign * math.inf), flags], 0), mesh, mesh_dim, op)
    values, flags = platform.chunk(both, 2, 0)
    return platform.masked_fill(values, flags != 0, math.nan).reshape(shape)


def all_reduce_over(x: Any, mesh: DeviceMesh, mesh_dims: Iterable[int], op: str = "sum") -> Any:
    """`all_reduce` along several mesh dimensions, one after the other."""
    for mesh_dim in mesh_dims:
        x = _ALL_REDUCE[mesh, mesh_dim, op](x)
    return x


def together(tensors: Sequence[Any], platform: Any, collective: Callable[..., Any], *args: Any) -> list[Any]:
    """Apply an element-wise ``collective`` to several tensors of one dtype, which travel in one message. It is
    called once, with ``args`` and a new tensor of all their elements, which it may overwrite."""
    shapes = [platform.shape_of(x) for x in tensors]
    counts = [math.prod(shape) for shape in shapes]
    flat = [x.reshape((count,)) for x, count in zip(tensors, counts, strict=True)]
    whole = collective(platform.cat(flat, 0) if len(flat) > 1 else platform.clone(flat[0]), *args)
    parts = zip(accumulate(counts, initial=0), counts, shapes, strict=False)
    return [platform.narrow(whole, 0, start, count).reshape(shape) for start, count, shape in parts]


def bind_all_gather(mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int]) -> TensorFunction:
    """``gather(x)`` concatenates along tensor dimension ``dim``, of which rank i of the mesh dimension holds
    ``sizes[i]``."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return _itself
    group, sizes, largest = mesh.platform_group(mesh_dim), tuple(sizes), max(sizes)
    native, contiguous, chunk, cat = platform.all_gather, platform.contiguous, platform.chunk, platform.cat

    def send(x: Any) -> Any:
        gathered = native(contiguous(x), group, size)
        return cat(chunk(gathered, size, 0), dim) if dim else gathered

    def send_padded(x: Any) -> Any:
        return joined(_gather_parts(padded(x, dim, largest, platform), mesh, mesh_dim), dim, sizes, platform)

    def nothing(x: Any) -> Any:
        shape = [*platform.shape_of(x)]
        shape[dim] = sum(sizes)
        return platform.zeros(shape, x) if 0 in shape else None

    return _bind(
        "all_gather",
        mesh,
        mesh_dim,
        send if min(sizes) == largest else send_padded,
        send_padded,
        nothing,
        details={_DIM: dim, _SIZES: sizes},
        uneven=(dim, largest),
    )


def bind_reduce_scatter(
    mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int], op: str = "sum"
) -> TensorFunction:
    """``scatter(x)`` reduces over the mesh dimension and keeps this rank's ``sizes[rank]`` of tensor dimension
    ``dim``."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return _itself
    rank, group, sizes = mesh.get_local_rank(mesh_dim), mesh.platform_group(mesh_dim), tuple(sizes)
    native, contiguous, chunk, cat = platform.reduce_scatter, platform.contiguous, platform.chunk, platform.cat

    def send(x: Any, op: str = op) -> Any:
        return native(cat(chunk(x, size, dim), 0) if dim else contiguous(x), op, group, size)

    def send_padded(x: Any, op: str = op) -> Any:
        y = native(padded_parts(x, dim, sizes, platform), op, group, size)
        return platform.narrow(y, dim, 0, sizes[rank])

    way = send if min(sizes) == max(sizes) else send_padded

    def emulate(x: Any) -> Any:
        if op == "avg" and platform.supports("reduce_scatter", "sum", x):
            return way(x, "sum") / size
        return platform.clone(part(_reduce(platform.clone(x), mesh, mesh_dim, op)))

    def part(x: Any) -> Any:
        return part_of(x, dim, sizes, rank, platform)

    details = {_DIM: dim, _SIZES: sizes}
    return _bind("reduce_scatter", mesh, mesh_dim, way, emulate, part, op=op, details=details)


def bind_all_to_all(
    mesh: DeviceMesh, mesh_dim: int, src_dim: int, dst_dim: int, src_sizes: Sequence[int], dst_sizes: Sequence[int]
) -> TensorFunction:
    """``exchange(x)`` turns a shard of tensor dimension ``src_dim`` into a shard of ``dst_dim``. Rank i holds
    ``src_sizes[i]`` of the one before and ``dst_sizes[i]`` of the other after."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return _itself
    rank, largest, group = mesh.get_local_rank(mesh_dim), max(src_sizes), mesh.platform_group(mesh_dim)
    native, chunk, cat = platform.all_to_all, platform.chunk, platform.cat

    def send(x: Any) -> Any:  # no name holds the parts that were sent
        return cat(chunk(native(cat(chunk(x, size, dst_dim), 0), group, size), size, 0), src_dim)

    def send_padded(x: Any) -> Any:
        received = native(
            padded_parts(padded(x, src_dim, largest, platform), dst_dim, dst_sizes, platform), group, size
        )
        mine = [platform.narrow(part, dst_dim, 0, dst_sizes[rank]) for part in chunk(received, size, 0)]
        return joined(mine, src_dim, src_sizes, platform)

    def emulate(x: Any) -> Any:
        parts = _gather_parts(padded(x, src_dim, largest, platform), mesh, mesh_dim)
        mine = [part_of(part, dst_dim, dst_sizes, rank, platform) for part in parts]
        return joined(mine, src_dim, src_sizes, platform)

    def nothing(x: Any) -> Any:
        shape = [*platform.shape_of(x)]
        shape[src_dim] = sum(src_sizes)
        if 0 not in shape:
            return None
        shape[dst_dim] = dst_sizes[rank]
        return platform.zeros(shape, x)

    even = min(src_sizes) == largest and min(dst_sizes) == max(dst_sizes) > 0
    details = {"the tensor dimensions": (src_dim, dst_dim), _SIZES: (tuple(src_sizes), tuple(dst_sizes))}
    uneven = (src_dim, largest)
    way = send if even else send_padded
    return _bind("all_to_all", mesh, mesh_dim, way, emulate, nothing, details=details, uneven=uneven)


def exchange_rows(x: Any, mesh: DeviceMesh, mesh_dim: int, counts: np.ndarray) -> Any:
    """Send the rows of ``x`` to the ranks that are to have them, without padding.

    Args:
        x: its rows are in the order of the ranks that they go to; those of the result, of the ranks that they are from.
        mesh, mesh_dim: between which ranks.
        counts: ``counts[i, j]`` rows go from rank i of the mesh dimension to rank j; the same on all ranks.
    """
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return x
    rank, largest = mesh.get_local_rank(mesh_dim), int(counts.sum(1).max())
    sent, received = counts[rank].tolist(), counts[:, rank].tolist()

    def send(x: Any) -> Any:
        group = mesh.platform_group(mesh_dim)
        return platform.all_to_all(platform.contiguous(x), group, size, sent, received)

    def emulate(x: Any) -> Any:
        parts = _gather_parts(padded(x, 0, largest, platform), mesh, mesh_dim)
        mine = [part_of(part, 0, counts[i].tolist(), rank, platform) for i, part in enumerate(parts) if received[i]]
        return platform.cat(mine, 0) if mine else platform.zeros((0, *platform.shape_of(x)[1:]), x)

    def nothing(x: Any) -> Any:
        shape = (sum(received), *platform.shape_of(x)[1:])
        return platform.zeros(shape, x) if not largest or 0 in shape[1:] else None

    details, uneven = {"the numbers of rows": counts.tolist()} if LISTENERS else None, (0, largest)
    return _bind("all_to_all", mesh, mesh_dim, send, emulate, nothing, details=details, uneven=uneven)(x)


def shift(x: Any, mesh: DeviceMesh, mesh_dim: int) -> Any:
    """Return the ``x`` of the previous rank along the mesh dimension. The first rank gets that of the last. ``x`` has
    one shape on all ranks."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return x

    def send(x: Any) -> Any:
        return platform.shift(platform.contiguous(x), mesh.platform_group(mesh_dim), size)

    def emulate(x: Any) -> Any:
        return platform.clone(_gather_parts(x, mesh, mesh_dim)[mesh.get_local_rank(mesh_dim) - 1])

    return _bind("shift", mesh, mesh_dim, send, emulate, _itself)(x)


def broadcast(x: Any, mesh: DeviceMesh, mesh_dim: int, src: int) -> Any:
    """Value of rank ``src`` of the mesh dimension; ``x`` is contiguous and may be overwritten."""
    if mesh.shape[mesh_dim] == 1:
        return x

    def send(x: Any) -> Any:
        return _broadcast(x, mesh, mesh_dim, src)

    return _bind("broadcast", mesh, mesh_dim, send, send, _itself, details={_SOURCE: src})(x)


def scatter(x: Any, mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int], src: int) -> Any:
    """This rank's ``sizes[rank]`` of tensor dimension ``dim`` of the ``x`` of rank ``src`` of the mesh dimension. On
    the other ranks only shape and dtype of ``x`` matter."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    rank, largest = mesh.get_local_rank(mesh_dim), max(sizes)

    def mine(x: Any) -> Any:
        return part_of(x, dim, sizes, rank, platform)

    def send(x: Any) -> Any:
        shape = [*platform.shape_of(x)]
        shape[dim] = largest
        parts = platform.chunk(padded_parts(x, dim, sizes, platform), size, 0) if rank == src else None
        source, group = mesh.ranks_along(mesh_dim)[src], mesh.platform_group(mesh_dim)
        out = platform.scatter(platform.zeros(shape, x), parts, source, group)
        return out if sizes[rank] == largest else platform.clone(platform.narrow(out, dim, 0, sizes[rank]))

    def emulate(x: Any) -> Any:
        return platform.clone(mine(_broadcast(platform.clone(x), mesh, mesh_dim, src)))

    if size == 1:
        return mine(x)
    details = {_SOURCE: src, _DIM: dim, _SIZES: tuple(sizes)}
    return _bind("scatter", mesh, mesh_dim, send, emulate, mine, details=details)(x)


def all_gather_object(value: Any, mesh: DeviceMesh, mesh_dim: int) -> list[Any]:
    """Gather one picklable value of each rank of the mesh dimension, in its order. Off the hot path, not counted."""
    size = mesh.shape[mesh_dim]
    if size == 1:
        return [value]
    mesh.require_member("a comparison over the mesh")
    done = record("all_gather_object", mesh, mesh_dim, None) if LISTENERS else None
    try:
        values = mesh.platform.all_gather_object(value, mesh.platform_group(mesh_dim), size)
    except RuntimeError as error:
        explain_along(error, "all_gather_object", None, mesh, mesh_dim)
        raise
    if done is not None:
        done()
    return values


# ------------------------------------------------------------ in place of collectives that a backend lacks: not
# recorded
def _reduce(x: Any, mesh: DeviceMesh, mesh_dim: int, op: str) -> Any:
    platform = mesh.platform
    if platform.supports("all_reduce", op, x):
        return platform.all_reduce(x, op, mesh.platform_group(mesh_dim))
    if op == "avg":
        return _reduce(x, mesh, mesh_dim, "sum") / mesh.shape[mesh_dim]
    result, *others = _gather_parts(x, mesh, mesh_dim)
    for part in others:
        if op == "sum":
            result = result + part
        elif op == "product":
            result = result * part
        else:
            # Written with arithmetic, because a backend that lacks the reduction may lack the element-wise kernel too.
            take = (part > result if op == "max" else part < result) | (part != part)
            result = platform.masked_fill(result, take, 0) + platform.masked_fill(part, ~take, 0)
    return result


def _broadcast(x: Any, mesh: DeviceMesh, mesh_dim: int, src: int) -> Any:
    platform = mesh.platform
    if not platform.supports("broadcast", "", x):
        return platform.clone(_gather_parts(x, mesh, mesh_dim)[src])
    return platform.broadcast(x, mesh.ranks_along(mesh_dim)[src], mesh.platform_group(mesh_dim))


def _gather_parts(x: Any, mesh: DeviceMesh, mesh_dim: int) -> list[Any]:
    """Every rank's ``x``, all of one shape, in rank order."""
    platform, size = mesh.platform, mesh.shape[mesh_dim]
    shape = tuple(platform.shape_of(x))
    flat = platform.contiguous(x).reshape((math.prod(shape),))
    if platform.supports("all_gather", "", flat):
        gathered = platform.all_gather(flat, mesh.platform_group(mesh_dim), size)
    else:
        # A backend that can add but not gather: each rank's values in its own part of a buffer of zeros.
        empty = platform.zeros((math.prod(shape),), x)
        mine = [flat if i == mesh.get_local_rank(mesh_dim) else empty for i in range(size)]
        gathered = platform.all_reduce(platform.cat(mine, 0), "sum", mesh.platform_group(mesh_dim))
    return [part.reshape(shape) for part in platform.chunk(gathered, size, 0)]
