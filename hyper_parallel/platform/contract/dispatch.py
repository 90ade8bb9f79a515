"""A row of a backend's op table, and core's dispatcher, which runs native operations by such rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Dispatch", "NativeOp"]


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
        """Return whether the operation writes its result over its first operand: its canonical name says so."""
        return self.name.endswith("_")


class Dispatch(Protocol):
    """Core's dispatcher, which runs native operations of which some argument is a DTensor."""

    def __call__(self, op: NativeOp | None, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run ``func(*args, **kwargs)``, of which ``op`` is the row of the op table, None when it has none."""

    def bind(self, op: NativeOp | None) -> Callable[[Any, tuple, dict], Any]:
        """Return the dispatch of one row, as ``run(func, args, kwargs)``."""

    def result_shapes(self, name: str, shapes: tuple, static_args: Any) -> tuple[tuple[int, ...], ...]:
        """Shapes of the results of a canonical operation, as its rule gives them. ``shapes`` has None for an operand
        that is no tensor. It serves backends whose kernels fail for tensors without elements."""
