"""Collectives that torch's compiler sees, in pairs of forward and backward, on plain local tensors.

The operators are those below torch's functional collectives: Inductor knows them, and may reorder, bucket and fuse
them. As in `core.communication.transitions`, the cotangent of a tensor that all ranks have is whole. Parts have parts
as cotangents. The functions ending on ``for_parts`` have consumers each of which returns a summand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hyper_parallel.platform.torch.basics.private import functional_collectives

__all__ = [
    "exchange",
    "gather",
    "gather_for_parts",
    "largest_of",
    "one_summand",
    "read_for_parts",
    "scatter",
    "slice_",
    "sum_up",
]

_ops = functional_collectives


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))


def largest_of(x: Tensor, size: int, group: str) -> Tensor:
    """The largest of all ranks' values; not differentiable."""
    return x if size == 1 else _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group))


def _all_gather(x: Tensor, dim: int, sizes: tuple[int, ...], size: int, group: str) -> Tensor:
    """Gather ``x`` of all ranks along ``dim``. ``sizes`` has their lengths there, and is empty where they are equal."""
    if sizes and min(sizes) != max(sizes):
        x = _padded(x, dim, max(sizes))
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))
    if sizes and min(sizes) != max(sizes):
        parts = whole.chunk(size, 0)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim)
    return torch.cat(whole.chunk(size, 0), dim) if dim else whole


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim) if shape[dim] else x


def _reduce_scatter(x: Tensor, dim: int, sizes: tuple[int, ...], size: int, rank: int, group: str) -> Tensor:
    uneven = bool(sizes) and min(sizes) != max(sizes)
    parts = x.split(sizes, dim) if uneven else x.chunk(size, dim)
    if uneven:
        parts = [_padded(part, dim, max(sizes)) for part in parts]
    rows = torch.cat(tuple(parts), 0) if dim or uneven else x.contiguous()
    y = _ops.wait_tensor(_ops.reduce_scatter_tensor(rows, "sum", size, group))
    return y.narrow(dim, 0, sizes[rank]) if uneven else y


def _own_part(x: Tensor, dim: int, sizes: tuple[int, ...], size: int, rank: int) -> Tensor:
    parts = x.split(sizes, dim) if sizes else x.chunk(size, dim)
    return parts[rank].contiguous()


class _ReadForParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _all_reduce(g, ctx.group), None


class _SumUp(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], size: int, rank: int, group: str) -> Tensor:
        ctx.how = dim, sizes, size, rank
        return _all_gather(x, dim, sizes, size, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _own_part(g, *ctx.how), None, None, None, None, None


class _GatherForParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], size: int, rank: int, group: str) -> Tensor:
        ctx.how = dim, sizes, size, rank, group
        return _all_gather(x, dim, sizes, size, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _reduce_scatter(g, *ctx.how), None, None, None, None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], size: int, rank: int, group: str) -> Tensor:
        ctx.how = dim, sizes, size, group
        return _own_part(x, dim, sizes, size, rank)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _all_gather(g, *ctx.how), None, None, None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], size: int, rank: int, group: str) -> Tensor:
        ctx.how = dim, sizes, size, group
        return _reduce_scatter(x, dim, sizes, size, rank, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _all_gather(g, *ctx.how), None, None, None, None, None


def _all_to_all(x: Tensor, source: int, target: int, size: int, group: str) -> Tensor:
    rows = torch.cat(x.chunk(size, target), 0)
    count = rows.shape[0] // size
    got = _ops.wait_tensor(_ops.all_to_all_single(rows, [count] * size, [count] * size, group))
    return torch.cat(got.chunk(size, 0), source)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: int, target: int, size: int, group: str) -> Tensor:
        ctx.how = target, source, size, group
        return _all_to_all(x, source, target, size, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _all_to_all(g, *ctx.how), None, None, None, None


class _OneSummand(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        return torch.zeros_like(x) if rank else x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, None


#: Megatron's f: a tensor that all ranks have, for consumers that each return a summand of the cotangent.
read_for_parts = _ReadForParts.apply
#: Megatron's g: summands to their sum.
sum_up = _SumUp.apply
#: Parts to the whole, for consumers that return the whole cotangent.
gather = _Gather.apply
#: Parts to the whole, for consumers that each return a summand of the cotangent.
gather_for_parts = _GatherForParts.apply
#: The whole to this rank's part.
slice_ = _Slice.apply
#: Summands to this rank's part of their sum.
scatter = _Scatter.apply
#: Parts along one dimension to parts along another.
exchange = _Exchange.apply
#: A tensor that all ranks have, as summands: one rank has the value and the others zeros.
one_summand = _OneSummand.apply
