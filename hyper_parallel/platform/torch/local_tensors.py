"""Operations on plain local tensors.

Where torch has a function of the same arguments, that is the verb, which saves a call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.torch.private import flatten, unflatten

__all__ = ["LocalVerbs"]

T: Any = torch.Tensor


@lru_cache(maxsize=1 << 10)
def _shaped(shapes: tuple[tuple[int, ...], ...]) -> tuple[list[torch.Tensor], bool]:
    """Tensors without data that have these shapes, and whether one has no elements."""
    with torch.inference_mode(False):
        return [torch.empty(shape, device="meta") for shape in shapes], any(0 in shape for shape in shapes)


class LocalVerbs(Platform):
    """The verbs of `Platform` that compute on plain local tensors."""

    narrow: Any = staticmethod(T.narrow)
    chunk: Any = staticmethod(torch.chunk)
    cat: Any = staticmethod(torch.cat)
    contiguous: Any = staticmethod(T.contiguous)
    strides: Any = staticmethod(T.stride)
    masked_fill: Any = staticmethod(T.masked_fill)
    to_dtype: Any = staticmethod(T.to)
    log: Any = staticmethod(T.log)

    def clone(self, x: torch.Tensor) -> torch.Tensor:
        """See `Platform.clone`."""
        return x.clone(memory_format=torch.contiguous_format)

    def join(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Platform.join`."""
        return flatten(xs) if len(xs) > 1 else self.clone(xs[0]).reshape(-1)

    def part(self, x: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """See `Platform.part`."""
        wanted, any_empty = _shaped(tuple(map(tuple, shapes)))
        if any_empty:
            pieces = x.reshape(-1).split(list(map(math.prod, shapes)))
            return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return list(unflatten(x.reshape(-1), wanted))

    def zeros(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """See `Platform.zeros`."""
        return like.new_zeros(shape) if type(like) is torch.Tensor else self.full(shape, 0, like)

    def full(self, shape: Sequence[int], value: float, like: torch.Tensor) -> torch.Tensor:
        """See `Platform.full`."""
        return torch.full(tuple(shape), value, dtype=like.dtype, device=like.device)

    def ones_in_memory(self, shape: Sequence[int], strides: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """See `Platform.ones_in_memory`."""
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=like.dtype, device=like.device).fill_(1)

    def amax(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See `Platform.amax`."""
        largest = x.amax(dim, keepdim=True)
        return largest if largest.dtype is torch.float64 else largest.float()

    def sum_along(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See `Platform.sum_along`."""
        return x.sum(dim, keepdim=True)

    def shifted_exp(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """See `Platform.shifted_exp`."""
        y = torch.sub(x, shift).exp_()
        return y if scale is None else y.div_(scale)

    def gather(self, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        """See `Platform.gather`."""
        return torch.gather(x, dim, index.long())

    def scatter_add(self, x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """See `Platform.scatter_add`."""
        return x.scatter_add_(dim, index.long(), source)
