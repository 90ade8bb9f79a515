"""Collectives on plain local tensors along one mesh dimension: uneven sizes, emulation and counting, in one place.

Nothing here is differentiable; `transitions` pairs these into autograd functions. A mesh dimension of size 1 and a
tensor without elements cause no communication. Where a rank is lost, each raises `CollectiveError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.communication.errors import explain_along
from hyper_parallel.core.dtensor.communication.rank_check import CHECKS, check_collective

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.device_mesh import DeviceMesh

__all__ = [
    "OBSERVERS",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_extreme",
    "all_to_all",
    "record_collective",
    "bind_all_gather",
    "bind_all_reduce",
    "bind_reduce_scatter",
    "broadcast",
    "reduce_scatter",
    "scatter",
]

#: Called as ``observer(collective, mesh, mesh_dim, local)`` before each collective; see `debug.CommDebugMode`.
OBSERVERS: list[Callable[[str, DeviceMesh, int, Any], None]] = []


def _record(collective: str, mesh: DeviceMesh, mesh_dim: int, local: Any) -> None:
    for observer in OBSERVERS:
        observer(collective, mesh, mesh_dim, local)


def record_collective(collective: str, mesh: DeviceMesh, mesh_dim: int, x: Any) -> None:
    """Check and count a collective that the backend is about to do itself, as a part of another operation."""
    if CHECKS:
        check_collective(collective, mesh, mesh_dim, x)
    if OBSERVERS:
        _record(collective, mesh, mesh_dim, x)


def all_reduce(x: Any, mesh: DeviceMesh, mesh_dim: int, op: str = "sum") -> Any:
    """Reduce ``x``, which is contiguous and may be overwritten, over the mesh dimension."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return x
    if CHECKS:
        check_collective("all_reduce", mesh, mesh_dim, x, {"op": op})
    if 0 in platform.shape_of(x):
        return x
    if OBSERVERS:
        _record("all_reduce", mesh, mesh_dim, x)
    try:
        if platform.supports("all_reduce", op, x):
            return platform.all_reduce(x, op, mesh.platform_group(mesh_dim))
        if op == "avg" and platform.supports("all_reduce", "sum", x):
            return platform.all_reduce(x, "sum", mesh.platform_group(mesh_dim)) / size
        return _reduce_parts(_gather_parts(x, mesh, mesh_dim), op, platform)
    except RuntimeError as error:
        explain_along(error, "all_reduce", x, mesh, mesh_dim)
        raise


def all_reduce_extreme(x: Any, mesh: DeviceMesh, mesh_dim: int, op: str) -> Any:
    """`all_reduce` by ``"max"`` or ``"min"`` into a new tensor, with NaN where a rank has NaN. What a backend makes of
    a number and NaN depends on the backend, and on which comes first. So they travel apart, in one message."""
    platform = mesh.platform
    shape = platform.shape_of(x)
    if (
        mesh.shape[mesh_dim] == 1
        or 0 in shape
        or not platform.is_floating_point(x)
        or not platform.supports("all_reduce", op, x)
    ):
        return all_reduce(platform.clone(x), mesh, mesh_dim, op)
    count, sign = math.prod(shape), 1.0 if op == "max" else -1.0
    flat = x.reshape((count,))
    is_nan = flat != flat
    flags = platform.masked_fill(platform.zeros((count,), x), is_nan, sign)
    both = platform.cat([platform.masked_fill(flat, is_nan, -sign * math.inf), flags], 0)
    if CHECKS:
        check_collective("all_reduce", mesh, mesh_dim, x, {"op": op})
    if OBSERVERS:
        _record("all_reduce", mesh, mesh_dim, both)
    try:
        both = platform.all_reduce(both, op, mesh.platform_group(mesh_dim))
    except RuntimeError as error:
        explain_along(error, "all_reduce", x, mesh, mesh_dim)
        raise
    is_nan = platform.narrow(both, 0, count, count) != 0
    return platform.masked_fill(platform.narrow(both, 0, 0, count), is_nan, math.nan).reshape(shape)


def bind_all_reduce(mesh: DeviceMesh, mesh_dim: int) -> Callable[[Any], Any]:
    """`all_reduce` of sums along a mesh dimension as ``reduce(x)``, for code that runs it often: what can be looked up
    is looked up now."""
    if mesh.shape[mesh_dim] == 1:
        return lambda x: x
    platform, group = mesh.platform, mesh.platform_group(mesh_dim)
    supports, native = platform.supports, platform.all_reduce
    known: set[Any] = set()  # dtypes that the backend sums

    def reduce(x: Any) -> Any:
        if CHECKS or OBSERVERS or x.dtype not in known or 0 in x.shape:
            if supports("all_reduce", "sum", x):
                known.add(x.dtype)
            return all_reduce(x, mesh, mesh_dim)
        try:
            return native(x, "sum", group)
        except RuntimeError as error:
            explain_along(error, "all_reduce", x, mesh, mesh_dim)
            raise

    return reduce


def all_gather(x: Any, mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int]) -> Any:
    """Concatenate along tensor dimension ``dim``, of which rank i of the mesh dimension holds ``sizes[i]``."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return x
    if CHECKS:
        check_collective(
            "all_gather", mesh, mesh_dim, x, {"the tensor dimension": dim, "the sizes of shards": sizes}, dim
        )
    largest = max(sizes)
    x = _pad(x, dim, largest, platform)
    if 0 in platform.shape_of(x):
        shape = list(platform.shape_of(x))
        shape[dim] = sum(sizes)
        return platform.zeros(shape, x)
    if OBSERVERS:
        _record("all_gather", mesh, mesh_dim, x)
    try:
        if min(sizes) == largest and platform.supports("all_gather", "", x):
            gathered = platform.all_gather(platform.contiguous(x), mesh.platform_group(mesh_dim), size)
            return gathered if dim == 0 else platform.cat(platform.chunk(gathered, size, 0), dim)
        parts = _gather_parts(x, mesh, mesh_dim)
    except RuntimeError as error:
        explain_along(error, "all_gather", x, mesh, mesh_dim)
        raise
    return platform.cat(
        [part if n == largest else platform.narrow(part, dim, 0, n) for part, n in zip(parts, sizes, strict=True) if n],
        dim,
    )


def bind_all_gather(mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int]) -> Callable[[Any], Any]:
    """`all_gather` as ``gather(x)``, see `bind_all_reduce`."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return lambda x: x
    if not sizes or min(sizes) != max(sizes):
        return lambda x: all_gather(x, mesh, mesh_dim, dim, sizes)
    group, supports = mesh.platform_group(mesh_dim), platform.supports
    native, contiguous, chunk, cat = platform.all_gather, platform.contiguous, platform.chunk, platform.cat
    known: set[Any] = set()  # dtypes that the backend gathers

    def gather(x: Any) -> Any:
        if CHECKS or OBSERVERS or x.dtype not in known or 0 in x.shape:
            if supports("all_gather", "", x):
                known.add(x.dtype)
            return all_gather(x, mesh, mesh_dim, dim, sizes)
        try:
            gathered = native(contiguous(x), group, size)
        except RuntimeError as error:
            explain_along(error, "all_gather", x, mesh, mesh_dim)
            raise
        return cat(chunk(gathered, size, 0), dim) if dim else gathered

    return gather


def reduce_scatter(x: Any, mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int], op: str = "sum") -> Any:
    """Reduce over the mesh dimension and keep this rank's ``sizes[rank]`` of tensor dimension ``dim``."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return x
    rank = mesh.get_local_rank(mesh_dim)
    if CHECKS:
        details = {"op": op, "the tensor dimension": dim, "the sizes of shards": sizes}
        check_collective("reduce_scatter", mesh, mesh_dim, x, details)
    if 0 in platform.shape_of(x):
        return _part(x, dim, sizes, rank, platform)
    if OBSERVERS:
        _record("reduce_scatter", mesh, mesh_dim, x)
    group, native_op, scale = mesh.platform_group(mesh_dim), op, None
    if op == "avg" and not platform.supports("reduce_scatter", "avg", x):
        native_op, scale = "sum", size
    try:
        if platform.supports("reduce_scatter", native_op, x):
            largest = max(sizes)
            if min(sizes) == largest:
                if dim != 0:
                    x = platform.cat(platform.chunk(x, size, dim), 0)
            else:
                parts = [_pad(_part(x, dim, sizes, i, platform), dim, largest, platform) for i in range(size)]
                x = platform.cat(parts, 0)
            y = platform.reduce_scatter(platform.contiguous(x), native_op, group, size)
            y = y if sizes[rank] == largest else platform.narrow(y, dim, 0, sizes[rank])
        else:
            y = _part(_all_reduce_unobserved(platform.clone(x), mesh, mesh_dim, native_op), dim, sizes, rank, platform)
            y = platform.clone(y)
    except RuntimeError as error:
        explain_along(error, "reduce_scatter", x, mesh, mesh_dim)
        raise
    return y if scale is None else y / scale


def bind_reduce_scatter(mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int]) -> Callable[[Any], Any]:
    """`reduce_scatter` of sums as ``scatter(x)``, see `bind_all_reduce`."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return lambda x: x
    if not sizes or min(sizes) != max(sizes):
        return lambda x: reduce_scatter(x, mesh, mesh_dim, dim, sizes)
    group, supports = mesh.platform_group(mesh_dim), platform.supports
    native, contiguous, chunk, cat = platform.reduce_scatter, platform.contiguous, platform.chunk, platform.cat
    known: set[Any] = set()  # dtypes that the backend sums

    def scatter(x: Any) -> Any:
        if CHECKS or OBSERVERS or x.dtype not in known or 0 in x.shape:
            if supports("reduce_scatter", "sum", x):
                known.add(x.dtype)
            return reduce_scatter(x, mesh, mesh_dim, dim, sizes)
        try:
            return native(cat(chunk(x, size, dim), 0) if dim else contiguous(x), "sum", group, size)
        except RuntimeError as error:
            explain_along(error, "reduce_scatter", x, mesh, mesh_dim)
            raise

    return scatter


def all_to_all(
    x: Any,
    mesh: DeviceMesh,
    mesh_dim: int,
    src_dim: int,
    dst_dim: int,
    src_sizes: Sequence[int],
    dst_sizes: Sequence[int],
) -> Any:
    """From a shard of tensor dimension ``src_dim`` to a shard of ``dst_dim``; rank i holds ``src_sizes[i]`` of the
    one before and ``dst_sizes[i]`` of the other after."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    if size == 1:
        return x
    rank = mesh.get_local_rank(mesh_dim)
    if CHECKS:
        details = {"the tensor dimensions": (src_dim, dst_dim), "the sizes of shards": (src_sizes, dst_sizes)}
        check_collective("all_to_all", mesh, mesh_dim, x, details, src_dim)
    if sum(src_sizes) == 0 or sum(dst_sizes) == 0 or _empty_besides(platform.shape_of(x), src_dim, dst_dim):
        shape = list(platform.shape_of(x))
        shape[src_dim], shape[dst_dim] = sum(src_sizes), dst_sizes[rank]
        return platform.zeros(shape, x)
    if OBSERVERS:
        _record("all_to_all", mesh, mesh_dim, x)
    try:
        if not platform.supports("all_to_all", "", x):
            parts = _gather_parts(_pad(x, src_dim, max(src_sizes), platform), mesh, mesh_dim)
            mine = [_part(part, dst_dim, dst_sizes, rank, platform) for part in parts]
        else:
            to_send = [
                _pad(
                    _pad(_part(x, dst_dim, dst_sizes, i, platform), dst_dim, max(dst_sizes), platform),
                    src_dim,
                    max(src_sizes),
                    platform,
                )
                for i in range(size)
            ]
            received = platform.all_to_all(platform.cat(to_send, 0), mesh.platform_group(mesh_dim), size)
            rows = platform.shape_of(received)[0] // size
            mine = [
                platform.narrow(platform.narrow(received, 0, i * rows, rows), dst_dim, 0, dst_sizes[rank])
                for i in range(size)
            ]
    except RuntimeError as error:
        explain_along(error, "all_to_all", x, mesh, mesh_dim)
        raise
    return platform.cat(
        [platform.narrow(part, src_dim, 0, n) for part, n in zip(mine, src_sizes, strict=True) if n], src_dim
    )


def broadcast(x: Any, mesh: DeviceMesh, mesh_dim: int, src: int) -> Any:
    """Value of rank ``src`` of the mesh dimension; ``x`` is contiguous and may be overwritten."""
    platform = mesh.platform
    if mesh.shape[mesh_dim] == 1:
        return x
    if CHECKS:
        check_collective("broadcast", mesh, mesh_dim, x, {"the source": src})
    if 0 in platform.shape_of(x):
        return x
    if OBSERVERS:
        _record("broadcast", mesh, mesh_dim, x)
    try:
        if not platform.supports("broadcast", "", x):
            return platform.clone(_gather_parts(x, mesh, mesh_dim)[src])
        return platform.broadcast(x, mesh.ranks_along(mesh_dim)[src], mesh.platform_group(mesh_dim))
    except RuntimeError as error:
        explain_along(error, "broadcast", x, mesh, mesh_dim)
        raise


def scatter(x: Any, mesh: DeviceMesh, mesh_dim: int, dim: int, sizes: Sequence[int], src: int) -> Any:
    """This rank's ``sizes[rank]`` of tensor dimension ``dim`` of the ``x`` that rank ``src`` of the mesh dimension
    holds; on the other ranks only shape and dtype of ``x`` matter."""
    size, platform = mesh.shape[mesh_dim], mesh.platform
    rank = mesh.get_local_rank(mesh_dim)
    if size == 1:
        return _part(x, dim, sizes, rank, platform)
    if CHECKS:
        details = {"the source": src, "the tensor dimension": dim, "the sizes of shards": sizes}
        check_collective("scatter", mesh, mesh_dim, x, details)
    if 0 in platform.shape_of(x):
        return _part(x, dim, sizes, rank, platform)
    if not platform.supports("scatter", "", x):
        return platform.clone(_part(broadcast(platform.clone(x), mesh, mesh_dim, src), dim, sizes, rank, platform))
    if OBSERVERS:
        _record("scatter", mesh, mesh_dim, x)
    largest = max(sizes)
    shape = list(platform.shape_of(x))
    shape[dim] = largest
    parts = None
    if rank == src:
        parts = [platform.clone(_pad(_part(x, dim, sizes, i, platform), dim, largest, platform)) for i in range(size)]
    source, group = mesh.ranks_along(mesh_dim)[src], mesh.platform_group(mesh_dim)
    try:
        out = platform.scatter(platform.zeros(shape, x), parts, source, group)
    except RuntimeError as error:
        explain_along(error, "scatter", x, mesh, mesh_dim)
        raise
    return out if sizes[rank] == largest else platform.clone(platform.narrow(out, dim, 0, sizes[rank]))


def all_gather_object(value: Any, mesh: DeviceMesh, mesh_dim: int) -> list[Any]:
    """One picklable value of each rank of the mesh dimension, in its order. Off the hot path, not counted."""
    size = mesh.shape[mesh_dim]
    if size == 1:
        return [value]
    mesh.require_member("a comparison over the mesh")
    if CHECKS:
        check_collective("all_gather_object", mesh, mesh_dim, None)
    try:
        return mesh.platform.all_gather_object(value, mesh.platform_group(mesh_dim), size)
    except RuntimeError as error:
        explain_along(error, "all_gather_object", None, mesh, mesh_dim)
        raise


def _all_reduce_unobserved(x: Any, mesh: DeviceMesh, mesh_dim: int, op: str) -> Any:
    if mesh.platform.supports("all_reduce", op, x):
        return mesh.platform.all_reduce(x, op, mesh.platform_group(mesh_dim))
    return _reduce_parts(_gather_parts(x, mesh, mesh_dim), op, mesh.platform)


def _gather_parts(x: Any, mesh: DeviceMesh, mesh_dim: int) -> list[Any]:
    """Every rank's ``x``, all of one shape, in rank order."""
    platform, size = mesh.platform, mesh.shape[mesh_dim]
    shape = platform.shape_of(x)
    flat = platform.contiguous(x).reshape((math.prod(shape),))
    if platform.supports("all_gather", "", flat):
        gathered = platform.all_gather(flat, mesh.platform_group(mesh_dim), size)
    else:
        # A backend that can add but not gather: each rank's values in its own part of a buffer of zeros.
        empty = platform.zeros(shape, x).reshape((math.prod(shape),))
        mine = [flat if i == mesh.get_local_rank(mesh_dim) else empty for i in range(size)]
        gathered = platform.all_reduce(platform.cat(mine, 0), "sum", mesh.platform_group(mesh_dim))
    count = math.prod(shape)
    return [platform.narrow(gathered, 0, i * count, count).reshape(shape) for i in range(size)]


def _reduce_parts(parts: list[Any], op: str, platform: Any) -> Any:
    result = parts[0]
    for part in parts[1:]:
        if op in ("sum", "avg"):
            result = result + part
        elif op == "product":
            result = result * part
        else:
            # Written with arithmetic, because a backend that lacks the reduction may lack the element-wise kernel too.
            take = (part > result if op == "max" else part < result) | (part != part)
            result = platform.masked_fill(result, take, 0) + platform.masked_fill(part, ~take, 0)
    return result / len(parts) if op == "avg" else result


def _part(x: Any, dim: int, sizes: Sequence[int], i: int, platform: Any) -> Any:
    return platform.narrow(x, dim, sum(sizes[:i]), sizes[i])


def _pad(x: Any, dim: int, size: int, platform: Any) -> Any:
    shape = list(platform.shape_of(x))
    if shape[dim] == size:
        return x
    shape[dim] = size - shape[dim]
    return platform.cat([x, platform.zeros(shape, x)], dim)


def _empty_besides(shape: Sequence[int], *dims: int) -> bool:
    return any(n == 0 for i, n in enumerate(shape) if i not in dims)
