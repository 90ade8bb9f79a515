"""Calls that look like an earlier one: run without binding the arguments, or looking at them, again.

Most operations of a model are called with the same layouts and numbers in every step. What the row of the op table and
the rule make of these is kept under them; `call_key` says what two calls have to have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.operations.operands import DTENSOR_CLASSES
from hyper_parallel.platform.contract import NativeOp

__all__ = ["ELEMENTWISE", "call_key", "remembered_call"]

ELEMENTWISE = frozenset({"pointwise", "add", "mul", "linear_unary", "like", "pointwise_", "add_", "mul_", "linear_"})
#: Operations whose canonical form follows from their arguments alone, not from a mode of ours.
_REPEATABLE = ELEMENTWISE | {
    "attention",
    "cat",
    "chunk",
    "div",
    "div_",
    "embedding",
    "expand",
    "layer_norm",
    "linear",
    "log_softmax",
    "matmul",
    "mean",
    "narrow",
    "permute",
    "reshape",
    "rms_norm",
    "softmax",
    "split",
    "squeeze",
    "stack",
    "sum",
    "unsqueeze",
}
_VALUES = frozenset({bool, int, float, str})
#: What stands for False and True, for named arguments, and for what is not compared.
_TRUTHS = (object(), object())
_NAMED: Any = object()
_OTHER: Any = object()

Take = Callable[[tuple, dict], tuple]
Run = Callable[[Any, tuple, dict], Any]


def call_key(func: Any, args: tuple, kwargs: dict) -> tuple:
    """What of a call of one operation its canonical form, and with it the plan, depends on, if it is remembered at all.

    ``func`` is the native function, None where that makes no difference.
    """
    classes = DTENSOR_CLASSES
    positional = [x._layout if type(x) in classes else x if type(x) is int else _key_of(x) for x in args]
    if not kwargs:
        return (func, *positional)
    return (func, *positional, _NAMED, *kwargs, *[_key_of_named(x) for x in kwargs.values()])


def _key_of(x: Any) -> Any:
    """A number with digits after the point counts by its type, since it is an operand of an element-wise operation."""
    kind = type(x)
    if kind is bool:
        return _TRUTHS[x]  # True equals 1
    if kind in DTENSOR_CLASSES:
        return x._layout
    if kind is float:
        return float
    if x is None or kind is int or kind is str:
        return x
    if isinstance(x, (tuple, list)):
        kinds = set(map(type, x))
        if kinds <= {int}:
            return tuple(x)
        if kinds <= DTENSOR_CLASSES:
            return tuple([y._layout for y in x])
    return _OTHER


def _key_of_named(x: Any) -> Any:
    """An argument given by name is no operand, so that its value counts."""
    return (float, x, math.copysign(1, x)) if type(x) is float else _key_of(x)


def remembered_call(
    key: tuple, op: NativeOp, args: tuple, kwargs: dict, operands: tuple, plan: Any, statics: Any
) -> Run | None:
    """``run(func, args, kwargs)`` for all calls of this key; None where what they have in common is not enough to know
    how they run.

    Args:
        key: `call_key` of this call.
        op: its row of the op table.
        args: its positional arguments.
        kwargs: its named arguments.
        operands: what the row made of them.
        plan: how the operation runs.
        statics: the static arguments.
    """
    if op.name not in _REPEATABLE or any(k is _OTHER for k in key) or not _is_value(statics):
        return None
    take: Take
    places: list[int | str]
    if args and isinstance(args[0], (tuple, list)) and _same_elements(operands, args[0]):
        take, places = _elements, [0]
    else:
        found = _places(op, operands, args, kwargs)
        if found is None:
            return None
        places = found
        take = _all if places == [*range(len(args))] else _taking(places)
    # Where these are no operands their value may count, of which the key has the type or the layout.
    if any(type(x) is float or type(x) in DTENSOR_CLASSES for i, x in enumerate(args) if i not in places):
        return None
    if any(type(x) in DTENSOR_CLASSES for name, x in kwargs.items() if name not in places):
        return None
    if not plan.only_local:
        return lambda func, args, kwargs: plan(func, take(args, kwargs), statics)
    return _bind_local(plan, op.call, take, statics if plan.statics is None else plan.statics)


def _bind_local(plan: Any, call: Callable[..., Any], take: Take, statics: Any) -> Run:
    """A plan of which only the native operation is left on tensors that are read where they are."""
    no_dispatch, wrap, result, wrap_several = plan.no_dispatch, plan.wrap, plan.result, plan.wrap_several
    reads, copies, after, clone = plan.reads, plan.copies, plan.after, plan.mesh.platform.clone

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        with no_dispatch():
            y = call(func, args if take is _all else take(args, kwargs), statics)
            return wrap_several(y) if isinstance(y, (tuple, list)) else wrap(y, result)

    def read_and_run(func: Any, args: tuple, kwargs: dict) -> Any:
        operands = [*take(args, kwargs)]
        with no_dispatch():
            for i, read in reads:
                operands[i] = read(operands[i])
            y = call(func, operands, statics)
            return wrap_several(y) if isinstance(y, (tuple, list)) else wrap(y, result)

    def run_and_note(func: Any, args: tuple, kwargs: dict) -> Any:
        operands = args if take is _all else take(args, kwargs)
        with no_dispatch():
            local_operands = [*operands]
            for i, read in reads:
                local_operands[i] = read(operands[i])
            if copies is not None and copies(operands[0]):
                local_operands[0] = clone(local_operands[0])
            y = call(func, local_operands, statics)
            y = wrap_several(y) if isinstance(y, (tuple, list)) else wrap(y, result)
            if after is not None:
                after(operands, y)
            return y

    if after is not None or copies is not None:
        return run_and_note
    return read_and_run if reads else run


def _is_value(x: Any) -> bool:
    """Whether ``x`` is made of numbers, strings and None: nothing that a call leaves behind, such as its tensors."""
    return all(map(_is_value, x)) if type(x) is tuple else x is None or type(x) in _VALUES


def _all(args: tuple, kwargs: dict) -> tuple:
    return args


def _elements(args: tuple, kwargs: dict) -> tuple:
    return tuple(args[0])


def _taking(places: list[Any]) -> Take:
    """The operands from their places in the arguments."""
    count = len(places)
    if places == [*range(count)]:
        return lambda args, kwargs: args[:count]

    def take(args: tuple, kwargs: dict) -> tuple:
        return tuple([args[p] if type(p) is int else kwargs[p] if p else None for p in places])

    return take


def _places(op: NativeOp, operands: tuple, args: tuple, kwargs: dict) -> list[int | str] | None:
    """The position or name of the argument that each operand is, an empty name for None; None where that is not clear,
    because one object was given twice or an operand was made for the purpose."""
    count = len(operands)
    if op.name in ELEMENTWISE and _same_elements(operands, args[:count]):
        return [*range(count)]
    given: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    places: list[int | str] = []
    for x in operands:
        found = [""] if x is None else [place for place, y in given if y is x]
        if len(found) != 1:
            return None
        places += found
    return places


def _same_elements(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
