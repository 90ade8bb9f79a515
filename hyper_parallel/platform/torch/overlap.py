"""Linear layers whose collective goes on while they compute: cut into chunks, of which one is multiplied while another
is on its way ("collective matmul").

What is gathered or scattered lies along one dimension, in a part for each rank. A chunk takes a piece of every part, so
that each chunk is a collective of the ordinary kind, and all together move what one would. Transfers are hidden; the
price are smaller products and copies of the pieces.

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition"; Megatron-LM's sequence
parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.torch.private import any_autocast

__all__ = ["chunks_of", "run"]

Record = Callable[[str, torch.Tensor], None]


def chunks_of(collective: str, x: torch.Tensor, weight: torch.Tensor, size: int, dim: int, wanted: int) -> int:
    """How many chunks to cut into, at most ``wanted``; 1 where it cannot be done.

    Args:
        collective, x, weight, size, dim: as for `Platform.linear_with_collective`.
        wanted: chunks asked for.
    """
    if x.dim() < 2 or weight.dim() != 2 or 0 in x.shape or 0 in weight.shape:
        return 1
    if not x.is_floating_point() or x.dtype is not weight.dtype or any_autocast():
        return 1
    if collective == "all_reduce":
        return min(wanted, x.numel() // x.shape[-1])
    length = x.shape[dim]
    if collective == "reduce_scatter":
        if length % size:
            return 1
        length //= size
    return next(n for n in range(min(wanted, length), 0, -1) if length % n == 0)


def run(
    collective: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    group: Any,
    size: int,
    dim: int,
    chunks: int,
    record: Record,
) -> torch.Tensor:
    """See `Platform.linear_with_collective`; ``group`` is a ``ProcessGroup``."""
    function: Any = {"all_reduce": _AllReduce, "all_gather": _AllGather, "reduce_scatter": _ReduceScatter}[collective]
    return function.apply(x, weight, _Chunked(group, size, dim, chunks, record))


class _Chunked:
    """Collectives that are started and waited for, and the pieces of which they work on.

    ``x`` below has the dimension ``dim`` with a part for each rank, or one rank's part of it.
    """

    def __init__(self, group: Any, size: int, dim: int, chunks: int, record: Record) -> None:
        self.group, self.size, self.dim, self.chunks, self.record = (
            group,
            size,
            dim,
            chunks,
            record,
        )

    def of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        """For each chunk the pieces of all ranks' parts, one after the other along dimension 0."""
        pieces = x.chunk(self.size * self.chunks, self.dim)
        return [torch.cat(pieces[i :: self.chunks], 0) for i in range(self.chunks)]

    def whole(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """The inverse of `of_all`."""
        pieces = [chunk.chunk(self.size, 0) for chunk in chunks]
        return torch.cat([pieces[i][rank] for rank in range(self.size) for i in range(self.chunks)], self.dim)

    def of_one(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The pieces of one rank's part."""
        return [piece.contiguous() for piece in x.chunk(self.chunks, self.dim)]

    def start_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What will be there, and what to wait for."""
        self.record("all_gather", x)
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        return out, self.group._allgather_base(out, x)

    def start_scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """As `start_gather`."""
        x = x.contiguous()
        self.record("reduce_scatter", x)
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        return out, (self.group._reduce_scatter_base(out, x), x)

    def finish_scatters(self, started: list[tuple[torch.Tensor, Any]]) -> torch.Tensor:
        """One rank's part."""
        for _, (work, _) in started:
            work.wait()
        return torch.cat([out for out, _ in started], self.dim)


def _by_weight(cotangent: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return cotangent.reshape(-1, cotangent.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class _AllReduce(torch.autograd.Function):
    """(..., in / ranks) -> (..., out), summed over the ranks. The gradient of the sum is that of each summand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, chunked: _Chunked) -> torch.Tensor:
        with no_dispatch():
            ctx.save_for_backward(x, weight)
            rows = x.reshape(-1, x.shape[-1])
            y = rows.new_empty((rows.shape[0], weight.shape[0]))
            works = []
            for part, out in zip(rows.chunk(chunked.chunks), y.chunk(chunked.chunks), strict=True):
                torch.mm(part, weight.t(), out=out)
                chunked.record("all_reduce", out)
                works.append(chunked.group.allreduce([out]))
            for work in works:
                work.wait()
            return y.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        with no_dispatch():
            x, weight = ctx.saved_tensors
            by_x = cotangent @ weight if ctx.needs_input_grad[0] else None
            return by_x, _by_weight(cotangent, x) if ctx.needs_input_grad[1] else None, None


class _ReduceScatter(torch.autograd.Function):
    """(..., in / ranks) -> this rank's part of (..., out) along the dimension; backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, chunked: _Chunked) -> torch.Tensor:
        with no_dispatch():
            ctx.save_for_backward(x, weight)
            ctx.chunked = chunked
            return chunked.finish_scatters([chunked.start_scatter(F.linear(p, weight)) for p in chunked.of_all(x)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        with no_dispatch():
            (x, weight), chunked = ctx.saved_tensors, ctx.chunked
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            started = [chunked.start_gather(part) for part in chunked.of_one(cotangent)]
            by_x, by_weight = [], None
            for (gathered, work), part in zip(started, chunked.of_all(x), strict=True):
                work.wait()
                if needs_x:
                    by_x.append(gathered @ weight)
                if needs_weight:
                    product = _by_weight(gathered, part)
                    by_weight = product if by_weight is None else by_weight.add_(product)
            return chunked.whole(by_x) if needs_x else None, by_weight, None


class _AllGather(torch.autograd.Function):
    """This rank's part of (..., in) -> (..., out / ranks); backward sums and scatters. What was gathered is kept for
    the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, chunked: _Chunked) -> torch.Tensor:
        with no_dispatch():
            ctx.chunked = chunked
            started = [chunked.start_gather(part) for part in chunked.of_one(x)]
            products = []
            for gathered, work in started:
                work.wait()
                products.append(F.linear(gathered, weight))
            ctx.save_for_backward(weight, *(gathered for gathered, _ in started))
            return chunked.whole(products)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        with no_dispatch():
            (weight, *gathered), chunked = ctx.saved_tensors, ctx.chunked
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            parts = chunked.of_all(cotangent)
            started = [chunked.start_scatter(part @ weight) for part in parts] if needs_x else []
            by_weight = None
            if needs_weight:
                for part, whole in zip(parts, gathered, strict=True):
                    product = _by_weight(part, whole)
                    by_weight = product if by_weight is None else by_weight.add_(product)
            return chunked.finish_scatters(started) if needs_x else None, by_weight, None
