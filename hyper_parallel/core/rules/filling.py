"""Local operations on ranks that have no element of a dimension, for kernels that are not right without any.

Kernels refuse empty tensors, record nothing for them or take another path, in backward above all. So the rank adds one
element and drops its results. The cotangents of that are zeros, and so are its parts of the gradients of operands that
lack the dimension: backward has the same steps as on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.communication.transitions import ConvertCotangent
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.rules.op_sharding import Label, OpSharding
from hyper_parallel.platform import Platform

Labels = Sequence[Label | None]
Call = Callable[[Any, tuple, Any], Any]


def bind_filled(call: Call, sharding: OpSharding, layouts: Sequence[Layout | None], platform: Platform) -> Call:
    """``call(func, operands, static_args)`` of local operands with the ``layouts``, as this rank runs it. Each
    dimension of `OpSharding.filled` of which this rank has no element, but other ranks have, gets one."""
    missing = {
        label
        for labels, layout in zip(sharding.operands, layouts, strict=True)
        if labels is not None and layout is not None
        for label, size, here in zip(labels, layout.shape, layout.local_shape, strict=True)
        if label in sharding.filled and size and not here
    }
    if not missing:
        return call
    # Where a derivative is infinite, as of a norm without variance, it gives NaN with the cotangent zero.
    counts_nothing = ConvertCotangent(platform, lambda g: platform.masked_fill(g, g != g, 0))

    def filled(func: Any, operands: tuple, static_args: Any) -> Any:
        given = tuple(
            x
            if labels is None
            else _with_elements(x, labels, missing, platform)
            if missing.intersection(labels)
            else counts_nothing(x)
            if platform.is_floating_point(x)
            else x
            for x, labels in zip(operands, sharding.operands, strict=True)
        )
        result = call(func, given, static_args)
        if not isinstance(result, (tuple, list)):
            return _without_elements(result, sharding.results[0], missing, platform)
        known = zip(result, sharding.results, strict=False)  # a result that a rule does not know is no tensor
        found = [_without_elements(y, labels, missing, platform) for y, labels in known]
        return type(result)([*found, *result[len(found) :]])

    return filled


def bind_dense(call: Call, layouts: Sequence[Any], platform: Platform) -> Call:
    """``call`` as it runs on a rank that has no elements of its results, whose layouts are ``layouts``.

    Its backward gets dense cotangents there. A cotangent that a reduction has stretched is made dense by kernels that
    need it so. A cotangent without elements is not: it counts as dense whatever its strides are.
    """
    if not any(isinstance(layout, Layout) and 0 in layout.local_shape for layout in layouts):
        return call
    densify = ConvertCotangent(platform, platform.clone)

    def dense(y: Any) -> Any:
        return densify(y) if platform.is_tensor(y) and platform.is_floating_point(y) else y

    def run(func: Any, operands: tuple, static_args: Any) -> Any:
        result = call(func, operands, static_args)
        return type(result)(map(dense, result)) if type(result) in (tuple, list) else dense(result)

    return run


def _with_elements(x: Any, labels: Labels, missing: set, platform: Platform) -> Any:
    for dim, label in enumerate(labels):
        if label in missing:
            shape = [*platform.shape_of(x)]
            shape[dim] = 1
            # Ones: zeros have no norm, and a mask of them lets nothing through. Places and classes begin at zero.
            make = platform.ones if platform.is_floating_point(x) or x.dtype == (x == x).dtype else platform.zeros
            x = platform.cat([x, make(shape, x)], dim)
    return x


def _without_elements(y: Any, labels: Labels, missing: set, platform: Platform) -> Any:
    for dim, label in enumerate(labels):
        if label in missing:
            y = platform.narrow(y, dim, 0, 0)
    return y
