"""Entry points of MindSpore that neither ``__fallback__`` nor an overridden method sees.

Each is replaced once, when the DTensor class is made, by a wrapper that does nothing for plain tensors. Without them
MindSpore would compute on the shard in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.ops.operations.nn_ops import AllFinite

from hyper_parallel.platform.mindspore.graphs import refuse_graphs
from hyper_parallel.platform.mindspore.losses import wrap_losses
from hyper_parallel.platform.mindspore.op_bind import Function
from hyper_parallel.platform.mindspore.op_table import OPS
from hyper_parallel.platform.mindspore.optimizers import hook_optimizers
from hyper_parallel.platform.mindspore.plain import hook_plain_tensors
from hyper_parallel.platform.mindspore.tensor import InterceptedTensor, distributed_in, is_dispatching

__all__ = ["fill_holes"]

_installed = False


def fill_holes() -> None:
    """Install the wrappers."""
    global _installed
    if _installed:
        return
    _installed = True
    _wrap_call(ops.Stack, _stack)
    _wrap_call(ops.AddN, lambda prim, tensors: functools.reduce(ops.add, tensors))
    _wrap_call(AllFinite, lambda prim, tensors: functools.reduce(ops.logical_or, map(_has_infinity, tensors)))
    for name in ("__getitem__", "__setitem__"):
        _check_index(name)
    _reflect_operators(Parameter._get_base_class(Tensor))
    hook_plain_tensors()
    hook_optimizers()
    wrap_losses()
    refuse_graphs()


# -------------------------------------------------------------------- primitives that take a sequence of tensors
def _wrap_call(primitive: type, distributed: Callable[[Any, tuple], Any]) -> None:
    """MindSpore looks for subclasses among the arguments of a primitive, not in sequences."""
    plain_call = primitive.__call__

    @functools.wraps(plain_call)
    def call(self: Any, *args: Any) -> Any:
        tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        if is_dispatching() and any(isinstance(t, InterceptedTensor) for t in tensors):
            return distributed(self, tuple(tensors))
        return plain_call(self, *args)

    primitive.__call__ = call  # type: ignore[method-assign]


_STACK = Function("Stack", lambda tensors, dim: ops.stack(tensors, dim))


def _stack(prim: Any, tensors: tuple) -> Any:
    dispatch = next(type(t)._dispatch for t in tensors if isinstance(t, InterceptedTensor))
    return dispatch(OPS["Stack"], _STACK, (tensors, prim.axis), {})


def _has_infinity(x: Any) -> Any:
    """As a sum, so that each rank looks at its part and one number is reduced."""
    return ops.logical_not(ops.isfinite(x)).astype(ms.float32).sum() > 0


# -------------------------------------------------------------------- plain tensors indexed by DTensors
def _check_index(name: str) -> None:
    """``plain[distributed]`` would take this rank's part of the index: core says that it does not mix."""
    plain_call = getattr(Tensor, name)
    function = Function(name.strip("_"), lambda x, index, *value: plain_call(x, index, *value))
    row = OPS["getitem" if name == "__getitem__" else "setitem_"]

    @functools.wraps(plain_call)
    def call(self: Any, index: Any, *value: Any) -> Any:
        if type(index) not in _PLAIN_INDICES and is_dispatching():
            found = next(distributed_in(index), None)
            if found is not None:
                return type(found)._dispatch(row, function, (self, index, *value), {})
        return plain_call(self, index, *value)

    setattr(Tensor, name, call)


_PLAIN_INDICES = (int, slice, type(None), type(Ellipsis))


# -------------------------------------------------------------------- plain parameters beside DTensors
_REFLECTED = {
    **{f"__{n}__": f"__r{n}__" for n in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")},
    **{f"__{n}__": f"__{n}__" for n in ("eq", "ne")},
}


def _reflect_operators(parameter: type) -> None:
    """In ``parameter * distributed`` Python does not ask the right operand first, as it does for other plain tensors,
    of whose class DTensors are subclasses; MindSpore then looks at the left one only."""
    for name, reflected in _REFLECTED.items():
        setattr(parameter, name, _reflect(getattr(parameter, name), reflected))


def _reflect(plain_operator: Callable[[Any, Any], Any], reflected: str) -> Callable[[Any, Any], Any]:
    @functools.wraps(plain_operator)
    def operator(self: Any, other: Any) -> Any:
        if isinstance(other, InterceptedTensor) and is_dispatching():
            return getattr(other, reflected)(self)
        return plain_operator(self, other)

    return operator
