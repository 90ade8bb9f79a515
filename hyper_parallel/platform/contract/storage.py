"""Memory of plain local tensors: shared storage, and writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

__all__ = ["StorageRole"]

Tensor = Any


class StorageRole(ABC):
    """The memory of plain local tensors."""

    @abstractmethod
    def same_memory(self, x: Tensor, y: Tensor) -> bool:
        """Return whether ``y``, which is not empty, shares the storage of ``x``. Called with interception off."""

    def addresses(self, xs: Sequence[Tensor]) -> list[int]:
        """Return the address of the first element of each tensor, any number if it has no memory. Return nothing in a
        framework in which programs cannot give a tensor other memory. Called with interception off."""
        return []

    def span(self, x: Tensor) -> tuple[str, int, int] | None:
        """Return the memory of a plain tensor with values: its device, the address of its first byte, and the end
        address. None if these are unknown. Called with interception off."""
        return None

    #: Whether ``_version`` of a tensor counts every write to it, including those of optimizers.
    counts_writes: bool = True

    def counted_apart(self, x: Tensor) -> Tensor:
        """Return another tensor with the memory of ``x``, without autograd history. Its ``_version`` counts writes to
        the new tensor, but not writes to ``x``. Called with interception off."""
        return x

    def for_training(self) -> AbstractContextManager:
        """Return a context manager in which new tensors can take part in training, even if the program runs inference
        now."""
        return nullcontext()

    def as_parameter(self, x: Tensor, in_buffer: bool = False) -> Tensor:
        """Give ``x``, a new tensor, the writing methods of a parameter, and return it.

        Modules call these methods, and tensors lack them. ``in_buffer`` says that ``x`` is a view of a buffer.
        """
        return x

    def stand_for(self, xs: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Copy attributes that programs read from ``parameters`` to ``xs``, which replace the parameters in modules."""
        return None

    def seen_writes(self, xs: Sequence[Tensor]) -> Sequence[int]:
        """Return the indices of tensors with uncounted writes since the last call. `stand_for` got these tensors.

        The operations decide, not the written values. So all ranks get the same indices.
        """
        return ()

    def become(self, x: Tensor, values: Tensor) -> None:
        """Give ``x`` the shape and the values of ``values``. ``x`` is a plain tensor, not a parameter, and stays the
        same object. Called without gradients."""
        raise TypeError(f"{type(self).__name__} cannot give a tensor another shape")
