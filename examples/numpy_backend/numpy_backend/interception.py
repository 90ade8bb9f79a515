"""Operations that arrive at HyperParallel's dispatcher when one of their operands is distributed.

`operation` makes a function one. Its first parameters are the operands, the others are static arguments. Their order is
that of the table of canonical operations (`hyper_parallel.core.rules`): so all rows are made in one way.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.platform.contract import Core, NativeOp
from numpy_backend.array import Array

__all__ = ["TABLE", "DistributedArray", "dispatching", "no_dispatch", "operation"]

#: operation -> its row.
TABLE: dict[Any, NativeOp] = {}


class _State(threading.local):
    depth = 0


_STATE = _State()


def dispatching() -> bool:
    """Return whether operations on distributed arrays are intercepted."""
    return not _STATE.depth


@contextmanager
def no_dispatch() -> Iterator[None]:
    """Inside, a distributed array is its local one."""
    _STATE.depth += 1
    try:
        yield
    finally:
        _STATE.depth -= 1


class DistributedArray(Array):
    """A distributed array: holds the state of core; core's methods come with its mixin
    (`platform.make_dtensor_class`)."""

    _core: Core

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, or inside `no_dispatch` the local one."""
        return tuple(self._layout.shape) if dispatching() else self.value.shape  # type: ignore[attr-defined]


def check_logits(logits: Array, dim: int) -> None:
    """Let core refuse plain logits that are one rank's part of the classes."""
    found = DistributedArray.__subclasses__()
    if found and not _STATE.depth and not _is_distributed(logits):
        found[0]._core.refuse_part_of_classes(logits.shape[dim], logits)


def operation(canonical: str = "", operands: int = 1, writes: bool = False) -> Callable[..., Any]:
    """Make a function an operation.

    Args:
        canonical: its canonical operation; with none it has no row, and runs on gathered operands.
        operands: how many of its first parameters are operands; -1 when the first is a sequence of them, 0 when all
            are.
        writes: whether it writes to its first operand, which it returns.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _STATE.depth:
                found = next(filter(_is_distributed, _flat(args, kwargs)), None)
                if found is not None:
                    return type(found)._core.dispatch(TABLE.get(call), call, args, kwargs)
            result = function(*args, **kwargs)
            if writes:
                args[0].writes[0] += 1
            return result

        if canonical:
            TABLE[call] = _row(canonical, operands, function)
        return call

    return decorate


def _row(canonical: str, count: int, function: Callable[..., Any]) -> NativeOp:
    signature = inspect.signature(function)

    def bind(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any]:
        if count == 0:  # element by element
            return args, None
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = tuple(given.arguments.values())
        if count < 0:
            return tuple(values[0]), _hashable(values[1:])
        return values[:count], _hashable(values[count:])

    def run(func: Any, xs: tuple, static_args: Any) -> Any:
        if count == 0:
            return func(*xs)
        return func(list(xs), *static_args) if count < 0 else func(*xs, *static_args)

    return NativeOp(canonical, bind, run, binds_by_function=False)


def _hashable(values: tuple) -> tuple:
    return tuple(tuple(v) if isinstance(v, list) else v for v in values)


def _is_distributed(x: Any) -> bool:
    return isinstance(x, DistributedArray)


def _flat(args: tuple, kwargs: dict) -> Iterator[Any]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (tuple, list)):
            yield from x
        else:
            yield x
