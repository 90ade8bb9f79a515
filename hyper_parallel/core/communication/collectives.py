"""Collectives on plain local tensors along one mesh dimension. They handle uneven sizes and features that a backend
lacks.

The collectives are not differentiable; `transitions` makes autograd functions of pairs of collectives. A mesh dimension
of size 1 and empty tensors cause no communication. All functions raise `CollectiveError` if a rank is lost. All
functions use `_bind`, which notifies the recorder. For frequent collectives, a function such as `bind_all_reduce` does
all look-ups in advance. It returns a function of the tensor alone.
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
    """Return the collective ``kind`` on a mesh dimension of more than one rank, as a function of the local tensor.

    Args:
        kind, mesh, mesh_dim, op, details, uneven: arguments of `record`.
        send: ``send(x, *args)`` communicates by the backend's native collective.
        emulate: ``emulate(x, *args)`` communicates by other collectives, for dtypes that the native collective does not
            support.
        nothing: ``nothing(x)`` returns the result if no rank has elements, and None if some rank has.
        args: further arguments of ``send`` and ``emulate``.
    """
    supports = mesh.platform.supports
    known: set[Any] = set()  # dtypes that the backend supports

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
    """Return `all_reduce` as a function ``reduce(x)``."""
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
    """Return the reduction of ``x`` over the mesh dimension. ``x`` is contiguous and may be overwritten."""
    return _ALL_REDUCE[mesh, mesh_dim, op](x)


def all_reduce_extreme(x: Any, mesh: DeviceMesh, mesh_dim: int, op: str) -> Any:
    """Return `all_reduce` by ``"max"`` or ``"min"`` as a new tensor, with NaN where any rank has NaN. Backends disagree
    on the maximum of a number and NaN. So the message contains a flag for NaN next to each value."""
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
    """Return `all_reduce` of ``x`` along several mesh dimensions in turn."""
    for mesh_dim in mesh_dims:
        x = _ALL_REDUCE[mesh, mesh_dim, op](x)
    return x


def together(tensors: Sequence[Any], platform: Any, collective: Callable[..., Any], *args: Any) -> list[Any]:
    """Apply an element-wise ``collective`` to several tensors of one dtype in one message, and return the results.
    ``collective`` is called once, with a new concatenated tensor, which it may overwrite, and ``args``."""
    shapes = [platform.shape_of(x) for x in tensors]
    counts = [math.prod(shape) for shape in shapes]
    flat = [x.reshape((count,)) for x, count in zip(tensors, counts, strict=True)]
    whole = collective(platform.cat(flat, 0) if len(flat) > 1 else platform.clone(flat[0]), *args)
    parts = zip(accumulate(counts, initial=0), counts, shapes, strict=False)
    return [platform.narrow(whole, 0, start, count).reshape(shape) for start, count, shape in parts]


def bind_all_gather(mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int]) -> TensorFunction:
    """Return ``gather(x)``, which concatenates shards along tensor dimension ``dim``. Rank i of the mesh dimension
    holds ``sizes[i]`` elements."""
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
    """Return ``scatter(x)``, which reduces over the mesh dimension and returns this rank's shard. The shard has
    ``sizes[rank]`` elements of tensor dimension ``dim``."""
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
    """Return ``exchange(x)``, which converts a shard of tensor dimension ``src_dim`` into a shard of ``dst_dim``. Rank
    i holds ``src_sizes[i]`` elements of ``src_dim`` before, and ``dst_sizes[i]`` elements of ``dst_dim`` after."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return _itself
    rank, largest, group = mesh.get_local_rank(mesh_dim), max(src_sizes), mesh.platform_group(mesh_dim)
    native, chunk, cat = platform.all_to_all, platform.chunk, platform.cat

    def send(x: Any) -> Any:  # no variable keeps the sent chunks alive
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
    """Return the rows that this rank receives when each rank sends rows of ``x`` to other ranks, without padding.

    Args:
        x: the rows to send, in the order of their destination ranks. The rows of the result are in the order of their
            source ranks.
        mesh, mesh_dim: the mesh dimension to exchange along.
        counts: ``counts[i, j]`` rows go from rank i of the mesh dimension to rank j. All ranks have equal counts.
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
    """Return the ``x`` of the previous rank along the mesh dimension. The first rank gets the ``x`` of the last. All
    ranks must have one shape."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return x

    def send(x: Any) -> Any:
        return platform.shift(platform.contiguous(x), mesh.platform_group(mesh_dim), size)

    def emulate(x: Any) -> Any:
        return platform.clone(_gather_parts(x, mesh, mesh_dim)[mesh.get_local_rank(mesh_dim) - 1])

    return _bind("shift", mesh, mesh_dim, send, emulate, _itself)(x)


def broadcast(x: Any, mesh: DeviceMesh, mesh_dim: int, src: int) -> Any:
    """Return the value of rank ``src`` of the mesh dimension. ``x`` is contiguous and may be overwritten."""
    if mesh.shape[mesh_dim] == 1:
        return x

    def send(x: Any) -> Any:
        return _broadcast(x, mesh, mesh_dim, src)

    return _bind("broadcast", mesh, mesh_dim, send, send, _itself, details={_SOURCE: src})(x)


def scatter(x: Any, mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int], src: int) -> Any:
    """Return this rank's shard of the ``x`` of rank ``src`` of the mesh dimension: ``sizes[rank]`` elements of tensor
    dimension ``dim``. On the other ranks only shape and dtype of ``x`` matter."""
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
    """Return one picklable value of each rank of the mesh dimension, in rank order. This collective is slow, and
    `CommDebugMode` does not count it."""
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


# ------------------------------------------------------------ emulation of collectives that a backend lacks: not
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
            # Arithmetic, because a backend that lacks the reduction may also lack the element-wise kernel.
            take = (part > result if op == "max" else part < result) | (part != part)
            result = platform.masked_fill(result, take, 0) + platform.masked_fill(part, ~take, 0)
    return result


def _broadcast(x: Any, mesh: DeviceMesh, mesh_dim: int, src: int) -> Any:
    platform = mesh.platform
    if not platform.supports("broadcast", "", x):
        return platform.clone(_gather_parts(x, mesh, mesh_dim)[src])
    return platform.broadcast(x, mesh.ranks_along(mesh_dim)[src], mesh.platform_group(mesh_dim))


def _gather_parts(x: Any, mesh: DeviceMesh, mesh_dim: int) -> list[Any]:
    """Return every rank's ``x`` in rank order. All ranks must have one shape."""
    platform, size = mesh.platform, mesh.shape[mesh_dim]
    shape = tuple(platform.shape_of(x))
    flat = platform.contiguous(x).reshape((math.prod(shape),))
    if platform.supports("all_gather", "", flat):
        gathered = platform.all_gather(flat, mesh.platform_group(mesh_dim), size)
    else:
        # For a backend that can add but not gather, each rank puts its values into its chunk of a buffer of zeros.
        empty = platform.zeros((math.prod(shape),), x)
        mine = [flat if i == mesh.get_local_rank(mesh_dim) else empty for i in range(size)]
        gathered = platform.all_reduce(platform.cat(mine, 0), "sum", mesh.platform_group(mesh_dim))
    return [part.reshape(shape) for part in platform.chunk(gathered, size, 0)]
