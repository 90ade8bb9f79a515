"""Comparisons of the sizes of plain shards between ranks.

A plain shard has no global size, so styles assume that the shards of all ranks have one size. Collectives with
different sizes may kill the process without an exception. So the first call of a module with plain shards compares
their sizes. If a layer returns plain shards of different sizes on a mesh, all ranks know this from the layout. From
then on, every call on this mesh compares the sizes. A compiled graph compares its plain shards in its first run. Once
shards may have different sizes, modules with plain shards leave compiled code.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.rank_check import check_of
from hyper_parallel.core.layouts.chunking import shard_sizes
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Placement, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

#: Attribute of a module: names of the inputs that were compared.
COMPARED = "_hyper_parallel_compared"


def _hand_out(layout: Layout) -> None:
    """If ranks have shards of different sizes under ``layout``, record on the mesh that plain shards may be uneven."""
    mesh, placement = layout.mesh, layout.placements[0]
    # The next layer's weight has the global number of features, the last dimension, so their shards need no comparison.
    if not isinstance(placement, Shard) or placement.dim == layout.ndim - 1:
        return
    sizes = shard_sizes(placement, layout.shape[placement.dim], mesh.size())
    if min(sizes) != max(sizes):
        mesh._has_uneven_shards = True


#: Read ``HANDED_OUT[layout]`` when a local tensor of a layout on a 1-D mesh is returned as a plain tensor.
HANDED_OUT = Table(_hand_out, 1 << 14, "layouts handed out")


def compare_shapes(x: Any, mesh: DeviceMesh, placement: Placement, what: str, taker: Any) -> None:
    """Raise RankMismatchError, on all ranks, if plain shards differ in shape between ranks.

    Ranks compare in the first call of ``taker``, and in every call once shards on ``mesh`` may have different sizes.

    Args:
        x: plain shard.
        mesh: 1-D mesh.
        placement: placement of the shard.
        what: name of the tensor in messages.
        taker: the module that is called with ``x``.
    """
    mesh.require_member(what)
    compared = taker.__dict__.get(COMPARED, ())
    if mesh.size() > 1 and (what not in compared or mesh._has_uneven_shards):
        agree_on_shape(tuple(x.shape), mesh, placement, what)
    if what not in compared:
        object.__setattr__(taker, COMPARED, (*compared, what))


def agree_on_shape(shape: tuple[int, ...], mesh: DeviceMesh, placement: Placement, what: str) -> None:
    """Compare the shape of a plain shard between ranks. Raise RankMismatchError, on all ranks, if shapes differ."""
    check_of(mesh).agree(
        "a call",
        row=mesh.ranks_along(0),
        row_facts={f"the shape of {what}": str(shape)},
        remedy=f"the input is plain and assumed to be {placement!r}, of equal size on all {mesh.size()} ranks of "
        f"{mesh}. For uneven shards, pass DTensors between modules, with use_local_output=False for the module "
        f"before or DTensor.from_local(x, mesh, [{placement!r}], shape=...). Or pad the dimension",
    )
