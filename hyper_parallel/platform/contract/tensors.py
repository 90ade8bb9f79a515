"""Plain local tensors: questions about one, and the few operations that redistribution and losses need."""

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
    #: The framework's name of its usual layout of tensors in memory, where it has one.
    dense_layout: Any = None
    #: Whether the largest and the smallest of numbers with a NaN among them are NaN, wherever the NaN stands.
    extremes_keep_nan: bool = True
    #: Whether element-wise operations give results that lie in memory in the order of their first operand, and draw
    #: random numbers in that order; else both are in row-major order.
    keeps_memory_order: bool = True
    #: Whether `contiguous` copies a contiguous view that begins behind the first element of its base.
    copies_offsets: bool = False

    def is_tensor(self, x: Any) -> bool:
        """Return whether ``x`` is a tensor of the framework (distributed ones included)."""
        return isinstance(x, self.Tensor)

    def foreign_tensor(self, x: Any) -> str | None:
        """Return the description of ``x`` for messages, and its remedy, if it cannot be the local part of a DTensor.
        The same goes for a tensor that cannot meet one. Such tensors compute in a way of their own, or are not stored
        as one dense array. The description is like "a tensor of the class ..., of torch.distributed.tensor". Other
        values give None."""
        return None

    @abstractmethod
    def is_floating_point(self, x: Tensor) -> bool:
        """Return whether ``x`` has a floating point dtype."""

    def is_meta(self, x: Tensor) -> bool:
        """Return whether ``x`` has a shape and dtype but no data."""
        return False

    #: Whether a detached tensor, slice or copy of a tensor without values has none either. Otherwise a parameter
    #: without values gets memory when it is distributed, for the rank's part, and is NaN until it is loaded.
    keeps_meta: bool = True

    def has_values(self, x: Tensor) -> bool:
        """Return whether the values of a plain tensor can be read with `bytes_of` and replaced with `write`: not where
        there are none (`is_meta`), nor in a format other than the usual one. Decided from facts that all ranks share.
        """
        return not self.is_meta(x)

    @abstractmethod
    def bytes_of(self, x: Tensor) -> bytes:
        """The values of a plain local tensor on any device, in row-major order."""

    @abstractmethod
    def write(self, x: Tensor, values: Tensor) -> None:
        """Replace the values of a plain parameter or buffer by those of a plain tensor of its shape and dtype. It stays
        the same object, on its device. Called without gradients."""

    def watch(self: Any, x: Tensor, operation: str) -> Callable[[], str]:
        """To be called before the native ``operation`` gets a plain tensor. Gives ``how()``, which reports later writes
        to the tensor: ``""`` for nothing, ``"recorded"`` for a change that gradients pass through, else
        ``"values"``. Unless a framework counts writes, values are compared."""
        before = self.bytes_of(self.detach(x))
        return lambda: "" if self.bytes_of(self.detach(x)) == before else "values"

    @abstractmethod
    def shape_of(self, local: Tensor) -> tuple[int, ...]:
        """Shape of a tensor as the framework holds it: of a DTensor, the local shape."""

    dtype_of: Any = staticmethod(lambda local: local.dtype)  #: of a tensor, distributed or not; interception is off

    @abstractmethod
    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Strides of a local tensor, in elements. Called with interception off."""

    @abstractmethod
    def narrow(self, x: Tensor, dim: int, start: int, length: int) -> Tensor:
        """Slice ``x`` along ``dim``; differentiable."""

    def chunk(self, x: Tensor, count: int, dim: int) -> Sequence[Tensor]:
        """The ``count`` equal parts of ``x`` along ``dim``, whose size ``count`` divides. Views where possible."""
        length = self.shape_of(x)[dim] // count
        return [self.narrow(x, dim, i * length, length) for i in range(count)]

    @abstractmethod
    def cat(self, xs: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate along ``dim``; differentiable."""

    def join(self, xs: Sequence[Tensor]) -> Tensor:
        """The elements of tensors of one dtype, each in row-major order, as a 1-D tensor. Differentiable."""
        return self.cat([x.reshape((math.prod(self.shape_of(x)),)) for x in xs], 0)

    def part(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """The inverse of `join`: tensors of these shapes, views of ``x`` where possible. Differentiable."""
        counts = list(map(math.prod, shapes))
        x = x.reshape((sum(counts),))
        return [
            self.narrow(x, 0, sum(counts[:i]), n).reshape(shape)
            for i, (n, shape) in enumerate(zip(counts, shapes, strict=True))
        ]

    def contiguous(self, x: Tensor) -> Tensor:
        """``x``, dense and in row-major order; ``x`` itself, or a copy, if it is so already. Differentiable."""
        return self.clone(x)

    @abstractmethod
    def clone(self, x: Tensor) -> Tensor:
        """A contiguous copy. Differentiable."""

    @abstractmethod
    def full(self, shape: Sequence[int], value: float, like: Tensor) -> Tensor:
        """A tensor of ``value`` everywhere, with dtype and device of ``like``."""

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Zeros with dtype and device of ``like``."""
        return self.full(shape, 0, like)

    def ones(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Ones with dtype and device of ``like``."""
        return self.full(shape, 1, like)

    @abstractmethod
    def with_strides(self, x: Tensor, strides: Sequence[int], behind: bool = False) -> Tensor:
        """``x`` in new memory with these strides: each is a multiple of the next smaller one; there may be gaps. With
        ``behind``, where the platform `copies_offsets`, it begins behind the first of that memory. Differentiable."""

    @abstractmethod
    def masked_fill(self, x: Tensor, mask: Tensor, value: float) -> Tensor:
        """``value`` where ``mask`` (broadcast to ``x``), else ``x``. Differentiable."""

    def unsqueeze(self, x: Tensor, dim: int) -> Tensor:
        """Add a dimension of size 1. Differentiable."""
        shape = [*self.shape_of(x)]
        shape.insert(dim if dim >= 0 else dim + len(shape) + 1, 1)
        return x.reshape(tuple(shape))

    @abstractmethod
    def to_dtype(self, x: Tensor, dtype: Any) -> Tensor:
        """``x`` converted to the dtype of the framework, or ``x`` itself. Differentiable."""

    @abstractmethod
    def amax(self, x: Tensor, dim: int) -> Tensor:
        """The largest along ``dim``, which has elements and keeps size 1; in float32 where ``x`` is narrower."""

    @abstractmethod
    def sum_along(self, x: Tensor, dim: int) -> Tensor:
        """The sum along ``dim``, which keeps size 1. Differentiable, and if ``x`` has no elements too: the sum is zero
        then, and its gradient is still passed on to ``x``."""

    @abstractmethod
    def shifted_exp(self, x: Tensor, shift: Tensor, scale: Tensor | None = None) -> Tensor:
        """``exp(x - shift) / scale``, of the shape of ``x``, in the wider of the dtypes. Called where nothing is
        recorded, so it may compute in place."""

    @abstractmethod
    def log(self, x: Tensor) -> Tensor:
        """Natural logarithm. Differentiable."""

    @abstractmethod
    def gather(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """The elements of ``x`` at ``index``, which has size 1 along ``dim`` and else its shape. Differentiable."""

    @abstractmethod
    def scatter_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        """``x``, which may be overwritten, with ``source`` added where `gather` would read. Differentiable."""

    def places(self: Any, values: np.ndarray, like: Tensor) -> Tensor:
        """A tensor of int64 values that may index tensors on the device of ``like``; by default on the host."""
        return self.host_tensor(values)
