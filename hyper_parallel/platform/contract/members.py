"""Members of the frameworks' tensors that core uses, besides handing a tensor to the platform."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

__all__ = ["TensorMembers"]


class TensorMembers(Protocol):
    """Members of a plain tensor, and of a DTensor, that core uses.

    A tensor also takes attributes and weak references, and is hashed by identity. It has Python's operators:
    arithmetic, comparisons element by element, ``&``, ``|`` and ``~`` of booleans. ``+=``, ``-=`` and ``*=`` work in
    place. All operators broadcast as in NumPy, and are differentiable.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; for a DTensor, the global shape."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""

    @property
    def dtype(self) -> Any:
        """The framework's dtype. Dtypes are compared with ``==``."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""

    @property
    def requires_grad(self) -> bool:
        """Return whether the tensor requires a gradient."""

    @property
    def grad(self) -> Any:
        """The accumulated gradient, or None. The gradient of a DTensor is a DTensor."""

    @property
    def _version(self) -> int:
        """A number that increases with each in-place write to the tensor, also through a view."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Set whether the tensor requires a gradient. Returns the tensor."""

    def reshape(self, shape: Sequence[int]) -> Any:
        """Return the elements in row-major order in another shape; a view if strides allow that. Differentiable."""

    def sum(self) -> Any:
        """Return the sum of all elements as a 0-d tensor. Differentiable."""

    def any(self) -> Any:
        """Return whether any element of a boolean tensor is true, as a 0-d tensor."""

    def __getitem__(self, index: Any) -> Any:
        """Index as in NumPy; the result is a view for ints, slices, None and ``...``. Differentiable."""

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write in place."""

    def __len__(self) -> int:
        """Return the size of the first dimension."""

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the slices along the first dimension."""

    def __bool__(self) -> bool:
        """Return the value of a tensor of one element."""

    def __float__(self) -> float:
        """Return the value of a tensor of one element."""
