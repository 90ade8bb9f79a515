"""Random numbers on a mesh: every rank's generator is in the same state, and each draws what a single device draws.

A sharded tensor takes its part of the numbers drawn for the whole tensor, so that initialisation and dropout do not
depend on the number of ranks. This needs equal generator states over the mesh: `synchronize` sees to that once per
mesh, before its first random operation, by giving every rank the state of the first one.
"""

from __future__ import annotations

import pickle
import weakref
from typing import Any

from hyper_parallel.core.dtensor.agreement import CHECKS, check_values
from hyper_parallel.core.dtensor.collectives import all_gather_object
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, resolve_mesh

__all__ = ["check_generators", "manual_seed", "of_first_rank", "synchronize"]

_SYNCHRONIZED: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None) -> None:
    """Seed the framework's generator on this rank; to be called with the same seed on every rank of the mesh.

    Raises:
        TypeError: when ``seed`` is not an int.

    Example:
        >>> from hyper_parallel import init_device_mesh, manual_seed
        >>> manual_seed(0, init_device_mesh("cpu", (1,)))

    Source: ``torch.distributed.tensor._random.manual_seed``.
    """
    if not isinstance(seed, int):
        raise TypeError(f"manual_seed takes an int, got {seed!r}")
    mesh = resolve_mesh(device_mesh, "manual_seed")
    mesh.platform.manual_seed(seed)
    _SYNCHRONIZED.add(mesh)


def synchronize(mesh: DeviceMesh) -> None:
    """Give every rank of the mesh the generator state of its first rank; only the first call on a mesh does so. Inside
    `check_ranks` the others compare the states."""
    if mesh in _SYNCHRONIZED or mesh.get_coordinate() is None:
        if CHECKS:
            check_generators(mesh)
        return
    platform = mesh.platform
    platform.set_rng_state(of_first_rank(platform.get_rng_state(), mesh))
    _SYNCHRONIZED.add(mesh)


def of_first_rank(value: Any, mesh: DeviceMesh) -> Any:
    """The picklable ``value`` that the first rank of the mesh gives, on all of its ranks."""
    for mesh_dim in range(mesh.ndim):
        if mesh.shape[mesh_dim] > 1:
            value = all_gather_object(value, mesh, mesh_dim)[0]
    return value


def check_generators(mesh: DeviceMesh) -> None:
    """Compare the states of the generators of a mesh whose states were made the same; to be called when a check is on.

    Raises:
        RankMismatchError: on all ranks, when they differ.
    """
    if mesh not in _SYNCHRONIZED or mesh.get_coordinate() is None:
        return
    platform = mesh.platform
    state = platform.get_rng_state()
    data = platform.bytes_of(state) if platform.is_tensor(state) else pickle.dumps(state)
    for mesh_dim in range(mesh.ndim):
        if mesh.shape[mesh_dim] > 1:
            check_values(
                {"the state of the random number generator": data},
                mesh,
                mesh_dim,
                "a rank has drawn more numbers than the others, or was seeded otherwise; hyper_parallel.manual_seed("
                "seed, mesh) on all ranks makes them equal again",
            )
