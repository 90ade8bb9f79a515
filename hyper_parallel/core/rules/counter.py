"""Counter-based random numbers, on request: each rank draws only the numbers of its shard (see
`platform.contract.counter`).

The number of an element is a function of its position in the global tensor and of a key. The key comes from the
framework's default generator. Every draw advances that generator by the same amount for any tensor. So code that saves,
restores or compares its state needs no changes. Examples are checkpoints, activation checkpointing and `check_ranks`.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.communication.collectives import broadcast
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.rules.batch_parts import Place, own_place

#: mesh -> whether the last `manual_seed` on it requested ``parallel_rng="counter"``.
_REQUESTS: dict[DeviceMesh, bool] = {}


def request(mesh: DeviceMesh, by_counter: bool) -> None:
    """Switch counter-based drawing on or off for tensors on ``mesh`` and its slices.

    Raises:
        TypeError: for ``by_counter`` on a platform without a counter-based generator.
    """
    if by_counter and not mesh.platform.dtypes:
        raise TypeError(f"{mesh.platform.name} has no counter-based generator: leave parallel_rng out")
    for other in [other for other in _REQUESTS if is_within(other, mesh)]:
        del _REQUESTS[other]
    _REQUESTS[mesh] = by_counter


def draws_by_counter(mesh: DeviceMesh) -> bool:
    """Return whether tensors on ``mesh`` are drawn by counter.

    The program's request for ``mesh`` decides, or else its request for the smallest mesh that contains ``mesh`` as a
    slice. All ranks of ``mesh`` get the same result.
    """
    if not _REQUESTS:
        return False
    wider = [other for other in _REQUESTS if is_within(mesh, other)]
    return bool(wider) and _REQUESTS[min(wider, key=lambda other: len(_dims(other)))]


def is_requested() -> bool:
    """Return whether any mesh draws random numbers with ``parallel_rng='counter'``."""
    return any(_REQUESTS.values())


def is_within(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Return whether ``mesh`` is ``other``, or a slice of it along some of its dimensions."""
    if mesh is other:
        return True
    along = mesh.along_in(other.get_root_mesh())
    return along is not None and {dim for entry in along for dim in entry} <= _dims(other)


def _dims(mesh: DeviceMesh) -> set[int]:
    return {dim for entry in mesh.slices.along for dim in entry}


def numbers(kind: str, layout: Layout, dtype: Any, place: Place | None = None) -> Any:
    """Return this rank's shard of a tensor of random numbers, as a plain tensor. All generators must be in the same
    state.

    Ranks that hold the same shard, or partial values, use the key of the first of these ranks. The broadcast of a key
    sends only four numbers.

    Args:
        kind: argument of `Platform.numbers_by_counter`.
        layout: layout of the tensor.
        dtype: floating-point dtype.
        place: position of the shard in the tensor that numbers are drawn for; None for the tensor of ``layout`` itself.
    """
    mesh, platform = layout.mesh, layout.mesh.platform
    key = platform.counter_key()
    if mesh.get_coordinate() is not None:
        for mesh_dim, placement in enumerate(layout.placements):
            if not placement.is_shard():
                key = broadcast(key, mesh, mesh_dim, 0)
    shape, ranges = place or own_place(layout)
    return platform.numbers_by_counter(kind, key, shape, ranges, dtype)
