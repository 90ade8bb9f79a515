"""Plain local tensors: queries, and the few operations that redistribution and losses need."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["TensorRole"]

Tensor = Any


class TensorRole(ABC):
    """Tensors that one rank holds."""

    #: The framework's classes of tensors, parameters and shapes. ``Size`` is a tuple or a subclass of it.
    Tensor: Any
    Parameter: Any
    Size: Any
    #: The framework's name of the dense memory layout, where it has one.
    dense_layout: Any = None
    #: Whether a maximum or minimum is NaN whenever any element is NaN.
    extremes_keep_nan: bool = True
    #: Whether element-wise operations give results with the memory order of their first operand, and draw random
    #: numbers in that order. Otherwise both are in row-major order.
    keeps_memory_order: bool = True
    #: Whether `contiguous` copies a contiguous view that starts after the first element of its base.
    copies_offsets: bool = False

    def is_tensor(self, x: Any) -> bool:
        """Return whether ``x`` is a tensor of the framework (including DTensors)."""
        return isinstance(x, self.Tensor)

    def foreign_tensor(self, x: Any) -> str | None:
        """Describe ``x``, with a remedy, if it cannot be the local tensor of a DTensor, or cannot meet DTensors. Such
        tensors compute in their own way, or are not stored as one dense array. The description is like "a tensor of the
        class ..., of torch.distributed.tensor". None for all other values."""
        return None

    @abstractmethod
    def is_floating_point(self, x: Tensor) -> bool:
        """Return whether ``x`` has a floating point dtype."""

    def is_meta(self, x: Tensor) -> bool:
        """Return whether ``x`` has a shape and dtype but no data."""
        return False

    #: Whether a detached tensor, slice or copy of a tensor without values has no values either. Otherwise a parameter
    #: without values gets memory for the rank's shard when it is distributed. It is NaN until it is loaded.
    keeps_meta: bool = True

    def has_values(self, x: Tensor) -> bool:
        """Return whether the values of a plain tensor can be read with `bytes_of` and replaced with `write`. False for
        tensors without values (`is_meta`), and for special storage formats. All ranks get the same answer."""
        return not self.is_meta(x)

    @abstractmethod
    def bytes_of(self, x: Tensor) -> bytes:
        """Return the values of a plain local tensor on any device, in row-major order."""

    @abstractmethod
    def write(self, x: Tensor, values: Tensor) -> None:
        """Overwrite the values of a plain parameter or buffer with a plain tensor of the same shape and dtype. ``x``
        stays the same object, on its device. Called without gradients."""

    def watch(self: Any, x: Tensor, operation: str) -> Callable[[], str]:
        """Return ``how()``, which reports how the native ``operation`` has changed the plain tensor ``x``. Called
        before the operation. The report is ``""`` for no write, ``"recorded"`` for a write that autograd recorded, else
        ``"values"``. If a framework does not count writes, values are compared."""
        before = self.bytes_of(self.detach(x))
        return lambda: "" if self.bytes_of(self.detach(x)) == before else "values"

    @abstractmethod
    def shape_of(self, local: Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor as the framework stores it: for a DTensor, the local shape."""

    dtype_of: Any = staticmethod(lambda local: local.dtype)  #: dtype of any tensor; interception is off

    @abstractmethod
    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Return the strides of a local tensor, in elements. Called with interception off."""

    @abstractmethod
    def narrow(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        """Slice ``x`` along ``dim``; differentiable."""

    def chunk(self, x: Tensor, count: int, dim: int) -> Sequence[Tensor]:
        """Split ``x`` into ``count`` equal chunks along ``dim``, whose size ``count`` divides. Views where possible."""
        length = self.shape_of(x)[dim] // count
        return [self.narrow(x, dim, i * length, length) for i in range(count)]

    @abstractmethod
    def cat(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate along ``dim``; differentiable."""

    def join(self, xs: Sequence[Tensor]) -> Tensor:
        """Concatenate the elements of tensors of one dtype, each in row-major order, to a 1-D tensor.
        Differentiable."""
        return self.cat([x.reshape((math.prod(self.shape_of(x)),)) for x in xs], 0)

    def part(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Split ``x`` into consecutive tensors of these shapes: the inverse of `join`. Views where possible.
        Differentiable."""
        counts = list(map(math.prod, shapes))
        x = x.reshape((sum(counts),))
        return [
            self.narrow(x, 0, sum(counts[:i]), n).reshape(shape)
            for i, (n, shape) in enumerate(zip(counts, shapes, strict=True))
        ]

    def contiguous(self, x: Tensor) -> Tensor:
        """Return ``x`` dense and in row-major order. The result may be ``x`` itself, if ``x`` is dense and in this
        order. Differentiable."""
        return self.clone(x)

    @abstractmethod
    def clone(self, x: Tensor) -> Tensor:
        """Return a contiguous copy. Differentiable."""

    @abstractmethod
    def full(self, shape: Sequence[int], value: float, like: Tensor) -> Tensor:
        """Return a tensor filled with ``value``, with dtype and device of ``like``."""

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return zeros with dtype and device of ``like``."""
        return self.full(shape, 0, like)

    def ones(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return ones with dtype and device of ``like``."""
        return self.full(shape, 1, like)

    @abstractmethod
    def with_strides(self, x: Tensor, strides: Sequence[int], behind: bool = False) -> Tensor:
        """Copy ``x`` to new memory with these strides. Each stride is a multiple of the next smaller one; gaps are
        allowed. With ``behind``, on a platform that `copies_offsets`, the copy starts after the first element of its
        memory. Differentiable."""

    @abstractmethod
    def masked_fill(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        """Return ``value`` where ``mask`` (broadcast to ``x``) is true, else ``x``. Differentiable."""

    def unsqueeze(self, x: Tensor, dim: int) -> Tensor:
        """Add a dimension of size 1. Differentiable."""
        shape = [*self.shape_of(x)]
        shape.insert(dim if dim >= 0 else dim + len(shape) + 1, 1)
        return x.reshape(tuple(shape))

    @abstractmethod
    def to_dtype(self, x: Tensor, dtype: Any) -> Tensor:
        """Return ``x`` converted to a dtype of the framework, or ``x`` itself. Differentiable."""

    def as_index(self, x: Tensor) -> Tensor:
        """Return the integers ``x`` in a dtype that can hold every index and its negative. By default ``x`` itself."""
        return x

    @abstractmethod
    def amax(self, x: Tensor, dim: int) -> Tensor:
        """Return the maximum along the non-empty ``dim``, with size 1 there; in float32 for a dtype of fewer bits."""

    @abstractmethod
    def sum_along(self, x: Tensor, dim: int) -> Tensor:
        """Return the sum along ``dim``, which keeps size 1. Differentiable, also for an empty ``x``: the sum is zero
        then, and its gradient still reaches ``x``."""

    @abstractmethod
    def shifted_exp(self, x: Tensor, shift: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return ``exp(x - shift) / scale``, of the shape of ``x``, in the wider of the dtypes. Called outside
        autograd, so it may compute in place."""

    @abstractmethod
    def log(self, x: Tensor) -> Tensor:
        """Return the natural logarithm. Differentiable."""

    @abstractmethod
    def gather(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """Return the elements of ``x`` at ``index``. ``index`` has the shape of ``x``, but size 1 along ``dim``.
        Differentiable."""

    @abstractmethod
    def scatter_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        """Add ``source`` to ``x`` at the elements that `gather` would read. ``x`` may be overwritten.
        Differentiable."""

    def places(self: Any, values: np.ndarray, like: Tensor) -> Tensor:
        """Return an int64 tensor of ``values`` that may index tensors on the device of ``like``; by default on the
        host."""
        return self.host_tensor(values)
