"""Random numbers on a mesh: all generators are in one state, and each rank draws the numbers of a single device.

A sharded tensor takes its shard of the numbers that are drawn for the full tensor. So initialisation and dropout do not
depend on the number of ranks. This requires equal generator states over the mesh. `synchronize` copies the state of the
first rank, before the first random operation on a mesh.

Later, a program may draw on one rank only, and the states then differ without notice. So all ranks that hold one shard
use the numbers of the first of these ranks (`take_part`). An operation that draws inside its kernel starts from the
generator state of the first rank (`run_alike`).
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from hyper_parallel.core.communication.collectives import all_gather_object, broadcast
from hyper_parallel.core.communication.rank_check import check_values
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.memory_order import ones_like_whole
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, resolve_mesh
from hyper_parallel.core.mesh.slices import MESHES
from hyper_parallel.core.observers import CHECKS
from hyper_parallel.core.rules import counter
from hyper_parallel.core.rules.batch_parts import BATCH_PART, Place, own_place, place_of, refuse_part

_SYNCHRONIZED: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
#: Meshes along which ranks do the same computation on a tensor that is distributed over another mesh. Under data
#: parallelism, a batch is distributed over data-parallel ranks, and tensor-parallel ranks hold the same shard of it.
BESIDE: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("hyper_parallel_meshes_beside", default=())


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None, *, parallel_rng: str = "single_device") -> None:
    """Seed the framework's default generator. Call it with the same seed on every rank of the mesh.

    Distributed random numbers and dropout then equal those of a single device with this seed. With different seeds,
    ranks that hold the same shard still get equal numbers: those of the first of these ranks.

    Args:
        seed: an int that the framework accepts.
        device_mesh: the mesh whose ranks call it; None for the mesh entered with ``with mesh:``.
        parallel_rng: method for drawing tensors on the mesh and on its slices from now on. With ``"single_device"``,
            each rank draws all numbers and keeps its shard. With ``"counter"``, each rank draws only its shard, by a
            counter-based generator. These numbers differ from those of a single device, but depend neither on
            placements nor on the number of ranks. It applies to uniform and normal numbers and to dropout of single
            elements. Other random operations still use ``"single_device"``.

    Raises:
        TypeError: when ``seed`` is not an int; for ``"counter"`` on a platform without such a generator.
        ValueError: for another ``parallel_rng``.

    Example:
        >>> from hyper_parallel import init_device_mesh, manual_seed
        >>> manual_seed(0, init_device_mesh("cpu", (1,)))

    Source: ``torch.distributed.tensor._random.manual_seed``.
    """
    if not isinstance(seed, int):
        raise TypeError(f"manual_seed takes an int, got {seed!r}")
    if parallel_rng not in ("single_device", "counter"):
        raise ValueError(f"manual_seed(parallel_rng=...) is 'single_device' or 'counter', got {parallel_rng!r}")
    mesh = resolve_mesh(device_mesh, "manual_seed")
    counter.request(mesh, parallel_rng == "counter")
    mesh.platform.manual_seed(seed)
    _SYNCHRONIZED.add(mesh)


def synchronize(mesh: DeviceMesh) -> None:
    """Give every rank of the mesh the generator state of its first rank, in the first call on a mesh.

    Inside `check_ranks`, later calls compare the states.
    """
    mesh = _and_beside(mesh)
    if mesh in _SYNCHRONIZED or mesh.get_coordinate() is None:
        if CHECKS:
            check_generators(mesh)
        return
    share_state(mesh)


def share_draws(module: Any, mesh: DeviceMesh) -> None:
    """Let all ranks of a mesh draw the first rank's numbers, in code that a plan leaves plain.

    All ranks of the mesh must call it. Ranks of other meshes keep their generators.

    Args:
        module: model that the ranks share.
        mesh: 1-D mesh.
    """
    if mesh.size() > 1 and mesh.get_coordinate() is not None:
        share_state(mesh)
        modules = (submodule for _, submodule in mesh.platform.named_modules(module))
        mesh.platform.share_draws(modules, lambda value: of_first_rank(value, mesh))


def keep_states(members: Sequence[int] | None = None) -> None:
    """Let ranks keep the current states of their generators, as after loading a checkpoint.

    The ranks of existing meshes then no longer copy the generator state of their first rank.

    Args:
        members: the ranks that call this; None for all ranks of the world. Meshes that contain other ranks are
            unchanged, because those ranks would wait for a state that is never sent.
    """
    for mesh in MESHES.values():
        if members is None or set(mesh.ranks.flat) <= set(members):
            _SYNCHRONIZED.add(mesh)


def share_state(mesh: DeviceMesh) -> None:
    """Give every rank of the mesh the generator state of its first rank."""
    mesh = _and_beside(mesh)
    if mesh.get_coordinate() is not None:
        platform = mesh.platform
        platform.set_rng_state(of_first_rank(platform.get_rng_state(), mesh))
        _SYNCHRONIZED.add(mesh)


def _and_beside(mesh: DeviceMesh) -> DeviceMesh:
    beside = BESIDE.get()
    return (mesh.slices.union(beside) or mesh) if beside and all(mesh.is_beside(other) for other in beside) else mesh


def is_held_alike(layout: Layout) -> bool:
    """Return whether several ranks hold the same shard of a tensor, or hold partial values."""
    return any(size > 1 and not p.is_shard() for size, p in zip(layout.mesh.shape, layout.placements, strict=True))


def take_part(drawn: Any, layout: Layout, shared: bool = True, place: Place | None = None) -> Any:
    """Return this rank's shard of the plain tensor ``drawn`` for the full tensor of ``layout``, as a new tensor.

    Ranks that hold the same shard, or partial values, get the numbers of the first of these ranks. This takes one
    broadcast for each unsharded mesh dimension. With ``shared`` false, ranks are known to have drawn equal numbers, and
    nothing is sent.

    Args:
        drawn: plain tensor of random numbers.
        layout: layout of the tensor.
        shared: whether ranks with the same shard must use the numbers of the first of these ranks.
        place: position of the shard in ``drawn``; None if ``drawn`` is the tensor of ``layout``.
    """
    mesh, platform = layout.mesh, layout.mesh.platform
    shape, ranges = place or own_place(layout)
    for dim, pieces in enumerate(ranges):
        if pieces != ((0, shape[dim]),):
            parts = [platform.narrow(drawn, dim, start, length) for start, length in pieces]
            drawn = platform.cat(parts, dim) if len(parts) > 1 else parts[0]
    drawn = platform.clone(drawn)
    if shared and mesh.get_coordinate() is not None and not platform.is_meta(drawn):
        for mesh_dim, placement in enumerate(layout.placements):
            if not placement.is_shard():
                drawn = broadcast(drawn, mesh, mesh_dim, 0)
    return drawn


def draw(
    fill: Callable[[Any], Any],
    x: Any,
    layout: Layout,
    shared: bool = True,
    by_counter: Callable[[Callable[..., Any]], Any] | None = None,
) -> Any:
    """Return this rank's shard of random numbers for a tensor (see `platform.contract.Core.draw`)."""
    platform, place = layout.mesh.platform, place_of(layout, "a draw")
    if shared:
        synchronize(layout.mesh)
        if by_counter is not None and counter.draws_by_counter(layout.mesh) and not platform.is_meta(x):
            return by_counter(
                lambda kind, dtype=None: counter.numbers(
                    kind, layout, platform.dtype_of(x) if dtype is None else dtype, place
                )
            )
    return take_part(fill(ones_like_whole(x, layout, place.shape)), layout, shared, place)


def run_alike(run: Callable[[], Any], mesh: DeviceMesh, changed: Callable[[], bool], name: str) -> Any:
    """Return the result of ``run()``, a local computation that must be equal on all ranks.

    If ``run`` draws random numbers, ranks whose generator state differs from the first rank's call ``run`` again, from
    that state.

    Args:
        run: function that returns the result.
        mesh: mesh of the ranks.
        changed: function that returns whether ``run`` has written into its operands, so that it cannot run again.
        name: name of the operation, for the error.

    Raises:
        ValueError: on all ranks, when ``run`` draws random numbers and writes into operands.
    """
    platform = mesh.platform
    if not platform.watches_draws or all(size == 1 for size in mesh.shape):
        return run()
    state = platform.get_rng_state()
    before = platform.bytes_of(state)
    result = run()
    if platform.bytes_of(platform.get_rng_state()) == before:
        return result
    if BATCH_PART.get() is not None:
        raise refuse_part(name, "a part of the samples, which draws inside its kernel,")
    if changed():
        raise ValueError(
            f"{name} draws random numbers in place, and ranks would draw different numbers: use the operation that "
            "returns a new tensor"
        )
    first = of_first_rank(state, mesh)
    if platform.bytes_of(first) != before:
        platform.set_rng_state(first)
        result = run()
    _SYNCHRONIZED.add(mesh)
    return result


def of_first_rank(value: Any, mesh: DeviceMesh) -> Any:
    """Send the picklable ``value`` of the mesh's first rank to all ranks of the mesh, and return it."""
    for mesh_dim in range(mesh.ndim):
        if mesh.shape[mesh_dim] > 1:
            value = all_gather_object(value, mesh, mesh_dim)[0]
    return value


def check_generators(mesh: DeviceMesh) -> None:
    """Compare the generator states of a mesh that were synchronised before. Call it only while a check is active.

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
                "a rank has drawn more numbers than the others, or has another seed. Call "
                "hyper_parallel.manual_seed(seed, mesh) on all ranks to make the generators equal",
            )
