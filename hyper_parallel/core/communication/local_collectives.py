"""Checks for collectives of the framework that a program calls on DTensors, as in hand-written data parallelism.

Such a collective acts on the local tensor. For example, data-parallel ranks average their gradients shard by shard.
That is right if all participating ranks hold the same shard.

Ranks that differ in a mesh dimension hold different shards or partial values along it. A collective over such ranks is
refused. All ranks refuse it, because all know the layout and the ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.core.caches import Cache
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Partial, Shard

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

_DIMS: dict[tuple, tuple[int, ...]] = Cache(1 << 12, "dimensions of groups")


def dims_within(mesh: DeviceMesh, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the mesh dimensions along which ``ranks`` differ.

    Ranks outside of ``mesh`` are ignored.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> dims_within(init_device_mesh("cpu", (1,)), [0])
        ()
    """
    key = (mesh, tuple(ranks))
    dims = _DIMS.get(key)
    if dims is None:
        places = np.argwhere(np.isin(mesh.ranks, ranks))
        dims = _DIMS[key] = tuple(d for d in range(mesh.ndim) if len(set(places[:, d].tolist())) > 1)
    return dims


def check_local_collective(
    name: str, layout: Layout, ranks: Sequence[int], *, linear: bool = True, apart: bool = False, parts: bool = False
) -> None:
    """Raise ValueError if the collective ``name`` over ``ranks`` would be wrong on the local tensor of a DTensor.

    Args:
        name: name of the collective, for the message.
        layout: layout of the DTensor.
        ranks: global ranks that take part.
        linear: whether the collective moves, adds or averages values. Only these are valid for a partial sum.
        apart: whether the values of the ranks stay separate, in plain tensors. Shards may then differ, but not in size.
        parts: whether each rank gets a different result.

    Raises:
        ValueError: on every rank that takes part.
    """
    mesh = layout.mesh
    within = dims_within(mesh, ranks)
    for mesh_dim, placement in enumerate(layout.placements):
        where = (
            f"{name} over ranks {list(ranks)} of a DTensor of shape {tuple(layout.shape)} placed "
            f"{list(layout.placements)}: along mesh dimension {mesh.dim_label(mesh_dim)} of {mesh}"
        )
        if isinstance(placement, Partial):
            if mesh_dim in within:
                raise ValueError(
                    f"{where} the tensor is a partial sum: reduce it with redistribute(), which returns a replicated "
                    "tensor, or pass to_local()"
                )
            if not linear or placement.reduce_op not in ("sum", "avg"):
                raise ValueError(f"{where} the tensor is a partial value: call redistribute() first")
        elif isinstance(placement, Shard) and mesh_dim in within:
            if not apart:
                raise ValueError(
                    f"{where} these ranks hold different shards, which must not be combined. Use the group of a mesh "
                    "dimension over which the tensor is replicated, such as mesh['dp'].get_group(). Or pass "
                    "full_tensor() for the full tensor, or to_local() for this rank's shard"
                )
            if len(layout.part_sizes(placement.dim)) > 1:
                raise ValueError(
                    f"{where} the shards have different sizes: use full_tensor(), or pad the results of to_local() to "
                    "equal sizes"
                )
        elif parts and mesh_dim in within:
            raise ValueError(
                f"{where} the tensor is replicated over these ranks, and would differ between ranks afterwards: use "
                "all_reduce or broadcast, or pass to_local()"
            )


def check_rows(name: str, whole: Layout, part: Layout, count: int) -> None:
    """Raise ValueError unless ``whole`` is ``count`` tensors of layout ``part``, concatenated along dimension 0.

    This must hold for local and for global tensors.

    Raises:
        ValueError: when placements differ, dimension 0 is sharded, or shapes do not fit.
    """
    fits = whole.mesh is part.mesh and whole.placements == part.placements and part.ndim > 0
    fits = fits and not part.shard_mesh_dims(0) and tuple(whole.shape) == (count * part.shape[0], *part.shape[1:])
    if not fits:
        raise ValueError(
            f"{name} with DTensors of shape {tuple(whole.shape)} placed {list(whole.placements)} and of shape "
            f"{tuple(part.shape)} placed {list(part.placements)}: it acts on the local tensors along "
            "dimension 0, and does not concatenate or split the global tensors. Pass to_local() of both to "
            f"{name}"
        )
