"""Results that are views on a single device (`CanonicalOp.memory`). Plans make them behave like views here.

There are three cases. If the local operation also returns a view, the framework does the work. If data had to move, the
result is a copy, and `views.follow` registers it as a view of the base. In the third case, some rank has at most one
element of a dimension. Local and global strides may then differ, and tracked strides decide whether a copy is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.memory_order import UNKNOWN, bind_noted_strides, whole_strides
from hyper_parallel.core.layouts.strides import (
    contiguous_strides,
    dense_strides,
    indexed_strides,
    is_contiguous,
)
from hyper_parallel.core.operations.views import follow, part, share
from hyper_parallel.core.rules import CanonicalOp
from hyper_parallel.platform.indexing import decode_index

if TYPE_CHECKING:
    from hyper_parallel.core.operations.strategy import Strategy

#: Takes the place of the strides of a view if the result is a copy.
_COPY: Any = "copy"

#: A function ``after(operands, result)`` that returns the result, or tensors in place of it.
After = Callable[[tuple, Any], Any]


class Aliasing:
    """Steps of a recipe before and after its local operation, for results that share memory.

    Attributes:
        copies: ``copies(operand 0)`` returns whether the local operation must run on a copy of the operand; None for
            never.
        after: function ``after(operands, result)`` on DTensors, called with interception off. It returns the result,
            or tensors in place of it. None for no action.
        is_view: whether the result shares the memory of operand 0, or may share it.
    """

    __slots__ = ("after", "copies", "is_view")

    def __init__(self, copies: Callable[[Any], bool] | None, after: After | None, is_view: bool = False) -> None:
        self.copies, self.after, self.is_view = copies, after, is_view


def aliasing_of(
    op: CanonicalOp, layouts: tuple, static_args: Any, strategy: Strategy, name: str, made: bool = False
) -> Aliasing | None:
    """Return the aliasing steps for recipes of ``op``, or None if no step is needed. ``op`` must not write in place.

    Args:
        op: the operation.
        layouts: layouts of the operands, None for an operand that is not a tensor.
        static_args: the static arguments.
        strategy: strategy of the recipe.
        name: name of the native operation, for messages.
        made: whether a replacement of the native operation makes the results. They then share no memory.
    """
    if not layouts or layouts[0] is None:
        return None
    shape, result_shapes = tuple(layouts[0].shape), [tuple(x.shape) for x in strategy.results]
    index = op.view_index and op.view_index(static_args, shape, result_shapes)
    tell = [x.tells_strides for x in strategy.results]
    view = _View(op, static_args, shape, result_shapes, tell, index) if index or op.view_strides else None
    if view is not None and (made or is_moved(layouts[0], strategy.operands[0])):
        return Aliasing(None, _following(view, layouts[0], name))
    if all(x.tells_strides for x in (*layouts, *strategy.results) if x is not None):
        return None if view is None else _TELLING.get(op.memory)
    return _carrying(op, layouts, strategy) if view is None else _tracking(view, layouts[0])


@dataclass(frozen=True)
class _View:
    """A call whose results share the memory of operand 0 on a single device, or may share it.

    Attributes:
        op: the operation.
        static_args: static arguments of the call.
        shape: global shape of operand 0.
        result_shapes: global shapes of the results.
        tell: `Layout.tells_strides` of each result.
        index: result of `CanonicalOp.view_index`.
    """

    op: CanonicalOp
    static_args: Any
    shape: tuple
    result_shapes: list
    tell: list[bool]
    index: tuple | None

    @property
    def always(self) -> bool:
        """Return whether every result is a view, never a copy."""
        return self.op.memory == "shared"

    def tracked(self, own: Any) -> tuple:
        """Return `DTensor._strides` of each result, from the global strides ``own`` of operand 0.

        An entry is None if the result is contiguous, or if its local strides determine its global strides. An entry is
        `_COPY` for a result that must be a copy.
        """
        if own is UNKNOWN:
            return (UNKNOWN,) * len(self.result_shapes)
        own = contiguous_strides(self.shape) if own is None else own
        if self.op.view_strides is not None:
            found = [self.op.view_strides(self.static_args, self.shape, own, after) for after in self.result_shapes]
        else:
            found = [indexed_strides(self.shape, own, index) for index in self.index or ()]
        return tuple(
            _COPY if new is None else None if tells or is_contiguous(after, new) else new
            for after, tells, new in zip(self.result_shapes, self.tell, found, strict=True)
        )


def is_moved(have: Layout, read: Layout | None) -> bool:
    """Return whether redistribution from ``have`` to ``read`` moves data, so that the operation cannot read the
    operand's memory."""
    return read is not None and any(
        size > 1 and before is not after
        for size, before, after in zip(have.mesh.shape, have.placements, read.placements, strict=True)
    )


# ---------------------------------------------------------------------------- local strides determine the global ones
def _share(operands: tuple, result: Any) -> Any:
    x = operands[0]
    for y in result if isinstance(result, (tuple, list)) else (result,):
        share(x, y)
        if x._strides is UNKNOWN:
            y._strides = UNKNOWN
    return result


def _share_where_viewed(operands: tuple, result: Any) -> Any:
    x, platform = operands[0], operands[0]._layout.mesh.platform
    if x._strides is UNKNOWN:
        if x is not result:
            part(x, result)
    elif is_contiguous(platform.shape_of(x), platform.strides(x)) or platform.same_memory(x, result):
        share(x, result)
    return result


#: `CanonicalOp.memory` -> aliasing steps if local strides determine the global ones.
_TELLING = {"shared": Aliasing(None, _share, True), "viewable": Aliasing(None, _share_where_viewed, True)}


# ------------------------------------------------------------ results are copies, because data had to move
def _following(view: _View, layout: Layout, name: str) -> After:
    backs: list[Any] = [None] * len(view.result_shapes)
    if view.index is not None and not any(p.is_partial() for p in layout.placements):
        backs = [_back_to(index, view.shape) for index in view.index]

    noted = bind_noted_strides(layout)

    def after(operands: tuple, result: Any) -> Any:
        x = operands[0]
        several = isinstance(result, (tuple, list))
        own = noted(x)
        if own is UNKNOWN and not view.always:
            part(x, result)
            return result
        found = view.tracked(own)
        if _COPY in found:
            return result
        views = follow(x, result if several else (result,), backs, name)
        for y, strides in zip(views, found, strict=True):
            if strides is not None:
                y._strides = strides
        return type(result)(views) if several else views[0]

    return after


def _back_to(encoded: tuple, shape: tuple) -> Callable[[Any, Any], None]:
    """Return a function that writes a view to its base. The view has the elements of the base at an encoded index."""
    index = decode_index(encoded, ())

    def write(base: Any, view: Any) -> None:
        base[index] = view.reshape(shape) if index == (...,) else view

    return write


# ---------------------------------------------------------------------------- strides are tracked on the tensors
def _tracking(view: _View, layout: Layout) -> Aliasing:
    local = layout.mesh.platform.strides if layout.tells_strides else None

    def tracked(own: Any) -> tuple:
        return view.tracked(own if local is None or own is UNKNOWN else whole_strides(layout, own))

    known = Table(tracked)

    def copies(x: Any) -> bool:
        strides = x._strides if local is None else x._strides or local(x)
        return known[strides][0] is _COPY or (strides is UNKNOWN and not view.always)

    def after(operands: tuple, result: Any) -> Any:
        x = operands[0]
        results = result if isinstance(result, (tuple, list)) else (result,)
        own = x._strides if local is None else x._strides or local(x)
        for y, strides in zip(results, known[own], strict=True):
            if strides is _COPY or y is x:
                continue
            if strides is UNKNOWN and not view.always:
                part(x, y)
                continue
            if strides is not None:
                y._strides = strides
            share(x, y)
        return result

    return Aliasing(copies if not view.always else None, after, True)


def _carrying(op: CanonicalOp, layouts: tuple, strategy: Strategy) -> Aliasing | None:
    """Return the steps that track strides for an operation that returns no view.

    Its result may have another memory order than row-major.
    """
    given = [(i, x) for i, x in enumerate(layouts) if x is not None and x.ndim]
    if (
        not given
        or op.memory == "fresh"
        or (op.memory == "ordered" and not given[0][1].mesh.platform.keeps_memory_order)
    ):
        return None
    first, count = given[0][0], len(strategy.results)
    shape = tuple(strategy.results[0].shape)
    decides = op.memory == "ordered" and tuple(layouts[first].shape) == shape  # unless the operand is expanded
    telling = [(i, bind_noted_strides(x)) for i, x in given if x.tells_strides and tuple(x.shape) == shape]

    def after(operands: tuple, result: Any) -> Any:
        if result is operands[first]:  # as dropout outside training
            return result
        tracked = False
        for x in operands:
            if getattr(x, "_strides", None) is not None:
                tracked = True
        own = getattr(operands[first], "_strides", None)
        for i, noted in telling:
            if (strides := noted(operands[i])) is not None:
                tracked, own = True, strides if i == first else own
        if not tracked:
            return result
        if count > 1:
            for y in result[:count]:  # the rule may not describe the last results
                y._strides = UNKNOWN
            return result
        strides = _ORDERS[shape, own] if decides and own is not UNKNOWN else UNKNOWN
        if strides is not None:
            result._strides = strides
        return result

    return Aliasing(None, after)


def _order(key: tuple[tuple[int, ...], Any]) -> Any:
    shape, strides = key
    dense = None if strides is None else dense_strides(shape, strides)
    return None if dense is None or is_contiguous(shape, dense) else dense


#: (shape, `DTensor._strides` of an operand of that shape) -> `DTensor._strides` of a new tensor in the same order.
_ORDERS: Table = Table(_order, 1 << 12, "orders in memory")
