"""The steps of `STEPS` on plain local tensors, with collectives that torch's compiler sees.

The collectives are the operators that torch's functional collectives call. Inductor knows these operators, and may
reorder, bucket and fuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hyper_parallel.platform.contract.programs import STEPS, SUMMANDS
from hyper_parallel.platform.torch.basics.private import functional_collectives

__all__ = ["largest_of", "read_for_parts", "sum_up", "take"]

_ops = functional_collectives


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))


def largest_of(x: Tensor, size: int, group: str) -> Tensor:
    """Return the elementwise maximum over all ranks; not differentiable."""
    return x if size == 1 else _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", group))


def _all_gather(x: Tensor, dim: int, sizes: tuple[int, ...], size: int, group: str) -> Tensor:
    """Gather ``x`` of all ranks along ``dim``. ``sizes`` has each rank's length along ``dim``; empty means equal
    lengths."""
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


def _all_to_all(x: Tensor, source: int, target: int, size: int, group: str) -> Tensor:
    rows = torch.cat(x.chunk(size, target), 0)
    count = rows.shape[0] // size
    got = _ops.wait_tensor(_ops.all_to_all_single(rows, [count] * size, [count] * size, group))
    return torch.cat(got.chunk(size, 0), source)


#: The movements of data in `STEPS`: ``move(x, source, target, sizes, size, rank, group)``.
_MOVES: dict[str, Callable[..., Tensor]] = {
    "keep": lambda x, source, target, sizes, size, rank, group: x.view_as(x),
    "sum": lambda x, source, target, sizes, size, rank, group: _all_reduce(x, group),
    "gather": lambda x, source, target, sizes, size, rank, group: _all_gather(x, source, sizes, size, group),
    "slice": lambda x, source, target, sizes, size, rank, group: _own_part(x, target, sizes, size, rank),
    "scatter": lambda x, source, target, sizes, *ranks: _reduce_scatter(x, target, sizes, *ranks),
    "exchange": lambda x, source, target, sizes, size, rank, group: _all_to_all(x, source, target, size, group),
    "one_summand": lambda x, source, target, sizes, size, rank, group: torch.zeros_like(x) if rank else x.clone(),
}


class _Step(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, name: str, source: Any, target: Any, sizes: tuple[int, ...], *ranks: Any
    ) -> Tensor:
        ctx.how = STEPS[STEPS[name].back].moves, target, source, sizes, *ranks
        return _MOVES[STEPS[name].moves](x, source, target, sizes, *ranks)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        name, *how = ctx.how
        return _MOVES[name](g, *how), None, None, None, None, None, None, None


#: ``take(x, name, source, target, sizes, size, rank, group)``: do a step of `STEPS`, with its backward.
#: ``sizes`` are the sizes of the shards; empty means equal sizes.
take = _Step.apply


def read_for_parts(x: Tensor, group: str) -> Tensor:
    """Return a replicated tensor for consumers that each return a partial cotangent: Megatron's f."""
    y: Tensor = take(x, "read_for_parts", None, None, (), 0, 0, group)
    return y


def sum_up(x: Tensor, group: str) -> Tensor:
    """Return the all-reduced partial sums: Megatron's g."""
    y: Tensor = take(x, "sum", SUMMANDS, None, (), 0, 0, group)
    return y
