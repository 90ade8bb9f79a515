"""Comparisons of the sizes of plain shards between ranks, and when they are made.

A plain shard does not know its global size, so the shards of all ranks are taken to be equal. Collectives of unequal
ones may end the process where nothing can be raised. A module that takes plain shards therefore compares them in its
first call. A layer may give plain shards of unequal sizes on a mesh, which all ranks know from the layout. From then on
they compare in every call. A compiled graph compares the plain shards that it takes in its first run. Once shards may
be unequal, modules that take plain ones leave compiled code.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.rank_check import check_of
from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Placement, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

#: Attribute of a module: its inputs that were compared.
COMPARED = "_hyper_parallel_compared"


def _hand_out(layout: Layout) -> None:
    """Note that a local tensor of this layout was handed out as a plain one."""
    mesh, placement = layout.mesh, layout.placements[0]
    # Of features, which come last, the weight that takes them knows the number.
    if not isinstance(placement, Shard) or placement.dim == layout.ndim - 1:
        return
    sizes = shard_sizes(placement, layout.shape[placement.dim], mesh.size())
    if min(sizes) != max(sizes):
        mesh._has_uneven_shards = True


#: ``HANDED_OUT[layout]`` is to be read when a local tensor of that layout, on a 1-D mesh, is handed out.
HANDED_OUT = Table(_hand_out, 1 << 14, "layouts handed out")


def compare_shapes(x: Any, mesh: DeviceMesh, placement: Placement, what: str, taker: Any) -> None:
    """Raise RankMismatchError, on all ranks, where a plain shard differs in shape from those of the other ranks.

    Args:
        x: the plain tensor.
        mesh, placement: its placement.
        what: names it in messages.
        taker: the module that takes it.
    """
    mesh.require_member(what)
    compared = taker.__dict__.get(COMPARED, ())
    if mesh.size() > 1 and (what not in compared or mesh._has_uneven_shards):
        agree_on_shape(tuple(x.shape), mesh, placement, what)
    if what not in compared:
        object.__setattr__(taker, COMPARED, (*compared, what))


def agree_on_shape(shape: tuple[int, ...], mesh: DeviceMesh, placement: Placement, what: str) -> None:
    """Raise RankMismatchError, on all ranks, where a plain shard has another shape on another rank: see
    `compare_shapes`."""
    check_of(mesh).agree(
        "a call",
        row=mesh.ranks_along(0),
        row_facts={f"the shape of {what}": str(shape)},
        remedy=f"it is plain and taken for {placement!r}, equal in size on all {mesh.size()} ranks of {mesh}. For "
        "a size that does not divide, pass DTensors between modules (use_local_output=False in the module before, "
        f"or DTensor.from_local(x, mesh, [{placement!r}], shape=...)), or pad",
    )
