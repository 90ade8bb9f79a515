"""Dry runs: functions of a framework for computing with shapes alone. All of it is optional."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

__all__ = ["DryRole", "Usage"]

Module = Any
Tensor = Any


@dataclass
class Usage:
    """Work and memory of this rank.

    Attributes:
        operations: (name, floating point operations, bytes that it reads and writes, bytes of an element) -> how
            often it was called. A multiplication and an addition are two operations.
        live: bytes of the storages that were made inside and still exist.
        timeline: an entry for each operation, and each change of a storage's size. It has a number for the kind of
            event, equal for equal ones, and the most bytes that have lived since the entry before.
    """

    operations: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    live: int = 0
    timeline: list[tuple[int, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The most that `live` has been."""
        return max((live for _, live in self.timeline), default=0)


class DryRole:
    """Tensors with shapes and without data, and the cost of operations on them."""

    #: Whether computations need the values of tensors: not in a dry run, where the framework has tensors without.
    needs_values: bool = True

    #: ``"module:class"`` of the platform for dry runs of this framework, with a device on which tensors have no data;
    #: None where the framework has no such device. Its collectives are replaced, see `hyper_parallel.platform.dry`.
    dry_class: ClassVar[str | None] = None

    #: Whether this is a platform of dry runs, whose groups are none.
    sends_nothing: bool = False

    def copy_without_data(self, module: Module) -> Module:
        """A copy of a module for a dry run, on the device of this platform. Its tensors need no values. Unless a
        framework has tensors without data, it is a deep copy."""
        return copy.deepcopy(module)

    def without_data(self) -> AbstractContextManager:
        """Inside, tensors that the program makes without naming a device have no data, if the platform has such."""
        return nullcontext()

    def differentiate(self, call: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Call ``call``, which returns a scalar, and return its gradients as a training loop of the framework does.
        They are with respect to ``parameters``, DTensors or plain ones."""
        raise TypeError(f"{type(self).__name__} does not say how it differentiates")

    def recompute(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``call(*args, **kwargs)``, of which backward keeps the arguments alone and computes the rest again."""
        raise TypeError(f"{type(self).__name__} does not compute forwards again in backward")

    def make_decoder(self, sizes: Mapping[str, int]) -> Module:
        """A decoder with the layers, names and shapes of Llama, for models that are given by name:
        ``model.embed_tokens``, ``model.layers.*.self_attn.q_proj`` and so on. Called inside `without_data`.

        Args:
            sizes: ``hidden``, ``intermediate``, ``layers``, ``heads``, ``key_value_heads``, ``vocabulary``.
        """
        raise TypeError(f"{type(self).__name__} makes no models: give one, as package.module:function")

    def usage(self) -> AbstractContextManager[Usage] | None:
        """Context manager that gives the `Usage` of the operations inside, forward and backward. None where the
        framework does not tell of its operations."""
        return None

    def optimizer_bytes(self, parameters: Any, optimizer: str) -> int | None:
        """Bytes of the state that an optimizer of the framework keeps for ``parameters`` of this rank. ``optimizer`` is
        its name (``"AdamW"``, ``"SGD"``, ...), with its defaults. Parameters are DTensors or plain. None where the
        framework has none of that name, or makes no state for tensors without data."""
        return None
