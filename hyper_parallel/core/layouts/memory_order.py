"""The strides that a distributed tensor would have on a single device.

Strides decide whether an operation gives a view or a copy, and which element gets which random number. Local strides
determine the single device's strides if every rank has two or more elements of each dimension. Otherwise the tensor
tracks its strides (see `aliasing`).

Redistribution gives contiguous tensors. `bind_order` restores the strides before an operation reads a redistributed
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.strides import (
    Strides,
    contiguous_strides,
    dense_strides,
    is_contiguous,
    spaced_strides,
)

#: Value of `DTensor._strides` for a tensor whose order in memory is unknown.
UNKNOWN: Any = "unknown"


def strides_of(x: Any, layout: Layout) -> Strides | Any:
    """Return the strides that the tensor of ``layout`` with local tensor ``x`` would have on a single device.

    The result is `UNKNOWN` if they cannot be known. Call it with interception off.
    """
    tracked = getattr(x, "_strides", None)
    if tracked is not None:
        return tracked
    if not layout.tells_strides:
        return contiguous_strides(layout.shape)
    return whole_strides(layout, layout.mesh.platform.strides(x))


def whole_strides(layout: Layout, local: Strides) -> Strides:
    """Return the single-device strides of a tensor of ``layout`` from the strides ``local`` of this rank's shard.

    ``local`` must be meaningful (see `Layout.tells_strides`).
    """
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


def bind_noted_strides(layout: Layout) -> Callable[[Any], Strides | Any]:
    """Return a function ``noted(x)`` for tensors of ``layout``, plain or distributed. It returns `strides_of`, or None
    if ``x`` is contiguous."""
    if not layout.tells_strides:
        return lambda x: getattr(x, "_strides", None)

    def noted(x: Any) -> Strides | Any:
        strides = strides_of(x, layout)
        return None if strides is not UNKNOWN and is_contiguous(layout.shape, strides) else strides

    return noted


def bind_order(have: Layout, read: Layout, spaced: bool) -> Callable[[Any, Any], Any] | None:
    """Return a function that restores the memory order of a redistributed tensor; None if the order never changes.

    ``order(x, y)`` takes the local tensor ``x`` of layout ``have``, and the redistributed ``y`` of layout ``read``. It
    returns ``y`` in the memory order of ``x``. Results of an operation on ``y`` then have that order too. With
    ``spaced``, gaps and expanded dimensions of ``x`` are also reproduced, which operations that return views need.
    """
    platform, shape, part = have.mesh.platform, have.shape, tuple(read.local_shape)
    if 0 in part or not (spaced or (platform.keeps_memory_order and len(shape) > 1)):
        return None

    def order(x: Any, y: Any) -> Any:
        strides = strides_of(x, have)
        if strides is UNKNOWN:
            return y
        if not spaced:
            strides = dense_strides(shape, strides)
        if is_contiguous(shape, strides):
            return y
        return platform.with_strides(y, spaced_strides(shape, strides, part))

    return order


def ones_like_whole(x: Any, layout: Layout, shape: Sequence[int] | None = None) -> Any:
    """Return a plain tensor of ones with the global shape of ``layout`` and the memory order of the distributed tensor.

    Args:
        x: the local tensor.
        layout: layout of the tensor.
        shape: another shape with the same number of dimensions.
    """
    platform, strides = layout.mesh.platform, strides_of(x, layout)
    shape = layout.shape if shape is None else tuple(shape)
    ones = platform.ones(shape, x)
    if not platform.keeps_memory_order or strides is UNKNOWN or is_contiguous(layout.shape, strides):
        return ones
    return platform.with_strides(ones, dense_strides(shape, strides))


def is_contiguous_whole(x: Any) -> bool:
    """Return whether the DTensor ``x`` would be contiguous on a single device; False if its strides are unknown."""
    layout: Layout = x._layout
    with layout.mesh.platform.no_dispatch():
        strides = strides_of(x, layout)
    return strides is not UNKNOWN and is_contiguous(layout.shape, strides)
