"""The DTensor class of a framework, and how operations on it reach core."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.platform.contract.core import Core
from hyper_parallel.platform.contract.dispatch import NativeOp

__all__ = ["InterceptionRole", "name_of"]

Tensor = Any
Layout = Any


def name_of(func: Any) -> str:
    """Return the name of a native operation, for messages."""
    return getattr(func, "__name__", None) or getattr(func, "name", None) or repr(func)


class InterceptionRole(ABC):
    """A tensor class whose operations arrive at core, a guard that turns that off, and the table of operations."""

    @abstractmethod
    def make_dtensor_class(self, mixin: type, core: Core) -> type:
        """Make the DTensor class of this platform. The class derives from ``mixin`` (core's public methods) and from
        ``Tensor``. The shape of an instance is the global shape. Every native operation on an instance arrives at
        ``core.dispatch``. ``core`` has all other services for the backend too. Called once."""

    @abstractmethod
    def wrap(self, local: Tensor, layout: Layout) -> Any:
        """Make a DTensor with ``_layout`` ``layout`` from a plain tensor that no other code references.

        Under `no_dispatch` the DTensor is its local tensor, part of the autograd graph: operations on it compute on the
        local data, and gradients accumulate on it. So changing the class of ``local`` is the natural implementation.
        """

    @abstractmethod
    def no_dispatch(self) -> AbstractContextManager:
        """Return a context in which operations on DTensors run on their local tensors and are not intercepted."""

    @property
    @abstractmethod
    def op_table(self) -> Mapping[Any, NativeOp]:
        """Table from native operation (function object or name) to `NativeOp`."""

    def patched_names(self) -> Sequence[str]:
        """Return the names in the framework that patches replace, as docs/patches.md lists them."""
        return ()

    def is_compiling(self) -> bool:
        """Return whether a compiler of the framework is tracing the caller.

        While it traces, only calls of operations become part of the compiled code, and other Python code does not.
        False for a framework without a compiler, and for a framework whose compiler never meets DTensors.
        """
        return False

    def in_loss_parallel(self) -> bool:
        """Return whether the caller is inside the framework's own counterpart of `hyper_parallel.loss_parallel`. Inside
        it, losses of distributed logits take plain targets. Called only where a loss has plain targets."""
        return False

    def other_names(self, function: Any) -> Sequence[Any]:
        """Return native operations without a row that are equivalent to ``function`` and take the same arguments. A
        rule that users register for ``function`` also applies to the returned operations."""
        return ()

    def meta_tensor(self, shape: Sequence[int], dtype: Any) -> Tensor | None:
        """Return a plain tensor of that shape and dtype without data. Operations on the result return tensors without
        data. None in a framework without such tensors."""
        return None

    def why_no_rule(self, function: Any) -> str | None:
        """Return why `register_sharding` cannot give a rule to a native operation without a row; None if it can. A
        reason is that the backend handles the operation before dispatch, or calls another operation in its place."""
        return None
