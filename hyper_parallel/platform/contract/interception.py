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
    """Name of a native operation, for messages."""
    return getattr(func, "__name__", None) or getattr(func, "name", None) or repr(func)


class InterceptionRole(ABC):
    """A tensor class whose operations arrive at core, a guard that turns that off, and the table of operations."""

    @abstractmethod
    def make_dtensor_class(self, mixin: type, core: Core) -> type:
        """The DTensor class of this platform: a subclass of ``mixin`` (core's public methods) and of ``Tensor`` with
        the global shape as its shape. Every native operation on an instance arrives at ``core.dispatch``. ``core`` also
        has all else that the backend needs of core. Called once."""

    @abstractmethod
    def wrap(self, local: Tensor, layout: Layout) -> Any:
        """Make a DTensor of a plain tensor that no other code holds. Its ``_layout`` is ``layout``.

        Under `no_dispatch` the DTensor is its local tensor, part of the autograd graph: operations on it compute on the
        local data, and gradients land on it. So changing the class of ``local`` is the natural way.
        """

    @abstractmethod
    def no_dispatch(self) -> AbstractContextManager:
        """Guard under which operations on DTensors run on their local tensors and are not intercepted."""

    @property
    @abstractmethod
    def op_table(self) -> Mapping[Any, NativeOp]:
        """Native operation (function object or name) -> `NativeOp`."""

    def patched_names(self) -> Sequence[str]:
        """Return the names in the framework that patches replace, as docs/patches.md lists them."""
        return ()

    def is_compiling(self) -> bool:
        """Return whether a compiler of the framework is tracing the caller.

        Python code other than calls of operations is no part of the compiled code then. False for a framework without
        a compiler, or where DTensors are kept from it.
        """
        return False

    def in_loss_parallel(self) -> bool:
        """Return whether the caller is inside the framework's own counterpart of `hyper_parallel.loss_parallel`. Inside
        of it, losses of distributed logits take plain targets. Asked only where a loss has plain targets.
        """
        return False

    def other_names(self, function: Any) -> Sequence[Any]:
        """Further native operations that compute the same as ``function``, of the same arguments, and that have no row:
        they get its rule too, where users register one."""
        return ()

    def meta_tensor(self, shape: Sequence[int], dtype: Any) -> Tensor | None:
        """A plain tensor of that shape and dtype without data, on which operations give such tensors. None in a
        framework that has none."""
        return None

    def why_no_rule(self, function: Any) -> str | None:
        """Why `register_sharding` cannot give a native operation that has no row a rule: the backend serves it before
        dispatch, or calls another in its place. None where it can."""
        return None
