"""Functions of MindSpore that bypass ``__fallback__`` and overridden methods, and their replacements.

The replacements (`platform.mindspore.patches`) change nothing for plain tensors. Without them MindSpore would silently
compute on the shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import ops

from hyper_parallel.platform.mindspore.op_table import OPS
from hyper_parallel.platform.mindspore.op_table.binding import Function, number_in
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, Unknown, distributed_in, is_dispatching

__all__ = [
    "REFLECTED",
    "add_all",
    "call_on_sequence",
    "checked_index",
    "gathered_bprop",
    "reflected_operator",
    "see_infinity",
    "stack",
]


# -------------------------------------------------------------------- primitives that take a sequence of tensors
def call_on_sequence(original: Callable, primitive: Any, *args: Any, distributed: Callable[[Any, tuple], Any]) -> Any:
    """Replace the call of a primitive. MindSpore looks for subclasses among its arguments, not inside sequences.

    Args:
        original: MindSpore's method.
        primitive: the called primitive.
        args: tensors, or one sequence of them.
        distributed: (primitive, tensors) -> result, if one of the tensors is a DTensor.
    """
    tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    if is_dispatching() and any(isinstance(t, InterceptedTensor) for t in tensors):
        return distributed(primitive, tuple(tensors))
    return original(primitive, *args)


_STACK = Function("Stack", ops.stack)


def stack(prim: Any, tensors: tuple) -> Any:
    """Run `ops.Stack` on a sequence that contains DTensors."""
    dispatch = next(type(t)._dispatch for t in tensors if isinstance(t, InterceptedTensor))
    return dispatch(OPS["Stack"], _STACK, (tensors, prim.axis), {})


def add_all(prim: Any, tensors: tuple) -> Any:
    """Run `ops.AddN`. A norm adds tensors of one element each, which may be on several meshes."""
    by_mesh: dict[Any, list[Any]] = {}
    for t in tensors:
        by_mesh.setdefault(t._layout.mesh if isinstance(t, InterceptedTensor) else None, []).append(t)
    if len(by_mesh) - (None in by_mesh) > 1 and all(t.size == 1 for t in tensors):
        sums = [functools.reduce(ops.add, of_mesh) for of_mesh in by_mesh.values()]
        tensors = tuple(t.full_tensor() if isinstance(t, InterceptedTensor) else t for t in sums)
    return functools.reduce(ops.add, tensors)


def see_infinity(prim: Any, tensors: tuple) -> Any:
    """Run `AllFinite`, which returns whether there is an infinity or NaN."""
    return functools.reduce(ops.logical_or, map(_has_infinity, tensors))


def _has_infinity(x: Any) -> Any:
    """Return whether a tensor has an infinity or NaN: each rank checks its shard, and one number is reduced."""
    return ops.logical_not(ops.isfinite(x)).astype(ms.float32).sum() > 0


# -------------------------------------------------------------------- plain tensors indexed by DTensors
def checked_index(original: Callable, x: Any, index: Any, *value: Any) -> Any:
    """Replace ``__getitem__`` or ``__setitem__`` of tensors.

    MindSpore would compute ``plain[distributed]`` with this rank's shard of the index. Core raises the error that plain
    and distributed tensors do not mix. Distributed bounds of slices are numbers.
    """
    if type(index) is slice:
        index = _with_numbers(index)
    elif type(index) not in _PLAIN_INDICES and is_dispatching():
        if type(index) is tuple:
            index = tuple([_with_numbers(item) if type(item) is slice else item for item in index])
        found = next(distributed_in(index), None)
        if found is not None:
            name = "setitem_" if value else "getitem"
            return type(found)._dispatch(OPS[name], Function(name.rstrip("_"), original), (x, index, *value), {})
    return original(x, index, *value)


_PLAIN_INDICES = (int, type(None), type(Ellipsis))


def _with_numbers(bounds: slice) -> slice:
    """Return a slice with the number of each distributed bound."""
    given = (bounds.start, bounds.stop, bounds.step)
    if not any(isinstance(bound, InterceptedTensor) for bound in given):
        return bounds
    return slice(*(number_in(bound) if isinstance(bound, InterceptedTensor) else bound for bound in given))


# -------------------------------------------------------------------- cells that write their own backward
def gathered_bprop(original: Callable, cell: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the call of a cell with a ``bprop``, such as the cell of `ops.nanmean`. MindSpore would pass this rank's
    shards of recorded tensors to ``bprop``. So the cell runs on gathered operands, like any function without a rule."""
    found = next(distributed_in((args, kwargs)), None) if is_dispatching() else None
    if found is None:
        return original(cell, *args, **kwargs)
    name = type(cell).__name__
    if name == "_RecomputeCell":
        return original(cell, *args, **kwargs)
    if next(distributed_in(cell), None) is not None:
        raise ValueError(
            f"{name} defines a bprop, which would get this rank's shards of its distributed parameters: remove the "
            "bprop, or use plain parameters in the cell"
        )
    function = Unknown(Function(name.lstrip("_"), functools.partial(original, cell)))
    return type(found)._dispatch(None, function, args, kwargs)


def gathered_apply(original: Any) -> classmethod:
    """Replace `_Function.apply`, a user-defined function with its own backward. MindSpore would pass this rank's shards
    to forward and backward. So the function runs on gathered operands, like any function without a rule."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found = next(distributed_in((args, kwargs)), None) if is_dispatching() else None
        call = functools.partial(original.__func__, cls)
        if found is None or cls.__module__.startswith(("mindspore.", "hyper_parallel.")):
            return call(*args, **kwargs)
        return type(found)._dispatch(None, Unknown(Function(cls.__name__, call)), args, kwargs)

    return classmethod(functools.wraps(original.__func__)(apply))


# -------------------------------------------------------------------- plain parameters and DTensors
#: Operator -> the corresponding operator of the right operand.
REFLECTED = {
    **{f"__{n}__": f"__r{n}__" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")},
    **{f"__{n}__": f"__{n}__" for n in ("eq", "ne")},
}


def reflected_operator(original: Callable, x: Any, other: Any, reflected: str) -> Any:
    """Replace an operator of parameters. Python asks the right operand first if its class derives from the class of the
    left operand. DTensors derive from plain tensors, but not from parameters. So in ``parameter * distributed``
    MindSpore would consider the parameter only."""
    if isinstance(other, InterceptedTensor) and is_dispatching():
        return getattr(other, reflected)(x)
    return original(x, other)
