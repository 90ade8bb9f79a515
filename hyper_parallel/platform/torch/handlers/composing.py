"""Helpers for functions that run as a composition of other operations on DTensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.indexing import decode_index
from hyper_parallel.platform.torch.basics.tensor import State, dispatch, handles, is_dtensor
from hyper_parallel.platform.torch.op_table.binding import Bound, UnboundCallError, number_in
from hyper_parallel.platform.torch.op_table.index import encode

__all__ = ["composed", "number", "replicated_like", "with_item"]


def composed(*functions: Any) -> Callable[[Callable], Callable]:
    """Register the decorated function to replace functions of torch on DTensors.

    The decorated function takes the same arguments except ``out=``: `handlers.unknown` copies the result into ``out``.
    If it raises UnboundCallError, the function of torch runs on gathered operands. Tensors without dimensions become
    numbers where the annotation or the default is a number.
    """

    def register(composition: Callable) -> Callable:
        takes = inspect.signature(composition).parameters if inspect.isfunction(composition) else {}
        names = {name for name, parameter in takes.items() if _is_number(parameter)}
        places = {i for i, name in enumerate(takes) if name in names}

        @handles(*functions)
        def handler(func: Any, args: tuple, kwargs: dict) -> Any:
            if "out" in kwargs:
                if kwargs["out"] is not None:
                    raise UnboundCallError
                kwargs = {name: value for name, value in kwargs.items() if name != "out"}
            args = tuple([number_in(x) if i in places else x for i, x in enumerate(args)])
            return composition(*args, **{name: number_in(x) if name in names else x for name, x in kwargs.items()})

        handler.composition = composition  # type: ignore[attr-defined]
        return composition

    return register


def _is_number(parameter: inspect.Parameter) -> bool:
    return type(parameter.default) in (int, float) or parameter.annotation in ("int", "float", "int | None")


def number(x: Any) -> Any:
    """Return the number in a tensor of one element, which is the same on all ranks. A number is returned unchanged."""
    if is_dtensor(x):
        x = x.full_tensor()
    return x.item() if isinstance(x, Tensor) else x


def replicated_like(plain: Tensor, x: Any) -> Any:
    """Return ``plain``, which is equal on all ranks, as a DTensor on the mesh of ``x`` and on its device."""
    return State.core.replicated(plain.to(x.device), x._layout.mesh)


def _bind(func: Any, args: tuple, kwargs: dict) -> Bound:
    x, index, value = args
    tensors, encoded = encode(x, index)
    return (x, value, *tensors), (encoded,)


def _call(func: Any, operands: tuple, static_args: tuple) -> Any:
    x = torch.clone(operands[0])
    x[decode_index(static_args[0], operands[2:])] = operands[1]
    return x


_WITH_ITEM = NativeOp("setitem", _bind, _call)


def with_item(x: Any, index: Any, value: Any) -> Any:
    """Return a copy of ``x`` with ``x[index] = value``."""
    return dispatch(_WITH_ITEM, with_item, (x, index, value), {})
