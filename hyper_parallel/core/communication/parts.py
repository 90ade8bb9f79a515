"""Exchange of the sizes of local shards, so that all ranks reach the same decision."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.communication.errors import RankMismatchError, explain, names_of
from hyper_parallel.core.communication.rank_check import check_ranks, check_replicated
from hyper_parallel.core.layouts.layout import Layout, get_layout, normalize_placements
from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Shard
from hyper_parallel.core.observers import CHECKS

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

#: Upper limit for the number of dimensions of a tensor in any framework.
_DIMS = 64
Shape = tuple[int, ...]


def numbers_of_ranks(numbers: Sequence[int], mesh: DeviceMesh, what: str) -> np.ndarray:
    """Exchange numbers over the ranks of a mesh. Each mesh dimension of more than one rank takes one small all-gather.

    Like other comparisons of ranks, the exchange is not recorded.

    Args:
        numbers: numbers of this rank. All ranks must pass the same count of numbers.
        mesh: mesh that contains this rank.
        what: name of the exchange, for the error if a rank is lost.

    Returns:
        An int64 array of shape (*mesh shape, count of numbers).
    """
    platform, mine, shape = mesh.platform, np.asarray(numbers, np.int64), (*mesh.shape, len(numbers))
    if platform.sends_nothing:
        return np.broadcast_to(mine, shape)
    with platform.no_dispatch(), platform.no_grad():
        x = platform.to_device(platform.host_tensor(mine))
        for mesh_dim in reversed(range(mesh.ndim)):
            if mesh.shape[mesh_dim] > 1:
                group, ranks = mesh.platform_group(mesh_dim), mesh.ranks_along(mesh_dim)
                try:
                    x = platform.all_gather(x, group, len(ranks))
                except RuntimeError as error:
                    explain(error, "all_gather", what, platform, group, ranks)
                    raise
        return np.frombuffer(platform.bytes_of(x), np.int64).reshape(shape)


def digests_of(facts: Mapping[str, Any]) -> list[int]:
    """Return a number for each fact, to be exchanged: an integer itself, and a checksum of the text of any other
    fact."""
    return [int(fact) if isinstance(fact, int) else zlib.crc32(str(fact).encode()) for fact in facts.values()]


def check_digests(digests: np.ndarray, facts: Mapping[str, Any], mesh: DeviceMesh, what: str, remedy: str) -> None:
    """Compare facts that the ranks of a 1-D mesh have exchanged. This function does not communicate.

    Args:
        digests: array of shape (ranks, facts) with the `digests_of` each rank.
        facts: facts of this rank, by name.
        mesh: mesh of the ranks.
        what: name of the call, for messages.
        remedy: the end of the message.

    Raises:
        RankMismatchError: on all ranks, when they differ in a fact.
    """
    ranks = mesh.ranks_along(0)
    for i, (name, fact) in enumerate(facts.items()):
        odd = tuple(rank for rank, row in zip(ranks, digests, strict=True) if row[i] != digests[0, i])
        if odd:
            raise RankMismatchError(
                f"{what}: {names_of(odd)} and rank {ranks[0]} differ in {name}, here {fact}: {remedy}", odd
            )


def even_global_shape(
    local_shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: DeviceMesh
) -> tuple[int, ...]:
    """Return the global shape, assuming that all shards have one shape. The sizes of a `PackedShard` define the size of
    its dimension."""
    shape = list(local_shape)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] *= mesh.shape[mesh_dim]
    for placement in placements:
        if isinstance(placement, PackedShard) and isinstance(placement.sizes, tuple):
            shape[placement.dim] = sum(placement.sizes)
    return tuple(shape)


def misfit_of(layout: Layout, local_shape: Shape) -> str | None:
    """Return the reason why a shard of ``local_shape`` is wrong on this rank, or None."""
    if layout.mesh.get_coordinate() is None or tuple(layout.local_shape) == local_shape:
        return None
    return (
        f"a tensor of global shape {tuple(layout.shape)} placed {list(layout.placements)} on {layout.mesh} has local "
        f"shape {tuple(layout.local_shape)} on rank {layout.mesh.platform.rank()}, got {local_shape}"
    )


def is_wrong_on_a_rank(layout: Layout, dtype: str, wrong: bool) -> bool:
    """Return whether ``wrong`` is true on any rank, or ranks differ in shape, placements or ``dtype``.

    All ranks get the same answer, by `numbers_of_ranks`.
    """
    digest = zlib.crc32(repr((tuple(layout.shape), layout.placements, dtype)).encode())
    what = "the comparison of parts of one tensor"
    rows = numbers_of_ranks((digest, wrong), layout.mesh, what).reshape(-1, 2)
    return bool(rows[:, 1].any() or (rows[:, 0] != rows[0, 0]).any())


def check_parts(local: Any, layout: Layout, misfit: str | None, what: str) -> None:
    """Compare shards over the ranks of the mesh, and the values of replicated tensors.

    Args:
        local: this rank's shard.
        layout: layout of the global tensor.
        misfit: result of `misfit_of`.
        what: name of the tensor, for messages.

    Raises:
        RankMismatchError: on all ranks, where they differ.
        ValueError: on all ranks, when all have the same misfit.
    """
    here = f" on rank {layout.mesh.platform.rank()}"
    facts = {
        "the global shape, which follows from the local shape unless shape= is passed": str(tuple(layout.shape)),
        "the placements": str(list(layout.placements)),
        "the problem found": (misfit and misfit.replace(here, "")) or "nothing",
        "the dtype": str(local.dtype),
    }
    with check_ranks(layout.mesh):
        CHECKS[-1].agree("DTensor.from_local", facts)
        if misfit is not None:
            raise ValueError(misfit)
        check_replicated(local, layout.mesh, layout.placements, what)


def shapes_of_ranks(shapes: Sequence[Shape | None], mesh: DeviceMesh) -> list[dict[Shape, Shape | None]]:
    """Exchange the shapes of several tensors over the ranks of a mesh, by `numbers_of_ranks`.

    Args:
        shapes: shapes of this rank's tensors; None for a missing tensor. All ranks must pass the same number of shapes.
        mesh: mesh that contains this rank.

    Returns:
        For each tensor, a mapping from coordinates in the mesh to the local shape there.
    """
    numbers = np.full((len(shapes), 1 + _DIMS), -1)
    for row, shape in zip(numbers, shapes, strict=True):
        if shape is not None:
            row[: 1 + len(shape)] = len(shape), *shape
    what = "the exchange of the shapes of parts"
    rows = numbers_of_ranks(numbers.ravel().tolist(), mesh, what).reshape(*mesh.shape, *numbers.shape)
    places = list(np.ndindex(*mesh.shape))
    return [
        {at: None if rows[at][i, 0] < 0 else tuple(rows[at][i, 1 : 1 + rows[at][i, 0]].tolist()) for at in places}
        for i in range(len(shapes))
    ]


def layout_of_parts(
    parts: dict[Shape, Shape | None], placements: Sequence[Placement], mesh: DeviceMesh, what: str
) -> Layout:
    """Return the layout of a tensor from the local shapes of all ranks of a mesh. This function does not communicate.

    Args:
        parts: local shapes by coordinate, as `shapes_of_ranks` returns them.
        placements: placements of the tensor, as users write them.
        mesh: mesh of the tensor.
        what: name of the tensor, for messages.

    Raises:
        RankMismatchError: on all ranks, when a rank has no shard or the shards do not form a tensor.
        ValueError: on all ranks, for placements that do not fit the mesh or the shapes.
    """
    without = [int(mesh.ranks[at]) for at, part in parts.items() if part is None]
    if without:
        raise RankMismatchError(f"{what} is wrong on {names_of(without)}: see the error of that rank", tuple(without))
    known = {at: part for at, part in parts.items() if part is not None}
    first = known[(0,) * mesh.ndim]
    normal = normalize_placements(placements, mesh, len(first), f"{what}, of local shape {first},")
    odd = [at for at, part in known.items() if len(part) != len(first)]
    if not odd:
        shape = list(first)
        for dim in range(len(first)):
            cuts = {mesh_dim for mesh_dim, placement in enumerate(normal) if placement.is_shard(dim)}
            shape[dim] = sum(
                part[dim] for at, part in known.items() if all(i == 0 or d in cuts for d, i in enumerate(at))
            )
        layout = get_layout(mesh, normal, shape)
        odd = [at for at, part in known.items() if layout.shape_at(at) != part]
        if not odd:
            return layout
    ranks = [int(mesh.ranks[at]) for at in odd]
    have = "; ".join(f"rank {int(mesh.ranks[at])}: {part}" for at, part in known.items())
    wanted = "" if len(known[odd[0]]) != len(first) else f", where {names_of(ranks[:1])} has {layout.shape_at(odd[0])}"
    raise RankMismatchError(
        f"{what} is placed {list(normal)} on {mesh}, but the local tensors of the ranks do not form one "
        f"tensor{'' if not wanted else f' of shape {tuple(layout.shape)}{wanted}'} ({have}). Pass shards with the "
        "sizes that distribute_tensor gives, or gather them inside the function and place the result Replicate()",
        tuple(ranks),
    )
