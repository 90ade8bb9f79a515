"""Parameters and buffers that a plan leaves plain. Every rank holds the full tensor, and values must be equal on all
ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.rank_check import check_values
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.rules.random import check_generators
from hyper_parallel.core.weak_table import WeakTable, collect_garbage
from hyper_parallel.platform import Platform

#: Maximal number of elements in one bucket. A larger tensor is broadcast separately, without a copy.
BUCKET = 1 << 17
#: module with a style -> weak references to (the module that parallelize_module was called with, mesh).
_PLANS = WeakTable()


def broadcast_undistributed(module: Any, mesh: DeviceMesh, src_data_rank: int | None) -> None:
    """Broadcast the plain parameters and buffers of rank ``src_data_rank`` to every rank of a mesh, in place.

    Tensors keep their identity, ``requires_grad`` and device. A tied tensor is sent once, and a meta tensor is not
    sent. There is one broadcast per dtype, or several if there are more than `BUCKET` elements.

    Args:
        module: the module, including its submodules.
        mesh: the mesh.
        src_data_rank: an index along each dimension of the mesh; None to keep each rank's values.
    """
    if src_data_rank is None or mesh.size() == 1 or mesh.get_coordinate() is None:
        return
    plain = [x for _, _, x in held_tensors(module, mesh.platform) if not isinstance(x, DTensor)]
    for mesh_dim in range(mesh.ndim):
        broadcast_tensors(plain, mesh if mesh.ndim == 1 else mesh.slices.at((mesh_dim,)), src_data_rank)


def broadcast_tensors(tensors: Sequence[Any], mesh: DeviceMesh, src: int) -> None:
    """Broadcast tensors of rank ``src`` to every rank of a 1-D mesh, in place (see `broadcast_undistributed`).

    Args:
        tensors: parameters and buffers, each once. For a DTensor, its local tensor is broadcast.
        mesh: 1-D mesh that contains this rank.
        src: index of the source rank in the mesh.
    """
    platform = mesh.platform
    if mesh.size() == 1:
        return
    by_dtype: dict[Any, list[tuple[Any, int]]] = {}
    with platform.no_dispatch(), platform.no_grad():
        for x in tensors:
            if platform.has_values(x) and (count := math.prod(platform.shape_of(x))):
                by_dtype.setdefault(x.dtype, []).append((x, count))
        for entries in by_dtype.values():
            for bucket in _buckets(entries):
                _broadcast(bucket, mesh, src)


def held_tensors(module: Any, platform: Platform) -> Iterator[tuple[str, str, Any]]:
    """Yield (``"parameter"`` or ``"buffer"``, path, tensor) for each tensor of a module. Of tied tensors, only the
    first is included."""
    seen = set()
    for path, submodule in platform.named_modules(module):
        held = [("parameter", *named) for named in platform.named_parameters(submodule)]
        held += [("buffer", *named) for named in platform.named_buffers(submodule)]
        for kind, name, x in held:
            if id(x) not in seen:
                seen.add(id(x))
                yield kind, f"{path}.{name}" if path else name, x


def _buckets(entries: list[tuple[Any, int]]) -> Iterator[list[Any]]:
    bucket: list[Any] = []
    room = BUCKET
    for x, count in entries:
        if bucket and count > room:
            yield bucket
            bucket, room = [], BUCKET
        bucket.append(x)
        room -= count
    yield bucket


def _broadcast(tensors: list[Any], mesh: DeviceMesh, src: int) -> None:
    platform = mesh.platform
    values = [platform.to_device(platform.detach(x)) for x in tensors]
    if len(values) == 1 and math.prod(platform.shape_of(values[0])) > BUCKET:
        platform.write(tensors[0], collectives.broadcast(platform.contiguous(values[0]), mesh, 0, src))
        return
    received = collectives.together(values, platform, collectives.broadcast, mesh, 0, src)
    for x, value in zip(tensors, received, strict=True):
        platform.write(x, value)


# ---------------------------------------------------------------------- comparison
def remember_plan(module: Any, styled: list[Any], mesh: DeviceMesh) -> None:
    """Store for `check_first_call` that the modules ``styled`` got their styles in a plan for ``module``."""
    for submodule in styled:
        _PLANS.set(submodule, (weakref.ref(module), weakref.ref(mesh)))


def model_of(submodule: Any) -> Any:
    """Return the module whose plan gave ``submodule`` its style, or None."""
    known = _PLANS.get(submodule)
    return None if known is None else known[0]()


def planned_meshes() -> list[DeviceMesh]:
    """Return the 1-D meshes of the plans of all live modules. Unreferenced modules are released first."""
    if not _PLANS.values():
        return []
    collect_garbage()  # a module and its submodules refer to each other
    meshes = dict.fromkeys(mesh for _, known in _PLANS.values() if (mesh := known()) is not None)
    return [mesh for mesh in meshes if mesh.ndim == 1]  # a dimension of a larger mesh may be data-parallel


def check_first_call(submodule: Any) -> None:
    """Compare tensors that should be equal on all ranks.

    Call it only while a check is active, when a module with a style is called. The first call of a model inside
    `check_ranks` compares all tensors of the model. The end of the context compares them again.

    Raises:
        RankMismatchError: as in `check_whole_tensors`, and when the generators of a 1-D mesh differ.
    """
    module, mesh = (known() for known in _PLANS.get(submodule) or (lambda: None, lambda: None))
    if module is None or mesh is None or (id(module), mesh) in CHECKS[-1].at_end:
        return

    def compare() -> None:
        check_whole_tensors(module, mesh)
        if mesh.ndim == 1:  # a larger mesh may have a data-parallel dimension, whose ranks draw different numbers
            check_generators(mesh)

    compare()
    CHECKS[-1].at_end[id(module), mesh] = compare


def check_whole_tensors(module: Any, mesh: DeviceMesh) -> None:
    """Compare plain or replicated parameters and buffers, which should be equal on all ranks of a mesh.

    Raises:
        RankMismatchError: names the path of the first tensor that differs.
    """
    if mesh.get_coordinate() is None:
        return
    held = {
        f"{kind} {path!r}": x
        for kind, path, x in held_tensors(module, mesh.platform)
        if not isinstance(x, DTensor) or (x.device_mesh is mesh and set(x.placements) == {Replicate()})
    }
    for mesh_dim in range(mesh.ndim):
        check_values(
            held,
            mesh,
            mesh_dim,
            "parallelize_module with src_data_rank=0 copies these tensors from one rank to all. Later changes must "
            "be the same on every rank. If gradients differ between ranks, add a style for the module to the plan, "
            "such as SequenceParallel() or NoParallel()",
        )
