"""Observation of a program's operations on plain tensors, for `core.plain_code`, by a mode."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hyper_parallel.platform.contract.observation import MARKS, Follower
from hyper_parallel.platform.torch.basics.tensor import HANDLERS, is_dtensor
from hyper_parallel.platform.torch.handlers.bodies import body_of
from hyper_parallel.platform.torch.op_table import OP_TABLE

__all__ = ["base_of", "follow"]

#: Methods that return a new tensor without elements of theirs, and methods that change no element.
_NEW = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"})
_FLAGS = frozenset({"requires_grad_", "share_memory_", "detach_", "retain_grad", "register_hook", "__set__"})


def follow(follower: Follower) -> AbstractContextManager[Any] | None:
    """Return a context that passes operations on marked plain tensors to a follower; see `Platform.follow`.

    Compiled parts of the program run uncompiled.
    """
    if "torch._dynamo" not in sys.modules:
        return _Mode(follower)
    try:
        eager: Any = torch.compiler.set_stance("force_eager")
        eager.__exit__(None, None, None)
    except RuntimeError:  # inside of code that is compiled
        return None
    return _without_compiler(follower, eager)


@contextmanager
def _without_compiler(follower: Follower, eager: AbstractContextManager[None]) -> Iterator[None]:
    with eager, _Mode(follower):
        yield


def base_of(x: Tensor) -> Tensor | None:
    """Return the base of the view ``x``, or None."""
    return x._base


def _shape(x: Tensor, sizes: tuple[int, ...]) -> Any:
    return torch.Size(sizes)


def _size(x: Tensor, sizes: tuple[int, ...], dim: int | None = None) -> Any:
    return torch.Size(sizes) if dim is None else sizes[dim]


def _count(x: Tensor, sizes: tuple[int, ...]) -> int:
    return math.prod(sizes)


#: Functions that read the shape of a tensor -> the same of a shape.
_SIZES: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: _shape,
    Tensor.size: _size,
    **dict.fromkeys((Tensor.numel, Tensor.nelement, torch.numel), _count),
}


class _Mode(TorchFunctionMode):
    """Mode that passes operations with a marked argument to the follower. Inside an operation the mode is off."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._follower.paused or not _has_marks(args, kwargs):
            return func(*args, **kwargs)
        if (read := _SIZES.get(func)) is not None and args:
            return read(args[0], self._follower.sizes(args[0], args[0].shape), *args[1:], **kwargs)
        if func not in OP_TABLE:
            func = getattr(func, "__wrapped__", func)  # a patch may have replaced it
        row, name = OP_TABLE.get(func), getattr(func, "__name__", "")
        if row is None:
            if name == "type" and args[1:]:
                row = OP_TABLE[Tensor.to]
            elif name in _NEW or name in _FLAGS:
                return func(*args, **kwargs)
            elif getattr(func, "__module__", "") == "torch.nn.functional" and hasattr(func, "__code__"):
                with self:  # its Python code is composed of other operations
                    return body_of(func)(*args, **kwargs)
        if row is None and (composition := getattr(HANDLERS.get(func), "composition", None)) is not None:
            y = self._composed(composition, func, args, kwargs)
            if y is not None:
                return y
        return self._follower.operation(row, func, args, kwargs, lambda: func(*args, **kwargs))

    def _composed(self, composition: Callable, func: Any, args: tuple, kwargs: dict) -> Tensor | None:
        """Return the result of ``func`` with the marks that its composition gives, or None if that has no marks."""
        try:
            # Activation checkpointing counts the tensors that are saved: those of this second computation are not.
            with self, saved_tensors_hooks(_itself, _itself):
                same = composition(*args, **kwargs)
        except Exception:
            return None
        mark = getattr(same, MARKS, None)
        if mark is None:
            return None
        y = func(*args, **kwargs)
        if isinstance(y, Tensor) and y.shape == same.shape:
            y._marks_of_plain = mark
            return y
        return None


def _itself(x: Tensor) -> Tensor:
    return x


def _has_marks(args: Iterable[Any], kwargs: dict) -> bool:
    """Return whether some argument has marks, and none is a DTensor."""
    found = False
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            if is_dtensor(x):
                return False
            found = found or x.__dict__.get(MARKS) is not None
        elif isinstance(x, (tuple, list)):
            found = found or _has_marks(x, {})
        elif isinstance(x, dict):
            found = found or _has_marks((), x)
    return found
