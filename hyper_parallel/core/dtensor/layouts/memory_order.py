"""In which order the elements of a distributed tensor would lie in the memory of a single device.

It decides whether an operation gives a view or a copy, and which element gets which random number. Where every rank has
two rows or more of each dimension, local strides tell; elsewhere they are tracked on the tensor (see `aliasing`). The
order gets lost where data moves: what that gives is contiguous.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.layouts.layout import Layout
from hyper_parallel.core.dtensor.layouts.strides import Strides, contiguous_strides, dense_strides, is_contiguous

#: `DTensor._strides` of a tensor whose elements may lie in any order.
UNKNOWN: Any = "unknown"


def strides_of(x: Any, layout: Layout) -> Strides | Any:
    """Strides that the tensor of ``layout`` would have on a single device; ``x`` is its local tensor. `UNKNOWN` where
    they are not known. To be called with interception off."""
    tracked = getattr(x, "_strides", None)
    if tracked is not None:
        return tracked
    if not layout.tells_strides:
        return contiguous_strides(layout.shape)
    local = layout.mesh.platform.strides(x)
    sharded = [
        (local[dim], layout.shape[dim], layout.local_shape[dim])
        for dim in range(layout.ndim)
        if layout.shape[dim] != layout.local_shape[dim]
    ]
    strides = []
    for own in local:
        stride = own
        for step, whole, part in sharded:
            if step < own:
                stride = stride * whole // part
        strides.append(stride)
    return tuple(strides)


def ones_like_whole(x: Any, layout: Layout) -> Any:
    """A plain tensor of ones with the shape of the whole tensor of ``layout``, and its order in memory; ``x`` is the
    local tensor."""
    platform, strides = layout.mesh.platform, strides_of(x, layout)
    if strides is UNKNOWN or is_contiguous(layout.shape, strides) or 0 in strides:
        return platform.ones(layout.shape, x)
    return platform.ones_in_memory(layout.shape, dense_strides(layout.shape, strides), x)


def is_contiguous_whole(x: Any) -> bool:
    """Whether the tensor of the DTensor ``x`` would be contiguous on a single device; False where that is not known."""
    layout: Layout = x._layout
    with layout.mesh.platform.no_dispatch():
        strides = strides_of(x, layout)
    return strides is not UNKNOWN and is_contiguous(layout.shape, strides)
