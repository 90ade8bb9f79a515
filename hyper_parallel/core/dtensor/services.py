"""Services of core for a backend's DTensor class. `platform.contract.Core` defines them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.core import modes
from hyper_parallel.core.communication import local_collectives, norms, read_past, transitions
from hyper_parallel.core.communication.coalesce import open_block
from hyper_parallel.core.communication.errors import tell_of_failure
from hyper_parallel.core.dtensor import cotangents
from hyper_parallel.core.layouts import memory_order, nesting
from hyper_parallel.core.layouts.layout import Layout, get_layout, replicated_layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Replicate, Shard, StridedShard, described
from hyper_parallel.core.layouts.rectangles import Rectangle, held_rectangles
from hyper_parallel.core.layouts.strides import contiguous_strides
from hyper_parallel.core.mesh.mesh_class import DeviceMesh, rebuild
from hyper_parallel.core.operations import views
from hyper_parallel.core.operations.dispatch import dispatch
from hyper_parallel.core.operations.owners import owner_of
from hyper_parallel.core.rules import class_losses, class_shards, logit_shards, random
from hyper_parallel.platform.registry import get_platform_for_device


class Services:
    """Implementation of `platform.contract.Core`.

    Args:
        restore, from_local: functions of `tensor`, which imports this module.
    """

    dispatch = dispatch
    implicit_replication = staticmethod(modes.implicit_replication)
    before_write, after_write = staticmethod(views.before_write), staticmethod(views.after_write)
    before_writes, notice_writes = staticmethod(views.before_writes), staticmethod(views.notice_writes)
    moved_views = views.MOVED
    outdate_views, share_memory = staticmethod(views.outdate_views), staticmethod(views.share)
    is_contiguous = staticmethod(memory_order.is_contiguous_whole)
    open_block = staticmethod(open_block)
    for_user, as_cotangent = staticmethod(cotangents.for_user), staticmethod(cotangents.as_cotangent)
    through_hook = staticmethod(cotangents.through_hook)
    keep_gradient, forget_history = staticmethod(read_past.keep_gradient), staticmethod(read_past.forget_history)
    to_owner, to_summands = staticmethod(transitions.to_owner), staticmethod(transitions.to_summands)
    total_norm = staticmethod(norms.total_norm)
    norms_over_ranks = staticmethod(norms.norms_over_ranks)
    largest_over_ranks = staticmethod(norms.largest_over_ranks)
    on_joined_meshes = staticmethod(nesting.on_joined_meshes)
    draw, take_part = staticmethod(random.draw), staticmethod(random.take_part)
    of_first_rank = staticmethod(random.of_first_rank)
    refuse_part_of_classes = staticmethod(logit_shards.refuse_part_of_classes)
    mesh_with_id = staticmethod(class_shards.mesh_with_id)
    watch_losses_of_shards = staticmethod(class_shards.watch_losses_of_shards)
    class_shards = staticmethod(class_shards.class_shards)
    class_losses = class_losses.ClassLosses
    is_loss_parallel = staticmethod(modes.is_loss_parallel)
    check_local_collective = staticmethod(local_collectives.check_local_collective)
    check_rows = staticmethod(local_collectives.check_rows)

    def __init__(self, restore: Callable[..., Any], from_local: Callable[[Any, Layout], Any]) -> None:
        self.restore, self.from_local = restore, from_local
        self.unpickling = (
            restore,
            get_layout,
            rebuild,
            Replicate,
            Shard,
            PackedShard,
            StridedShard,
            Partial,
        )

    def owner_of(self, x: Any) -> str | None:
        """Return the name of a distributed parameter or buffer of a known model, or None."""
        return owner_of(x, x._layout.mesh.platform)

    def layout_of_native(
        self, native: Any, device_type: str, placements: Sequence[tuple[Any, ...]], shape: Sequence[int]
    ) -> Layout:
        """Return the layout of a tensor of global ``shape`` on a mesh of the framework."""
        mesh = DeviceMesh._of_native(get_platform_for_device(device_type), native)
        return get_layout(mesh, tuple(described(*each) for each in placements), shape)

    def held_rectangles(self, layout: Layout) -> tuple[Rectangle, ...]:
        """Return the boxes of a tensor of ``layout`` that this rank holds."""
        coordinate = layout.mesh.get_coordinate()
        return () if coordinate is None else held_rectangles(layout, coordinate)

    def layout_of_cut(self, mesh: DeviceMesh, cut: int | None, shape: Sequence[int]) -> Layout:
        """Return the layout of a tensor on a 1-D mesh, sharded along dimension ``cut``, or replicated if that is
        None."""
        return get_layout(mesh, (Replicate() if cut is None else Shard(cut % len(shape)),), tuple(shape))

    def cut_of_layout(self, layout: Layout) -> tuple[DeviceMesh | None, int | None]:
        """Return the mesh and the dimension of an evenly sharded 1-D layout, or (None, None). Inverse of
        `layout_of_cut`."""
        placement = layout.placements[0]
        if layout.mesh.ndim == 1 and placement is Replicate():
            return layout.mesh, None
        if layout.mesh.ndim == 1 and type(placement) is Shard and not layout.shape[placement.dim] % layout.mesh.size():
            return layout.mesh, placement.dim
        return None, None

    def strides_of_whole(self, x: Any) -> tuple[int, ...]:
        """Return the strides that the DTensor ``x`` would have on a single device, or contiguous strides if they are
        unknown."""
        layout: Layout = x._layout
        with layout.mesh.platform.no_dispatch():
            strides = memory_order.strides_of(x, layout)
        return contiguous_strides(layout.shape) if strides is memory_order.UNKNOWN else tuple(strides)

    def failed_in_backward(self, error: Exception, meshes: Iterable[DeviceMesh]) -> None:
        """Report an error of a backward pass to the other ranks of ``meshes``."""
        roots = {mesh.get_root_mesh() for mesh in meshes}
        tell_of_failure(error, "backward", max(roots, key=lambda mesh: (mesh.size(), mesh.shape)))

    def replicated(self, local: Any, mesh: DeviceMesh) -> Any:
        """Return a DTensor of a new plain tensor that is equal on every rank of ``mesh``."""
        platform = mesh.platform
        return platform.wrap(local, replicated_layout(mesh, platform.shape_of(local)))
