"""Members of the frameworks' tensors that core uses, besides handing a tensor to the platform."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

__all__ = ["TensorMembers"]


class TensorMembers(Protocol):
    """The members of a plain tensor, and of a DTensor, that core uses.

    Besides these, a tensor takes attributes and weak references, and its hash is that of the object. It has Python's
    operators: arithmetic, comparisons element by element, ``&``, ``|`` and ``~`` of booleans. ``+=``, ``-=`` and ``*=``
    work in place. They broadcast as NumPy's do and carry gradients.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; of a DTensor, the global one."""

    @property
    def ndim(self) -> int:
        """How many dimensions there are."""

    @property
    def dtype(self) -> Any:
        """The framework's dtype. Two are compared with ``==``."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""

    @property
    def requires_grad(self) -> bool:
        """Return whether gradients are asked for."""

    @property
    def grad(self) -> Any:
        """The gradient that the framework has left here, or None; of a DTensor a DTensor."""

    @property
    def _version(self) -> int:
        """A number that grows when the framework writes to the tensor in place, also through a view."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Ask for gradients, or no longer. Returns the tensor."""

    def reshape(self, shape: Sequence[int]) -> Any:
        """Return the elements in row-major order in another shape; a view where strides allow it. Differentiable."""

    def sum(self) -> Any:
        """The sum of all elements, without dimensions. Differentiable."""

    def any(self) -> Any:
        """Return whether any element of a tensor of booleans is true, as a tensor without dimensions."""

    def __getitem__(self, index: Any) -> Any:
        """Indexing as NumPy has it; a view for ints, slices, None and dots. Differentiable."""

    def __setitem__(self, index: Any, value: Any) -> None:
        """A write in place."""

    def __len__(self) -> int:
        """The size of the first dimension."""

    def __iter__(self) -> Iterator[Any]:
        """The slices along the first dimension."""

    def __bool__(self) -> bool:
        """The value of a tensor of one element."""

    def __float__(self) -> float:
        """The value of a tensor of one element."""
