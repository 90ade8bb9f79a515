"""Linear layers that overlap with their collective. Layer and collective are split into chunks: one chunk is multiplied
while another is communicated ("collective matmul").

The gathered or scattered tensor has a shard for each rank along one dimension. A chunk takes a piece of every shard. So
each chunk takes a collective of the same kind. Together these collectives move as many bytes as a single collective.
Communication is hidden, at the cost of smaller products and copies of the pieces.

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition"; Megatron-LM's sequence
parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass as no_dispatch

from hyper_parallel.platform.contract import LinearCollective
from hyper_parallel.platform.torch.basics.private import any_autocast

__all__ = ["FUNCTIONS", "chunks_of", "run"]


def chunks_of(x: Tensor, weight: Tensor, how: LinearCollective) -> int:
    """Return the number of chunks, at most the requested number; 1 if overlap is not possible.

    The arguments are as in `Fast.linear_with_collective`.
    """
    if x.dim() < 2 or weight.dim() != 2 or 0 in x.shape or 0 in weight.shape:
        return 1
    if not x.is_floating_point() or x.dtype is not weight.dtype or any_autocast():
        return 1
    if how.collective == "all_reduce":
        return min(how.chunks, x.numel() // x.shape[-1])
    length = x.shape[how.dim]
    if how.collective == "reduce_scatter":
        if length % how.size:
            return 1
        length //= how.size
    return next(n for n in range(min(how.chunks, length), 0, -1) if length % n == 0)


def run(x: Tensor, weight: Tensor, how: LinearCollective) -> Tensor:
    """Compute a linear layer overlapped with a collective, see `Fast.linear_with_collective`. ``how.group`` is a
    ``ProcessGroup``."""
    return FUNCTIONS[how.collective].apply(x, weight, _Chunked(how))


class _Chunked:
    """The chunked products and pending collectives of one linear layer.

    ``x`` below has all ranks' shards along the dimension ``dim``, or one rank's shard.
    """

    def __init__(self, how: LinearCollective) -> None:
        self.group, self.size, self.dim, self.chunks, self.record = how.group, how.size, how.dim, how.chunks, how.record

    def pieces(self, x: Tensor) -> list[Tensor]:
        """Return one tensor per chunk: the chunk's pieces of all ranks' shards, concatenated along dimension 0."""
        pieces = x.chunk(self.size * self.chunks, self.dim)
        return [torch.cat(pieces[i :: self.chunks], 0) for i in range(self.chunks)]

    def whole(self, chunks: list[Tensor]) -> Tensor:
        """Join the chunks in the original order: the inverse of `pieces`."""
        pieces = [chunk.chunk(self.size, 0) for chunk in chunks]
        return torch.cat([pieces[i][rank] for rank in range(self.size) for i in range(self.chunks)], self.dim)

    def reduce(self, x: Tensor, other: Tensor) -> Tensor:
        """Return ``x @ other``, summed over the ranks."""
        rows = x.reshape(-1, x.shape[-1])
        y = rows.new_empty((rows.shape[0], other.shape[1]))
        works = []
        for part, out in zip(rows.chunk(self.chunks), y.chunk(self.chunks), strict=True):
            torch.mm(part, other, out=out)
            self.record("all_reduce", out)
            works.append(self.group.allreduce([out]))
        for work in works:
            work.wait()
        return y.view(*x.shape[:-1], -1)

    def gather(self, x: Tensor, other: Tensor, multiplies: bool = True) -> Iterator[tuple[Any, Tensor]]:
        """Yield a pair for each chunk of this rank's shard of ``x``: the gathered chunk times ``other``, and the
        gathered chunk. The product is None unless the call ``multiplies``. All collectives are started when this
        returns."""
        started = []
        for piece in x.chunk(self.chunks, self.dim):
            piece = piece.contiguous()
            self.record("all_gather", piece)
            out = piece.new_empty((self.size * piece.shape[0], *piece.shape[1:]))
            started.append((out, self.group._allgather_base(out, piece)))
        return (self._gathered(out, work, other if multiplies else None) for out, work in started)

    def _gathered(self, out: Tensor, work: Any, other: Tensor | None) -> tuple[Any, Tensor]:
        work.wait()
        return None if other is None else out @ other, out

    def scatter(self, pieces: list[Tensor], other: Tensor) -> list[tuple[Tensor, Any, Any]]:
        """Start the reduce-scatters of ``pieces @ other``. Returns three items for each: the pending result, the work
        to wait for, and the operand. The operand must live until the work has ended."""
        started = []
        for piece in pieces:
            product = (piece @ other).contiguous()
            self.record("reduce_scatter", product)
            out = product.new_empty((product.shape[0] // self.size, *product.shape[1:]))
            started.append((out, self.group._reduce_scatter_base(out, product), product))
        return started

    def finish(self, started: list[tuple[Tensor, Any, Any]]) -> Tensor:
        """Wait for the reduce-scatters that `scatter` started, and return this rank's shard of the sum."""
        for _, work, _ in started:
            work.wait()
        return torch.cat([out for out, _, _ in started], self.dim)


def _add_by_weight(total: Tensor | None, cotangent: Tensor, x: Tensor) -> Tensor:
    """Add the contribution of one chunk to the gradient ``total`` of a weight."""
    product = cotangent.reshape(-1, cotangent.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    return product if total is None else total.add_(product)


class _AllReduce(torch.autograd.Function):
    """Map (..., in / ranks) to (..., out), summed over the ranks. Each rank's product gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Any) -> Tensor:
        with no_dispatch():
            ctx.save_for_backward(x, weight)
            return products.reduce(x, weight.t())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        with no_dispatch():
            x, weight = ctx.saved_tensors
            by_x = cotangent @ weight if ctx.needs_input_grad[0] else None
            return by_x, _add_by_weight(None, cotangent, x) if ctx.needs_input_grad[1] else None, None


class _ReduceScatter(torch.autograd.Function):
    """Map (..., in / ranks) to this rank's shard of (..., out) along the dimension; backward gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Any) -> Tensor:
        with no_dispatch():
            ctx.save_for_backward(x, weight)
            ctx.products = products
            return products.finish(products.scatter(products.pieces(x), weight.t()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        with no_dispatch():
            (x, weight), products = ctx.saved_tensors, ctx.products
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            by_x, by_weight = [], None
            for (product, gathered), part in zip(
                products.gather(cotangent, weight, needs_x), products.pieces(x), strict=True
            ):
                by_x.append(product)
                if needs_weight:
                    by_weight = _add_by_weight(by_weight, gathered, part)
            return products.whole(by_x) if needs_x else None, by_weight, None


class _AllGather(torch.autograd.Function):
    """Map this rank's shard of (..., in) to (..., out / ranks); backward reduce-scatters. The gathered tensor is saved
    for the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, products: Any) -> Tensor:
        with no_dispatch():
            ctx.products = products
            ys, gathered = zip(*products.gather(x, weight.t()), strict=True)
            ctx.save_for_backward(weight, *gathered)
            return products.whole(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        with no_dispatch():
            (weight, *gathered), products = ctx.saved_tensors, ctx.products
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            parts = products.pieces(cotangent)
            started = products.scatter(parts, weight) if needs_x else None
            by_weight = None
            if needs_weight:
                for part, whole in zip(parts, gathered, strict=True):
                    by_weight = _add_by_weight(by_weight, part, whole)
            return products.finish(started) if needs_x else None, by_weight, None


#: Collective -> differentiable function of x, weight and `_Chunked`, or an object with its methods.
FUNCTIONS: dict[str, Any] = {"all_reduce": _AllReduce, "all_gather": _AllGather, "reduce_scatter": _ReduceScatter}
