"""Filler elements for ranks without elements of a dimension, for kernels that are wrong for empty tensors.

Kernels may reject empty tensors, record no operation for them, or use another path, especially in backward. So a rank
without elements computes with one filler element and drops the results. The cotangents of dropped results are zero. So
are the rank's contributions to gradients of operands that lack the dimension. Backward then has the same steps as on
other ranks.
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
    """Return ``call(func, operands, static_args)`` with filler elements for empty dimensions of this rank.

    ``layouts`` are the layouts of the operands. A dimension in `OpSharding.filled` gets one element if it is empty here
    but not globally.
    """
    missing = {
        label
        for labels, layout in zip(sharding.operands, layouts, strict=True)
        if labels is not None and layout is not None
        for label, size, here in zip(labels, layout.shape, layout.local_shape, strict=True)
        if label in sharding.filled and size and not here
    }
    if not missing:
        return call
    # An infinite derivative, as of a norm without variance, gives NaN for a cotangent of zero.
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
        known = zip(result, sharding.results, strict=False)  # results that the rule does not describe are not tensors
        found = [_without_elements(y, labels, missing, platform) for y, labels in known]
        return type(result)([*found, *result[len(found) :]])

    return filled


def bind_dense(call: Call, layouts: Sequence[Any], platform: Platform) -> Call:
    """Return ``call`` with dense cotangents in backward, for a rank on which a result is empty.

    Kernels that require dense cotangents copy the expanded cotangent of a reduction. They do not copy an empty
    cotangent, which counts as dense with any strides.
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
            # Ones, because zeros have no norm, and a mask of zeros hides all. Indices and classes start at zero.
            make = platform.ones if platform.is_floating_point(x) or x.dtype == (x == x).dtype else platform.zeros
            x = platform.cat([x, make(shape, x)], dim)
    return x


def _without_elements(y: Any, labels: Labels, missing: set, platform: Platform) -> Any:
    for dim, label in enumerate(labels):
        if label in missing:
            y = platform.narrow(y, dim, 0, 0)
    return y
