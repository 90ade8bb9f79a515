"""Dry runs: functions of a framework for computing with shapes alone. All these functions are optional."""

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
        operations: (name, floating point operations, bytes read and written, bytes of an element) -> number of calls. A
            multiplication and an addition are two operations.
        live: bytes of the storages that were allocated inside the context and still exist.
        timeline: an entry for each operation, and each change of a storage's size. It is a number that identifies the
            kind of event, and the peak of live bytes since the previous entry.
    """

    operations: Counter[tuple[str, int, int, int]] = field(default_factory=Counter)
    live: int = 0
    timeline: list[tuple[int, int]] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The maximum of `live` over time."""
        return max((live for _, live in self.timeline), default=0)


class DryRole:
    """Tensors with shapes and without data, and the cost of operations on them."""

    #: Whether computations need the values of tensors. False in a dry run of a framework that has tensors without
    #: values.
    needs_values: bool = True

    #: ``"module:class"`` of the platform for dry runs of this framework, with a device on which tensors have no data.
    #: None where the framework has no such device. `hyper_parallel.platform.dry` replaces its collectives.
    dry_class: ClassVar[str | None] = None

    #: Whether this is a platform for dry runs, without process groups.
    sends_nothing: bool = False

    def copy_without_data(self, module: Module) -> Module:
        """Return a copy of a module for a dry run, on the device of this platform. Its tensors need no values. In a
        framework without such tensors, the copy is deep."""
        return copy.deepcopy(module)

    def without_data(self) -> AbstractContextManager:
        """Return a context in which tensors created without a device have no data, if the platform supports that."""
        return nullcontext()

    def differentiate(self, call: Callable[[], Tensor], parameters: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of the scalar that ``call()`` returns, computed as in a training loop of the framework.

        There is one gradient for each of ``parameters``, which are DTensors or plain tensors.
        """
        raise TypeError(f"{type(self).__name__} does not implement gradients for dry runs")

    def recompute(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``call(*args, **kwargs)`` under activation checkpointing: it saves the arguments alone for backward and
        recomputes the rest."""
        raise TypeError(f"{type(self).__name__} does not support activation checkpointing in dry runs")

    def make_decoder(self, sizes: Mapping[str, int]) -> Module:
        """Return a decoder with the layers, names and shapes of Llama, for models that are given by name:
        ``model.embed_tokens``, ``model.layers.*.self_attn.q_proj`` and so on. Called inside `without_data`.

        Args:
            sizes: ``hidden``, ``intermediate``, ``layers``, ``heads``, ``key_value_heads``, ``vocabulary``.
        """
        raise TypeError(f"{type(self).__name__} has no models by name: pass package.module:function")

    def usage(self) -> AbstractContextManager[Usage] | None:
        """Return a context manager that yields the `Usage` of the operations inside, forward and backward. None where
        the framework does not report its operations."""
        return None

    def optimizer_bytes(self, parameters: Any, optimizer: str) -> int | None:
        """Return the bytes of optimizer state for ``parameters`` of this rank, DTensors or plain tensors. ``optimizer``
        is the name of a class of the framework (``"AdamW"``, ``"SGD"``, ...), used with its defaults. None if there is
        no such class, or it makes no state for tensors without data."""
        return None
