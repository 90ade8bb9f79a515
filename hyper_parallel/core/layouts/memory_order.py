"""The order that the elements of a distributed tensor would have in the memory of a single device.

It decides whether an operation gives a view or a copy, and which element gets which random number. Local strides tell
where every rank has two rows or more of each dimension. Elsewhere the order is tracked on the tensor (see `aliasing`).
Redistribution gives contiguous tensors. A tensor that an operation reads after data moved is brought into order again
(`bind_order`).
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

#: `DTensor._strides` of a tensor whose elements may lie in any order.
UNKNOWN: Any = "unknown"


def strides_of(x: Any, layout: Layout) -> Strides | Any:
    """Strides that the tensor of ``layout`` would have on a single device; ``x`` is its local tensor. `UNKNOWN` where
    they are not known. Call it with interception off."""
    tracked = getattr(x, "_strides", None)
    if tracked is not None:
        return tracked
    if not layout.tells_strides:
        return contiguous_strides(layout.shape)
    return whole_strides(layout, layout.mesh.platform.strides(x))


def whole_strides(layout: Layout, local: Strides) -> Strides:
    """Strides of a tensor of ``layout`` on a single device, from those of a part that tells them."""
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
    """``noted(x)``, for tensors of ``layout``, plain ones among them: `strides_of`, None where ``x`` is contiguous."""
    if not layout.tells_strides:
        return lambda x: getattr(x, "_strides", None)

    def noted(x: Any) -> Strides | Any:
        strides = strides_of(x, layout)
        return None if strides is not UNKNOWN and is_contiguous(layout.shape, strides) else strides

    return noted


def bind_order(have: Layout, read: Layout, spaced: bool) -> Callable[[Any, Any], Any] | None:
    """Give ``order(x, y)`` for an operation that is to run on ``y``. This is the local tensor of layout ``read`` that
    redistribution made of ``x``. ``order`` brings ``y`` into the memory order of a single device's tensor, so that the
    operation's results have it too. With ``spaced``, gaps count, and where dimensions were stretched: for views. None
    where there is nothing to be done."""
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
    """A plain tensor of ones with the shape of the whole tensor of ``layout``, and its order in memory.

    Args:
        x: the local tensor.
        layout: of the tensor.
        shape: another shape of as many dimensions.
    """
    platform, strides = layout.mesh.platform, strides_of(x, layout)
    shape = layout.shape if shape is None else tuple(shape)
    ones = platform.ones(shape, x)
    if not platform.keeps_memory_order or strides is UNKNOWN or is_contiguous(layout.shape, strides):
        return ones
    return platform.with_strides(ones, dense_strides(shape, strides))


def is_contiguous_whole(x: Any) -> bool:
    """Return whether the DTensor ``x`` would be contiguous on a single device; False where that is not known."""
    layout: Layout = x._layout
    with layout.mesh.platform.no_dispatch():
        strides = strides_of(x, layout)
    return strides is not UNKNOWN and is_contiguous(layout.shape, strides)
