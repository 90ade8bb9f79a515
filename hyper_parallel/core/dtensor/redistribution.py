"""Variants of `DTensor.redistribute`: in another dtype, asynchronous, or to another mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.caches import Table
from hyper_parallel.core.communication.asynchronous import can_start, start_redistribution
from hyper_parallel.core.communication.redistribute import redistribution_steps
from hyper_parallel.core.communication.transitions import Move, ReduceExtreme, ReduceProduct, Step
from hyper_parallel.core.layouts.layout import Layout, replicated_layout, requested_layout
from hyper_parallel.core.layouts.placement_types import Placement
from hyper_parallel.core.layouts.rectangles import held_rectangles
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform import Platform


def redistribute_as(x: Any, target: Layout, async_op: bool, forward_dtype: Any, backward_dtype: Any) -> Any:
    """Return the DTensor ``x`` redistributed to ``target`` on its mesh. `DTensor.redistribute` explains the other
    arguments."""
    platform = target.mesh.platform
    if forward_dtype is None and backward_dtype is None:
        if not can_start(x._layout, target):
            return x.redistribute(placements=target.placements)
        with platform.no_dispatch():
            return start_redistribution(x, target)
    with platform.no_dispatch():
        steps = () if target is x._layout else redistribution_steps(x._layout, target)
        forward_dtype = x.dtype if forward_dtype is None else forward_dtype
        if any(isinstance(step, (ReduceExtreme, ReduceProduct)) for step in steps):
            # Backward of these steps depends on the values, and does not communicate.
            y = _InDtypes(platform, (), forward_dtype, None)(x)
            for step in steps:
                y = step(y)
        else:
            y = _InDtypes(platform, steps, forward_dtype, backward_dtype)(x)
        return platform.wrap(y, target)


class _InDtypes(Step):
    """Steps in one dtype in forward and in another dtype in backward. The result has the forward dtype."""

    def __init__(self, platform: Platform, steps: Sequence[Move], forward_dtype: Any, backward_dtype: Any) -> None:
        super().__init__(platform)
        self._steps, self._forward_dtype, self._backward_dtype = steps, forward_dtype, backward_dtype

    def forward(self, ctx: Any, x: Any) -> Any:
        ctx.dtype = x.dtype
        y = self.platform.to_dtype(x, self._forward_dtype)
        for step in self._steps:
            y = step(y)
        return self.platform.clone(y) if self.platform.same_memory(x, y) else y

    def backward(self, ctx: Any, g: Any) -> Any:
        to_dtype = self.platform.to_dtype
        g = to_dtype(g, ctx.dtype if self._backward_dtype is None else self._backward_dtype)
        for step in reversed(self._steps):
            g = step.backward(None, g)
        return to_dtype(g, ctx.dtype)


def redistribute_over(x: Any, mesh: DeviceMesh, placements: Sequence[Placement] | None) -> Any:
    """Return the DTensor ``x`` on another mesh of the same ranks. It is differentiable.

    If each rank holds the same shard on both meshes, nothing is communicated. Otherwise the tensor is gathered first.

    Raises:
        ValueError: when the meshes have different ranks, and for a `Partial`.
    """
    layout: Layout = x._layout
    if mesh.platform is not layout.mesh.platform or sorted(mesh.ranks.ravel()) != sorted(layout.mesh.ranks.ravel()):
        raise ValueError(
            f"cannot redistribute from {layout.mesh} to {mesh}, which has different ranks: gather the tensor with "
            "full_tensor(), and send it with distribute_tensor() from a rank in both meshes"
        )
    target = requested_layout(mesh, placements, layout.shape, f"a tensor of shape {tuple(layout.shape)}")
    if any(p.is_partial() for p in target.placements):
        raise ValueError(
            f"cannot redistribute to {list(target.placements)} on another mesh, {mesh}: redistribute() cannot make "
            "partial tensors. Make them with operations or DTensor.from_local"
        )
    reduced = x.redistribute(placements=layout.cotangent.placements)
    cls: Any = type(x)._of_part
    if _AGREE[layout.cotangent, target]:
        return cls(reduced.to_local(), target)
    whole = cls(reduced.full_tensor(), replicated_layout(mesh, layout.shape))
    return whole.redistribute(placements=target.placements)


def _agree(key: tuple[Layout, Layout]) -> bool:
    """Return whether every rank holds the same shard under both layouts."""
    places = [{int(rank): place for place, rank in np.ndenumerate(layout.mesh.ranks)} for layout in key]
    return all(
        held_rectangles(key[0], place) == held_rectangles(key[1], places[1][rank]) for rank, place in places[0].items()
    )


_AGREE: Table = Table(_agree, 1 << 12, "layouts on two meshes")


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard of a tensor, and its offset in the global tensor.

    Args:
        global_shape: global shape of the tensor.
        mesh: the mesh.
        placements: one placement for each mesh dimension.
        skip_offset: whether to omit the offset.

    Returns:
        Shape and offset of the local tensor. An empty shard starts at the end of the dimension in which it is empty.
        The offset is ``()`` on a rank outside the mesh, and with ``skip_offset``.

    Raises:
        ValueError: for wrong placements, and for a `PackedShard`, whose shards consist of several ranges.

    Example:
        >>> from hyper_parallel import Shard, compute_local_shape_and_global_offset, init_device_mesh
        >>> compute_local_shape_and_global_offset((5, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
        ((5, 3), (0, 0))

    Source: the function of this name in ``torch.distributed.tensor``'s utilities.
    """
    layout = requested_layout(mesh, placements, global_shape, f"a tensor of shape {tuple(global_shape)}")
    if mesh.get_coordinate() is None or skip_offset:
        return tuple(layout.local_shape), ()
    if layout.packed_mesh_dim is not None:
        raise ValueError(
            f"a tensor placed {list(layout.placements)} has several shards on each rank, so no single offset exists: "
            "use DTensor.from_local and to_local instead"
        )
    sizes = zip(layout.local_offset, layout.local_shape, layout.shape, strict=True)
    return tuple(layout.local_shape), tuple(offset if n else whole for offset, n, whole in sizes)
