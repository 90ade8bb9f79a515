"""Sharding rules that users add for operations that have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.operations.operands import name_of
from hyper_parallel.core.dtensor.operations.rules import OPERATIONS, CanonicalOp, Rule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract import NativeOp

_CUSTOM: dict[Any, NativeOp] = {}


def register_sharding(function: Any, rule: Rule, bind: Callable[..., tuple[tuple, tuple]] | None = None) -> None:
    """Tell how an operation that the library does not know may be sharded.

    Args:
        function: native operation, as it arrives at dispatch: the framework's function object, or its name.
        rule: ``rule(shapes, static_args) -> OpSharding``, see `hyper_parallel.core.dtensor.operations.op_sharding`.
        bind: ``bind(*args, **kwargs) -> (operands, static_args)`` tells tensor operands from the other arguments; the
            operation is then called as ``function(*operands, *static_args)``. Default: all arguments are operands.

    Raises:
        ValueError: when the operation has a rule already; when the backend serves it itself, so that a rule would never
            be asked.

    Example:
        >>> import torch
        >>> from hyper_parallel import OpSharding, register_sharding
        >>> def cross(shapes, static_args):  # vectors in the last dimension, which must be whole
        ...     labels = (*range(len(shapes[0]) - 1), None)
        ...     return OpSharding(operands=(labels, labels), results=(labels,), result_shapes=(shapes[0],))
        >>> register_sharding(torch.linalg.cross, cross)

    Source: ``torch.distributed.tensor.experimental.register_sharding``, with labels in place of placements.
    """
    table = get_platform().op_table
    if function in _CUSTOM or function in table or name_of(function) in table:
        raise ValueError(f"{name_of(function)} has a sharding rule already")
    reason = get_platform().why_no_rule(function)
    if reason is not None:
        raise ValueError(f"a sharding rule for {name_of(function)} would never be called: {reason}")
    name = f"custom:{name_of(function)}:{len(_CUSTOM)}"
    OPERATIONS[name] = CanonicalOp(name, rule)

    def bind_call(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        if bind is not None:
            return bind(*args, **kwargs)
        if kwargs:
            raise TypeError(f"{name_of(func)} was called with keywords: give register_sharding a bind that sorts them")
        return args, ()

    _CUSTOM[function] = NativeOp(name, bind_call, lambda func, operands, static_args: func(*operands, *static_args))


def find_custom_op(func: Any) -> NativeOp | None:
    """The operation registered for ``func`` or for its name."""
    return (_CUSTOM.get(func) or _CUSTOM.get(name_of(func))) if _CUSTOM else None
