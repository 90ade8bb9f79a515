"""Operations on plain local tensors.

If torch has a function with the arguments of a verb, the verb is that function, which saves a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.torch.basics.private import flatten, unflatten

__all__ = ["LocalVerbs"]


@lru_cache(maxsize=1 << 10)
def _shaped(shapes: tuple[tuple[int, ...], ...]) -> tuple[list[Tensor], bool]:
    """Return data-free tensors of these shapes, and whether a tensor among them is empty."""
    with torch.inference_mode(False):
        return [torch.empty(shape, device="meta") for shape in shapes], any(0 in shape for shape in shapes)


class LocalVerbs(Platform):
    """Verbs of `Platform` that compute on plain local tensors."""

    narrow: Any = staticmethod(Tensor.narrow)
    chunk: Any = staticmethod(torch.chunk)
    cat: Any = staticmethod(torch.cat)
    contiguous: Any = staticmethod(Tensor.contiguous)
    strides: Any = staticmethod(Tensor.stride)
    masked_fill: Any = staticmethod(Tensor.masked_fill)
    to_dtype: Any = staticmethod(Tensor.to)
    log: Any = staticmethod(Tensor.log)
    as_index: Any = staticmethod(Tensor.long)

    def clone(self, x: Tensor) -> Tensor:
        """Return a contiguous copy."""
        return x.clone(memory_format=torch.contiguous_format)

    def addresses(self, xs: Sequence[Tensor]) -> list[int]:
        """Return the address of the first element of each tensor; see `Platform.addresses`."""
        return list(map(Tensor.data_ptr, xs))

    def span(self, x: Tensor) -> tuple[str, int, int] | None:
        """Return where the memory of ``x`` begins and ends, or None for a fake tensor; see `Platform.span`."""
        begin = x.data_ptr()
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        return (str(x.device), begin, begin + (last + 1) * x.itemsize) if begin else None

    def join(self, xs: Sequence[Tensor]) -> Tensor:
        """Concatenate the elements of tensors to a 1-D tensor."""
        return flatten(xs) if len(xs) > 1 else self.clone(xs[0]).reshape(-1)

    def part(self, x: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Split ``x`` into consecutive tensors of these shapes."""
        wanted, any_empty = _shaped(tuple(map(tuple, shapes)))
        if any_empty:
            pieces = x.reshape(-1).split(list(map(math.prod, shapes)))
            return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return list(unflatten(x.reshape(-1), wanted))

    def zeros(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return zeros with dtype and device of ``like``."""
        return like.new_zeros(shape) if type(like) is Tensor else self.full(shape, 0, like)

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return an uninitialized buffer."""
        return like.new_empty(shape)

    def full(self, shape: Sequence[int], value: float, like: Tensor) -> Tensor:
        """Return a tensor filled with ``value``."""
        return torch.full(tuple(shape), value, dtype=like.dtype, device=like.device)

    def with_strides(self, x: Tensor, strides: Sequence[int], behind: bool = False) -> Tensor:
        """Copy ``x`` to new memory with these strides; see `Platform.with_strides`."""
        return torch.empty_strided(x.shape, tuple(strides), dtype=x.dtype, device=x.device).copy_(x)

    def amax(self, x: Tensor, dim: int) -> Tensor:
        """Return the maximum along ``dim``, which keeps size 1."""
        largest = x.amax(dim, keepdim=True)
        return largest if largest.dtype is torch.float64 else largest.float()

    def sum_along(self, x: Tensor, dim: int) -> Tensor:
        """Return the sum along ``dim``, which keeps size 1."""
        return x.sum(dim, keepdim=True)

    def shifted_exp(self, x: Tensor, shift: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return ``exp(x - shift) / scale``; see `Platform.shifted_exp`."""
        y = torch.sub(x, shift).exp_()
        return y if scale is None else y.div_(scale)

    def gather(self, x: Tensor, dim: int, index: Tensor) -> Tensor:
        """Return the elements of ``x`` at ``index`` along ``dim``."""
        return torch.gather(x, dim, index.long())

    def scatter_add(self, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
        """Add ``source`` to ``x`` at ``index`` along ``dim``; see `Platform.scatter_add`."""
        return x.scatter_add_(dim, index.long(), source)

    def become(self, x: Tensor, values: Tensor) -> None:
        """Give ``x`` the shape and the values of ``values``."""
        values = values.clone()  # it may be a view of x
        x.resize_(values.shape).copy_(values)

    def places(self, values: np.ndarray, like: Tensor) -> Tensor:
        """Return an int64 tensor of ``values`` that may index tensors on the device of ``like``."""
        return torch.from_numpy(values).to(like.device)
