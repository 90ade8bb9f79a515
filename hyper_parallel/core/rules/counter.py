"""Random numbers of which each rank draws those of its own part, on request: see `platform.contract.counter`.

The number of an element is a function of its place in the whole tensor and of a key. The key comes from the framework's
default generator, which every draw advances by the same amount, whatever the tensor. So code that keeps, restores or
compares the state of that generator needs no changes. Examples are checkpoints, activation checkpointing and
`check_ranks`.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.communication.collectives import broadcast
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.rules.batch_parts import Place, own_place

#: mesh -> the last argument of `manual_seed` on it.
_REQUESTS: dict[DeviceMesh, bool] = {}


def request(mesh: DeviceMesh, by_counter: bool) -> None:
    """Let tensors on ``mesh`` and on its slices be drawn by counter, or not.

    Raises:
        TypeError: by counter, on a platform that cannot.
    """
    if by_counter and not mesh.platform.dtypes:
        raise TypeError(f"{mesh.platform.name} has no counter-based generator: leave parallel_rng out")
    for other in [other for other in _REQUESTS if is_within(other, mesh)]:
        del _REQUESTS[other]
    _REQUESTS[mesh] = by_counter


def draws_by_counter(mesh: DeviceMesh) -> bool:
    """Return whether tensors on ``mesh`` are drawn by counter: as was said of it, or of the smallest mesh that it is a
    slice of. All ranks of ``mesh`` know the same.
    """
    if not _REQUESTS:
        return False
    wider = [other for other in _REQUESTS if is_within(mesh, other)]
    return bool(wider) and _REQUESTS[min(wider, key=lambda other: len(_dims(other)))]


def is_requested() -> bool:
    """Return whether any mesh draws random numbers with ``parallel_rng='counter'``."""
    return any(_REQUESTS.values())


def is_within(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Return whether ``mesh`` is ``other``, or a slice along some of its dimensions."""
    if mesh is other:
        return True
    along = mesh.along_in(other.get_root_mesh())
    return along is not None and {dim for entry in along for dim in entry} <= _dims(other)


def _dims(mesh: DeviceMesh) -> set[int]:
    return {dim for entry in mesh.slices.along for dim in entry}


def numbers(kind: str, layout: Layout, dtype: Any, place: Place | None = None) -> Any:
    """This rank's part of a tensor of random numbers, plain; generators are in step.

    Ranks that hold the same part of the tensor, or summands of it, use the first one's key. So four numbers travel.

    Args:
        kind: see `Platform.numbers_by_counter`.
        layout: of the tensor.
        dtype: floating point.
        place: where the part lies in the tensor that numbers are drawn for; None where that is the tensor itself.
    """
    mesh, platform = layout.mesh, layout.mesh.platform
    key = platform.counter_key()
    if mesh.get_coordinate() is not None:
        for mesh_dim, placement in enumerate(layout.placements):
            if not placement.is_shard():
                key = broadcast(key, mesh, mesh_dim, 0)
    shape, ranges = place or own_place(layout)
    return platform.numbers_by_counter(kind, key, shape, ranges, dtype)
