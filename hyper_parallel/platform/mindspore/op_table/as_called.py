"""Rows for primitives that are called again with their original arguments. Local tensors replace the DTensors. A call
on small tensors determines the shapes of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, ops

from hyper_parallel.platform.arguments import placed
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.contract.dispatch import Facts, Given
from hyper_parallel.platform.mindspore.basics.dtypes import FLOATS
from hyper_parallel.platform.mindspore.basics.empty_shards import safe_when_empty
from hyper_parallel.platform.mindspore.basics.private import no_grad
from hyper_parallel.platform.mindspore.op_table.binding import WORDS, given_again

__all__ = ["Facts", "Given", "Native", "as_called", "call_native", "shapes_of"]

#: ``native(func, args, kwargs, static_args)`` calls the primitive.
Native = Callable[[Any, list, dict, tuple], Any]


def call_native(func: Any, args: list, kwargs: dict, static_args: tuple) -> Any:
    """Call the primitive with its original arguments."""
    return func(*args, **kwargs)


def as_called(canonical: str, takes: str, facts: Facts, native: Native = call_native) -> NativeOp:
    """Return an op-table row for the canonical operation.

    Args:
        canonical: name of the operation.
        takes: names of the arguments that matter: see `NativeOp`. Other tensors among them hold numbers.
        facts: returns the static arguments that the rule reads.
        native: runs the call.
    """

    def call(func: Any, operands: Sequence[Any], static_args: tuple) -> Any:
        return _placed(native, func, operands, static_args)

    return safe_when_empty(NativeOp(canonical, takes, call, words=WORDS, facts=facts))


def _placed(native: Native, func: Any, operands: Sequence[Any], static_args: tuple) -> Any:
    """Run the call with ``operands`` in place of its tensors."""
    *_, places, rest, named = static_args
    rest, named = [given_again(x) for x in rest], [(name, given_again(x)) for name, x in named]
    args, kwargs = placed(operands, (places, rest, named))
    return native(func, args, kwargs, static_args)


# -------------------------------------------------------------------- shapes of results
_FOUND: dict[tuple, Any] = {}
_MOST = 1 << 12


def shapes_of(
    given: Given, shapes: tuple, native: Native = call_native, facts: tuple = ()
) -> tuple[tuple[int, ...], ...] | None:
    """Return the result shapes of a call whose operands have ``shapes``, which should be small: the call runs once.
    None if MindSpore rejects this call. MindSpore will then also reject the call of the program, with a better message.

    Args:
        given: the call.
        shapes: shapes of the operands, None for an absent operand.
        native: runs the call.
        facts: the arguments of ``native`` before the last three static ones.
    """
    which = given.func if hasattr(given.func, "prim") else given.func.name
    dtypes = tuple(x.dtype if isinstance(x, Tensor) else None for x in given.operands)
    key = (which, native, shapes, dtypes, given.places, given.rest, given.named, facts)
    if key not in _FOUND:
        if len(_FOUND) >= _MOST:
            _FOUND.clear()
        _FOUND[key] = _found(given, shapes, native, facts)
    return _FOUND[key]


def _found(given: Given, shapes: tuple, native: Native, facts: tuple) -> Any:
    with no_grad():
        stand_ins = [
            None if shape is None else _stand_in(shape, x.dtype)
            for shape, x in zip(shapes, given.operands, strict=True)
        ]
        try:
            static_args = (*facts, given.places, given.rest, given.named)
            results = _placed(native, given.func, stand_ins, static_args)
            results = results if isinstance(results, (tuple, list)) else (results,)
            return tuple(tuple(y.shape) for y in results)  # reading shapes also waits for a kernel that fails
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None


def _stand_in(shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Return small tensors to determine result shapes: unit matrices, because they are invertible; zeros for
    integers."""
    if dtype in FLOATS and len(shape) > 1 and 0 not in shape:
        return ops.broadcast_to(ops.eye(shape[-2], shape[-1], dtype), shape)
    return ops.zeros(shape, dtype)
