"""Functions of `torch.nn.functional` that are Python wrappers of one native function.

torch passes such a function with all its arguments named. Calling it again on the local tensors would repeat the work
in Python. So the native function below the wrapper is dispatched directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from hyper_parallel.platform.torch.basics.private import native
from hyper_parallel.platform.torch.basics.tensor import Handler
from hyper_parallel.platform.torch.op_table.binding import Table

__all__ = ["calls_in_place", "direct_calls"]


#: function -> the native function for ``inplace=False``.
_ACTIVATIONS = {
    F.relu: torch.relu,
    F.selu: torch.selu,
    **{getattr(F, name): native(name) for name in ("silu", "relu6", "mish", "hardswish", "hardsigmoid")},
}
#: function -> the native function, which takes the dimension.
_SOFTMAXES = {F.softmax: torch.softmax, F.log_softmax: torch.log_softmax}
_OUT_OF_PLACE = {"inplace": False}
_NOTHING: dict[str, Any] = {}


def direct_calls(handlers: Mapping[Any, Handler]) -> dict[Any, Handler]:
    """Return handlers for activations and softmaxes of `torch.nn.functional`.

    These handlers call the handlers of the native functions. ``handlers`` contains the handlers of the native functions
    too.
    """
    return {
        **{func: _activation(native, handlers[native], handlers[func]) for func, native in _ACTIVATIONS.items()},
        **{func: _softmax(native, handlers[native], handlers[func]) for func, native in _SOFTMAXES.items()},
    }


def calls_in_place(table: Table, handlers: Mapping[Any, Handler]) -> dict[Any, Handler]:
    """Return handlers for element-wise functions with ``inplace=True``, which run the in-place operation.

    The function itself would write into a reduced copy of a partial sum, and lose the result.

    Args:
        table: the op table.
        handlers: handlers of the functions without ``inplace``.
    """
    written = handlers[torch.relu_]
    names = [name for name in vars(F) if not name.startswith("__")]
    functions = {f for f in map(vars(F).get, names) if inspect.isfunction(f) and f in table}
    return {
        func: _written_or_new(written, handlers[func])
        for func in functions
        if table[func].name == "pointwise" and "inplace" in inspect.signature(func).parameters
    }


def _written_or_new(written: Handler, new: Handler) -> Handler:
    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        # Torch's wrappers always pass ``inplace`` by keyword.
        return (written if kwargs.get("inplace") else new)(func, args, kwargs)

    return handler


def _activation(native: Any, run: Handler, otherwise: Handler) -> Handler:
    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs == _OUT_OF_PLACE and len(args) == 1:
            return run(native, args, _NOTHING)
        return otherwise(func, args, kwargs)

    return handler


def _softmax(native: Any, run: Handler, otherwise: Handler) -> Handler:
    def handler(func: Any, args: tuple, kwargs: dict) -> Any:
        dim = kwargs.get("dim")
        if len(args) == 1 and type(dim) is int and kwargs.get("dtype") is None:
            return run(native, (args[0], dim), _NOTHING)
        return otherwise(func, args, kwargs)

    return handler
