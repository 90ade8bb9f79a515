"""Cache of calls: a call that equals an earlier one in `call_key` skips the binding and inspection of its arguments.

Most operations of a model are called with the same layouts and numbers in every step. The cache stores the results of
the op table's entry and of the rule. `call_key` contains all facts that these results depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.operations.operands import DTENSOR_CLASSES
from hyper_parallel.core.rules import CanonicalOp

_VALUES = frozenset({bool, int, float, str})
#: Markers in a key: for False and True, before named arguments, and for an argument that cannot be compared.
_TRUTHS = (object(), object())
_NAMED: Any = object()
_OTHER: Any = object()

Take = Callable[[tuple, dict], tuple]
Run = Callable[[Any, tuple, dict], Any]


def call_key(func: Any, args: tuple, kwargs: dict) -> tuple:
    """Return the cache key of a call of one operation. Calls with equal keys have the same recipe.

    ``func`` is the native function, or None if the recipe does not depend on it.
    """
    classes = DTENSOR_CLASSES
    positional = [x._layout if type(x) in classes else x if type(x) is int else _key_of(x) for x in args]
    if not kwargs:
        return (func, *positional)
    # A float that is passed by name is not an operand, so its value counts, including the sign of zero.
    named = [(float, x, math.copysign(1, x)) if type(x) is float else _key_of(x) for x in kwargs.values()]
    return (func, *positional, _NAMED, *kwargs, *named)


def _key_of(x: Any) -> Any:
    """Return the entry of one argument in the key. A float is represented by its type only, because it is an operand of
    an element-wise operation."""
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


def remembered_call(
    key: tuple, op: CanonicalOp, args: tuple, kwargs: dict, operands: tuple, recipe: Any, static_args: Any
) -> Run | None:
    """Return ``run(func, args, kwargs)`` for all calls with this key. Return None if calls with this key may need
    different recipes.

    Args:
        key: `call_key` of this call.
        op: the canonical operation.
        args: positional arguments of the call.
        kwargs: named arguments of the call.
        operands: the operands that the op table's entry extracted.
        recipe: recipe of the operation.
        static_args: the static arguments.
    """
    if not (op.elementwise or op.repeatable) or any(k is _OTHER for k in key) or not _is_value(static_args):
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
        take = _all if places == [*range(len(args))] else _from(places)
    # The recipe may depend on the value of a float or DTensor that is not an operand. The key has only its type or
    # layout.
    if any(type(x) is float or _holds_dtensor(x) for i, x in enumerate(args) if i not in places):
        return None
    if any(_holds_dtensor(x) for name, x in kwargs.items() if name not in places):
        return None
    if not recipe.only_local:
        return lambda func, args, kwargs: recipe(func, take(args, kwargs), static_args)
    return _bind_local(recipe, take, static_args if recipe.static_args is None else recipe.static_args)


def _bind_local(recipe: Any, take: Take, static_args: Any) -> Run:
    """Return the run function of a recipe that only reads tensors, runs the native operation and wraps the result."""
    call, no_dispatch, wrap, result = recipe.call, recipe.no_dispatch, recipe.wrap, recipe.result
    wrap_several, reads, copies, after = recipe.wrap_several, recipe.reads, recipe.copies, recipe.after
    clone = recipe.mesh.platform.clone

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        with no_dispatch():
            y = call(func, args if take is _all else take(args, kwargs), static_args)
            return wrap_several(y) if isinstance(y, (tuple, list)) else wrap(y, result)

    def read_and_run(func: Any, args: tuple, kwargs: dict) -> Any:
        operands = args if take is _all else take(args, kwargs)
        with no_dispatch():
            local_operands = [*operands]
            for i, read in reads:
                local_operands[i] = read(operands[i])
            if copies is not None and copies(operands[0]):
                local_operands[0] = clone(local_operands[0])
            y = call(func, local_operands, static_args)
            y = wrap_several(y) if isinstance(y, (tuple, list)) else wrap(y, result)
            return y if after is None else after(operands, y)

    return run if not reads and after is copies is None else read_and_run


def _holds_dtensor(x: Any) -> bool:
    return any(map(_holds_dtensor, x)) if isinstance(x, (tuple, list)) else type(x) in DTENSOR_CLASSES


def _is_value(x: Any) -> bool:
    """Return whether ``x`` consists of numbers, strings and None. Caching such a value keeps no tensor alive."""
    return all(map(_is_value, x)) if type(x) is tuple else x is None or type(x) in _VALUES


def _all(args: tuple, kwargs: dict) -> tuple:
    return args


def _elements(args: tuple, kwargs: dict) -> tuple:
    return tuple(args[0])


def _from(places: list[Any]) -> Take:
    """Return a function that takes the operands from the given positions and names in the arguments."""
    return lambda args, kwargs: tuple([args[p] if type(p) is int else kwargs[p] if p else None for p in places])


def _places(op: CanonicalOp, operands: tuple, args: tuple, kwargs: dict) -> list[int | str] | None:
    """Return, for each operand, the position or the name of the corresponding argument. The name is empty for an
    operand None.

    Return None if an object was passed twice, or if an operand is not an argument.
    """
    count = len(operands)
    if op.elementwise and _same_elements(operands, args[:count]):
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
