"""Which operations give views on the single device, and how a plan makes their results behave like views here.

There are three cases. The operation shares memory here too: the framework does what is needed. It had to move data: the
result is a copy, which `views.follow` ties to its base. Or some rank has one row or none, so that the framework may
answer otherwise for the shard than for the whole: then strides tracked on the tensors say whether a copy is due.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.caches import Table
from hyper_parallel.core.dtensor.layouts.layout import Layout
from hyper_parallel.core.dtensor.layouts.memory_order import UNKNOWN, strides_of
from hyper_parallel.core.dtensor.layouts.strides import contiguous_strides, dense_strides, is_contiguous, view_strides
from hyper_parallel.core.dtensor.operations.rules.labels import axis
from hyper_parallel.core.dtensor.operations.views import follow, part, share
from hyper_parallel.platform.contract import NativeOp

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.operations.strategy import Strategy

__all__ = ["Aliasing", "aliasing_of", "is_moved"]

#: canonical operation -> `NativeOp.memory`, unless a row says otherwise.
_MEMORY = {
    **dict.fromkeys(
        ("permute", "expand", "squeeze", "unsqueeze", "narrow", "getitem", "split", "chunk", "unbind"), "shared"
    ),
    "reshape": "viewable",
}
#: Operations whose results lie in memory as their operands do.
_CARRIES = frozenset({"pointwise", "add", "mul", "linear_unary", "like", "div", "dropout"})
#: Operations whose results are contiguous whatever their operands are.
_FRESH = frozenset({"linear", "matmul", "addmm", "embedding", "sum", "mean", "cat", "stack", "one_hot", "attention"})
#: What stands for the strides of a view where the result is a copy.
_COPY: Any = "copy"

#: ``after(operands, result)``.
After = Callable[[tuple, Any], None]


class Aliasing:
    """What a plan does before and after its local operation.

    Attributes:
        copies: ``copies(operand 0)`` says whether the local operation is to be run on a copy of it; None: never.
        after: ``after(operands, result)``, of DTensors, to be called with interception off; None: nothing.
        is_view: whether the result shares the memory of operand 0, or may.
    """

    __slots__ = ("after", "copies", "is_view")

    def __init__(self, copies: Callable[[Any], bool] | None, after: After | None, is_view: bool = False) -> None:
        self.copies, self.after, self.is_view = copies, after, is_view


def aliasing_of(op: NativeOp, layouts: tuple, statics: Any, strategy: Strategy, name: str) -> Aliasing | None:
    """What plans of ``op`` have to do, None when it is nothing.

    Args:
        op: the row.
        layouts: of the operands, None for one that is no tensor.
        statics: the static arguments.
        strategy: how it runs.
        name: of the native operation, for messages.
    """
    if op.name.endswith("_") or not layouts or layouts[0] is None:
        return None
    memory = op.memory or _MEMORY.get(op.name, "")
    if op.name == "getitem" and not _is_basic(statics[0]):
        memory = ""
    tell = all(x.tells_strides for x in (*layouts, *strategy.results) if x is not None)
    if memory and is_moved(layouts[0], strategy.operands[0]):
        return Aliasing(None, _following(op, layouts[0], statics, strategy.results, memory, name))
    if not tell:
        return _tracking(op, layouts[0], statics, strategy.results, memory) if memory else _carrying(op)
    return _TELLING[memory]


def _is_basic(index: tuple) -> bool:
    """Whether an encoded index has only ints, slices, None and dots: such an index gives a view."""
    return all(not isinstance(item, bool) and not (isinstance(item, tuple) and item[0] == "tensor") for item in index)


def is_moved(have: Layout, read: Layout | None) -> bool:
    """Whether what is read is not in the memory of a tensor of layout ``have``."""
    return read is not None and any(
        size > 1 and before is not after
        for size, before, after in zip(have.mesh.shape, have.placements, read.placements, strict=True)
    )


# ---------------------------------------------------------------------------- the shards tell
def _share(operands: tuple, result: Any) -> None:
    x = operands[0]
    if isinstance(result, (tuple, list)):
        for y in result:
            share(x, y)
    else:
        share(x, result)


def _share_where_viewed(operands: tuple, result: Any) -> None:
    x, platform = operands[0], operands[0]._layout.mesh.platform
    if is_contiguous(platform.shape_of(x), platform.strides(x)) or platform.same_memory(x, result):
        share(x, result)


#: `NativeOp.memory` -> what is to be done where the framework's answer for a shard is that for the whole.
_TELLING: dict[str, Aliasing | None] = {
    "": None,
    "shared": Aliasing(None, _share, True),
    "viewable": Aliasing(None, _share_where_viewed, True),
    "contiguous": None,  # the same tensor, or a copy
    "copied": Aliasing(lambda x: True, None),
}


# ---------------------------------------------------------------------------- data had to move
def _following(op: NativeOp, layout: Layout, statics: Any, results: tuple, memory: str, name: str) -> After | None:
    if memory == "copied":
        return None
    shape = tuple(layout.shape)
    backs = [_back(op.name, statics, shape, tuple(x.shape)) for x in results]
    if op.name in ("split", "chunk", "unbind"):
        dim = axis(statics[0] if op.name == "unbind" else statics[1], len(shape))
        starts = [0]
        for x in results:
            starts.append(starts[-1] + (1 if op.name == "unbind" else x.shape[dim]))
        whole = (slice(None),) * dim
        backs = [
            _back_to((*whole, start if op.name == "unbind" else slice(start, end))) for start, end in pairwise(starts)
        ]
    if any(p.is_partial() for p in layout.placements):
        backs = [None] * len(backs)

    def after(operands: tuple, result: Any) -> None:
        x = operands[0]
        if memory != "shared":
            strides = strides_of(x, x._layout)
            if strides is UNKNOWN:
                part(x, result)
                return
            if memory == "contiguous":  # the same tensor, or a copy
                is_view = is_contiguous(shape, strides)
            else:
                is_view = view_strides(op.name, statics, shape, strides, tuple(results[0].shape)) is not None
            if not is_view:
                return
        follow(x, result if isinstance(result, (tuple, list)) else (result,), backs, name)

    return after


def _back(name: str, statics: Any, shape: tuple, result_shape: tuple) -> Callable[[Any, Any], None] | None:
    """How what a view has becomes what its base has."""
    if name == "getitem":
        return _back_to(tuple(slice(*item[1:]) if isinstance(item, tuple) else item for item in statics[0]))
    if name == "narrow":
        dim = axis(statics[0], len(shape))
        start = statics[1] % shape[dim] if statics[1] < 0 else statics[1]
        return _back_to((*(slice(None),) * dim, slice(start, start + statics[2])))
    if name in ("reshape", "squeeze", "unsqueeze"):

        def write(base: Any, view: Any) -> None:
            base[...] = view.reshape(shape)

        return write
    return None  # several elements may be one of the base, as after `expand`


def _back_to(index: tuple) -> Callable[[Any, Any], None]:
    def write(base: Any, view: Any) -> None:
        base[index] = view

    return write


# ---------------------------------------------------------------------------- the shards do not tell
def _tracking(op: NativeOp, layout: Layout, statics: Any, results: tuple, memory: str) -> Aliasing:
    shape, result_shapes = tuple(layout.shape), [tuple(x.shape) for x in results]

    def work_out(strides: Any) -> tuple:
        """`DTensor._strides` of each result, from those of the operand; `_COPY` for a copy."""
        if memory == "copied":
            return (_COPY,)
        if strides is UNKNOWN:
            return (UNKNOWN,) * len(results)
        own = contiguous_strides(shape) if strides is None else strides
        if memory == "contiguous":
            return (strides if is_contiguous(shape, own) else _COPY,)
        found = []
        for after in result_shapes:
            new = own if op.name == "linear_unary" else view_strides(op.name, statics, shape, own, after)
            found.append(_COPY if new is None else None if is_contiguous(after, new) else new)
        return tuple(found)

    known = Table(work_out)

    def copies(x: Any) -> bool:
        return known[x._strides][0] is _COPY or (x._strides is UNKNOWN and memory != "shared")

    def after(operands: tuple, result: Any) -> None:
        x = operands[0]
        for y, strides in zip(
            result if isinstance(result, (tuple, list)) else (result,), known[x._strides], strict=True
        ):
            if strides is _COPY or y is x:
                continue
            if strides is UNKNOWN and memory != "shared":
                part(x, y)
                continue
            if strides is not None:
                y._strides = strides
            share(x, y)

    return Aliasing(copies if memory != "shared" else None, after, True)


def _carrying(op: NativeOp) -> Aliasing | None:
    """For an operation that gives no view: where its result does not lie in memory in row-major order."""
    if op.name in _FRESH:
        return None
    keeps_order = op.name in _CARRIES

    def after(operands: tuple, result: Any) -> None:
        first, tracked = None, False
        for x in operands:
            if getattr(x, "_layout", None) is not None:
                first = x if first is None else first
                tracked = tracked or x._strides is not None
        if not tracked:
            return
        if isinstance(result, (tuple, list)):
            for y in result:
                y._strides = UNKNOWN
            return
        shape, strides = result._layout.shape, UNKNOWN
        # The first operand decides, where it is not stretched.
        if keeps_order and first is not None and first._strides is not UNKNOWN and first._layout.shape == shape:
            strides = _ORDERS[shape, first._strides]
        if strides is not None:
            result._strides = strides

    return Aliasing(None, after)


def _order(key: tuple[tuple[int, ...], Any]) -> Any:
    shape, strides = key
    dense = None if strides is None else dense_strides(shape, strides)
    return None if dense is None or is_contiguous(shape, dense) else dense


#: (shape, `DTensor._strides` of an operand of that shape) -> those of a new tensor in the same order.
_ORDERS: Table = Table(_order, 1 << 12, "orders in memory")
