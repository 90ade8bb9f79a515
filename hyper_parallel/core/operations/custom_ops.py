"""Sharding rules that users register for operations without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.operations.listed_shardings import listed_op, listed_rule, plain
from hyper_parallel.core.operations.operands import name_of
from hyper_parallel.core.rules import OPERATIONS, CanonicalOp, Rule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract import NativeOp

_CUSTOM: dict[Any, NativeOp] = {}


def register_sharding(op: Any, rule: Rule | None = None, bind: Callable[..., tuple[tuple, tuple]] | None = None) -> Any:
    """Register a sharding rule for an operation that the library does not support.

    A ``rule`` says which dimensions may be sharded, for all meshes and placements. Without a ``rule``,
    `register_sharding` returns a decorator, as in torch. The decorated function lists the possible placements on one
    mesh dimension.

    Args:
        op: native operation as dispatch receives it: the framework's function object, such as
            ``torch.ops.aten._softmax.default``, or its name. The decorator also accepts a list of operations.
        rule: ``rule(shapes, static_args) -> OpSharding`` (see `hyper_parallel.core.rules.op_sharding`), or None for the
            decorator. The decorated function gets the arguments of the operation, with objects that have ``shape``,
            ``ndim`` and ``dtype`` in place of tensors. It returns pairs (placements of the results, placements of the
            arguments), with None for an argument that is not a tensor. Replicated operands are always possible and need
            no entry. Dimensions that are sharded together must have one size, or sizes that the number of ranks
            divides.
        bind: ``bind(*args, **kwargs) -> (operands, static_args)`` separates tensor operands from other arguments. The
            operation is then called as ``op(*operands, *static_args)``. By default, all arguments are operands.

    Returns:
        None, or the decorator, which returns the decorated function.

    Raises:
        ValueError: when the operation has a rule already, and when the backend implements it without rules. Also when
            the operation is called, for listed placements that do not match its arguments.

    Example:
        >>> import torch
        >>> from hyper_parallel import OpSharding, Replicate, Shard, register_sharding
        >>> def cross(shapes, static_args):  # vectors in the last dimension, which must be whole
        ...     labels = (*range(len(shapes[0]) - 1), None)
        ...     return OpSharding(operands=(labels, labels), results=(labels,), result_shapes=(shapes[0],))
        >>> register_sharding(torch.ops.aten.linalg_cross.default, cross)
        >>> @register_sharding(torch.ops.aten.erfinv.default)
        ... def erfinv(x):
        ...     return [([Shard(dim)], [Shard(dim)]) for dim in range(x.ndim)]

    Source: ``torch.distributed.tensor.experimental.register_sharding``; rules use labels in place of placements.
    """
    if rule is None:
        return lambda function: _register_listed(op if isinstance(op, list) else [op], function)
    _check_free(op)
    name = _new_name(op)
    OPERATIONS[name] = CanonicalOp(name, rule)

    def bind_call(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        if bind is not None:
            return bind(*args, **kwargs)
        if kwargs:
            raise TypeError(
                f"{name_of(func)} was called with keywords: pass bind= to register_sharding, a function that orders "
                "the arguments"
            )
        return args, ()

    platform = get_platform()

    def call(func: Any, operands: tuple, static_args: tuple) -> Any:
        return func(*plain(operands, platform), *static_args)

    _CUSTOM[op] = NativeOp(name, bind_call, call)
    return None


def _register_listed(ops: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    platform = get_platform()
    for op in ops:
        _check_free(op)
    for op in ops:
        name = _new_name(op)
        OPERATIONS[name] = CanonicalOp(name, listed_rule(op, function, platform))
        row = listed_op(name, platform)
        for one in (op, *platform.other_names(op)):
            _CUSTOM.setdefault(one, row)
    return function


def _check_free(op: Any) -> None:
    """Raise ValueError if a rule for ``op`` exists already, or would never be called."""
    platform = get_platform()
    if op in _CUSTOM or op in platform.op_table or name_of(op) in platform.op_table:
        raise ValueError(f"{name_of(op)} has a sharding rule already")
    reason = platform.why_no_rule(op)
    if reason is not None:
        raise ValueError(f"a sharding rule for {name_of(op)} would never be called: {reason}")


def _new_name(op: Any) -> str:
    return f"custom:{name_of(op)}:{len(_CUSTOM)}"


def find_custom_op(func: Any) -> NativeOp | None:
    """Return the entry registered for ``func`` or for its name, or None."""
    return (_CUSTOM.get(func) or _CUSTOM.get(name_of(func))) if _CUSTOM else None
