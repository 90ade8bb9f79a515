"""Entry points of MindSpore that neither ``__fallback__`` nor an overridden method sees.

Each is replaced once, when the DTensor class is made, by a wrapper that does nothing for plain tensors. Without them
the operations would compute on the shard in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import ops

from hyper_parallel.platform.mindspore.op_bind import Function
from hyper_parallel.platform.mindspore.op_table import OPS
from hyper_parallel.platform.mindspore.tensor import InterceptedTensor, NoDispatch, is_dispatching

__all__ = ["fill_holes"]

_installed = False


def fill_holes(dtensor: type) -> None:
    """Install the wrappers."""
    global _installed
    if _installed:
        return
    _installed = True
    _wrap_tuple_primitive(ops.Stack, "Stack", lambda prim, tensors: ops.stack(tensors, prim.axis))
    _wrap_tuple_primitive(ops.AddN, "AddN", lambda prim, tensors: functools.reduce(ops.add, tensors))
    _run_optimizers_on_locals()


def _wrap_tuple_primitive(cls: type, name: str, function: Callable) -> None:
    """Primitives of the old kind that take a tuple of tensors: MindSpore looks for subclasses among the arguments
    themselves only."""
    plain_call = cls.__call__

    @functools.wraps(plain_call)
    def call(self: Any, *args: Any) -> Any:
        tensors = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        if is_dispatching() and any(isinstance(t, InterceptedTensor) for t in tensors):
            if name == "Stack":
                dim = self.axis if isinstance(self.axis, int) else 0
                return _dispatch_of(tensors)(OPS["Stack"], _STACK, (tuple(tensors), dim), {})
            return function(self, tensors)
        return plain_call(self, *args)

    cls.__call__ = call


def _dispatch_of(tensors: Any) -> Callable:
    return next(type(t)._dispatch for t in tensors if isinstance(t, InterceptedTensor))


_STACK = Function("Stack", lambda tensors, dim=0: ops.stack(tensors, dim))


def _run_optimizers_on_locals() -> None:
    """Optimizers update each element by itself: they run on the local tensors, at the speed of plain ones."""
    base = ms.nn.Optimizer
    plain_call = base.__call__

    @functools.wraps(plain_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with NoDispatch():
            return plain_call(self, *args, **kwargs)

    base.__call__ = call
