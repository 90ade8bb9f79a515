"""The DTensor class of a framework, and how operations on it reach core."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.core import Core

__all__ = ["Dispatch", "InterceptionRole", "NativeOp", "name_of"]

Tensor = Any
Layout = Any


@dataclass(frozen=True, eq=False)
class NativeOp:
    """One row of a backend's op table: how a native operation maps to a canonical one.

    Attributes:
        name: the canonical operation (``"linear"``, ``"pointwise"``, ...); docs/rules.md lists them.
        bind: ``bind(func, args, kwargs) -> (operands, static_args)`` brings a native call into canonical form.
            ``operands`` is the tuple of tensor operands (tensors, Python scalars or ``None``), ``static_args`` the
            tuple of the remaining arguments in the order that the canonical operation documents; it must be hashable.
            For element-wise operations ``static_args`` may be any object: it is handed to `call` and never looked at.
        call: ``call(func, operands, static_args) -> result`` runs the native operation on local tensors. The result is
            a tensor or a tuple or list of tensors.
        binds_by_function: whether `bind` may look at ``func``. False where it does not, as it must be where a
            framework makes a new function object for each call: calls are remembered under the function otherwise.
        varies: ``varies()`` is whether a mode of the framework, such as autocast, has a say in what `bind` returns now:
            then a call is not remembered. None where none ever has.
    """

    name: str
    bind: Callable[[Any, tuple, dict], tuple[tuple, Any]]
    call: Callable[[Any, tuple, Any], Any]
    binds_by_function: bool = True
    varies: Callable[[], bool] | None = None

    @property
    def in_place(self) -> bool:
        """Whether it writes its result over its first operand, as the names of such canonical operations say."""
        return self.name.endswith("_")


def name_of(func: Any) -> str:
    """Name of a native operation, for messages."""
    return getattr(func, "__name__", None) or getattr(func, "name", None) or repr(func)


class Dispatch(Protocol):
    """Core's dispatcher, which runs native operations of which some argument is a DTensor."""

    def __call__(self, op: NativeOp | None, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run ``func(*args, **kwargs)``, of which ``op`` is the row of the op table, None when it has none."""

    def bind(self, op: NativeOp | None) -> Callable[[Any, tuple, dict], Any]:
        """The same for one row, as ``run(func, args, kwargs)``."""

    def result_shapes(self, name: str, shapes: tuple, static_args: Any) -> tuple[tuple[int, ...], ...]:
        """Shapes of the results of a canonical operation on tensors of these shapes (None for an operand that is no
        tensor), as its rule gives them: for backends whose kernels fail for tensors without elements."""


class InterceptionRole(ABC):
    """A tensor class whose operations arrive at core, a guard that turns that off, and the table of operations."""

    @abstractmethod
    def make_dtensor_class(self, mixin: type, core: Core) -> type:
        """The DTensor class of this platform: a subclass of ``mixin`` (core's public methods) and of ``Tensor`` with
        the global shape as its shape. Every native operation on an instance arrives at ``core.dispatch``. What else
        the backend needs of core is in ``core`` too. Called once."""

    @abstractmethod
    def wrap(self, local: Tensor, layout: Layout) -> Any:
        """Make a DTensor of a plain tensor that nobody else holds. Its ``_layout`` is ``layout``.

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
        """What of the framework is replaced when the DTensor class is made, for people: docs/patches.md."""
        return ()

    def is_compiling(self) -> bool:
        """Whether a compiler of the framework is tracing the caller: then what Python does besides calling operations
        is no part of what will run. False for a framework without a compiler, or where DTensors are kept from it."""
        return False

    def in_loss_parallel(self) -> bool:
        """Whether the caller is inside a context of the framework's own in which losses of distributed logits take
        plain targets, as inside `hyper_parallel.loss_parallel`. Asked only where a loss has plain targets."""
        return False

    def other_names(self, function: Any) -> Sequence[Any]:
        """Further native operations that compute what ``function`` does, of the same arguments, and that have no row:
        they get its rule too, where users register one."""
        return ()

    def meta_tensor(self, shape: Sequence[int], dtype: Any) -> Tensor | None:
        """A plain tensor of that shape and dtype without data, on which operations give such tensors; None in a
        framework that has none."""
        return None

    def why_no_rule(self, function: Any) -> str | None:
        """Why `register_sharding` cannot give a native operation that has no row a rule: the backend serves it before
        dispatch, or calls another in its place. None where it can."""
        return None
