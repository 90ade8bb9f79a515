"""In which order the elements of a distributed tensor would lie in the memory of a single device.

It decides which element gets which random number. What is known of it is the order of the dimensions of the local
tensor, where no rank's part could hide it: a dimension of size 1 has any stride. It gets lost where data moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.chunking import chunk_sizes

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout

__all__ = ["ones_like_whole", "strides_of"]


def strides_of(x: Any, layout: Layout) -> tuple[int, ...] | None:
    """The strides of the whole tensor of ``layout``, of which ``x`` is the local one, on a single device. None where
    they are row-major, or not known."""
    local = layout.mesh.platform.local_strides(x)
    if local is None or len(local) < 2 or len(local) != layout.ndim:
        return None
    dims = [d for d in range(layout.ndim) if layout.shape[d] > 1]
    for dim in dims:
        count = layout.shard_count(dim)
        several = len(layout.shard_mesh_dims(dim)) > 1
        if (several and layout.shape[dim] % count) or min(chunk_sizes(layout.shape[dim], count)) < 2:
            return None
        if local[dim] == 0:
            return None  # expanded
    order = sorted(dims, key=lambda d: -local[d])
    if order == dims:
        return None
    strides, step = [1] * layout.ndim, 1
    for dim in reversed(order):
        strides[dim] = step
        step *= layout.shape[dim]
    return tuple(strides)


def ones_like_whole(x: Any, layout: Layout) -> Any:
    """A plain tensor of ones with the shape of the whole tensor of ``layout``, and its order in memory; ``x`` is the
    local tensor."""
    platform, strides = layout.mesh.platform, strides_of(x, layout)
    if strides is None:
        return platform.ones(layout.shape, x)
    return platform.ones_in_memory(layout.shape, strides, x)
