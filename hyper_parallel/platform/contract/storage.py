"""Memory of plain local tensors: shared storage, and writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

__all__ = ["StorageRole"]

Tensor = Any


class StorageRole(ABC):
    """The memory of plain local tensors."""

    @abstractmethod
    def same_memory(self, x: Tensor, y: Tensor) -> bool:
        """Return whether ``y``, which is not empty, shares the storage of ``x``. Called with interception off."""

    #: Whether ``_version`` of a tensor counts every write to it, including those of optimizers.
    counts_writes: bool = True

    def counted_apart(self, x: Tensor) -> Tensor:
        """Return another tensor with the memory of ``x``, without autograd history. Its ``_version`` counts writes to
        the new tensor, but not writes to ``x``. Called with interception off."""
        return x

    def as_parameter(self, x: Tensor, in_buffer: bool = False) -> Tensor:
        """Give ``x``, a new tensor, the writing methods of a parameter, and return it.

        Modules call these methods, and tensors lack them. ``in_buffer`` says that ``x`` is a view of a buffer.
        """
        return x

    def stand_for(self, xs: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Copy attributes that programs read from ``parameters`` to ``xs``, which replace the parameters in modules."""
        return None

    def become(self, x: Tensor, values: Tensor) -> None:
        """Give ``x`` the shape and the values of ``values``. ``x`` is a plain tensor, not a parameter, and stays the
        same object. Called without gradients."""
        raise TypeError(f"{type(self).__name__} cannot give a tensor another shape")
