"""Tensor parallelism written by hand, as in Megatron-LM (Shoeybi et al. 2019, Korthikanti et al. 2022).

Two kinds that differ in how they call collectives: "textbook" with the functions of `torch.distributed`, "tuned" with
methods of the process group. Modules are those of the unsharded model, by the same names, at the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from benchmarks.torch_models import Attention, FeedForward, LlamaBlock, Mlp

__all__ = ["Collectives", "Textbook", "Tuned", "hand_written_block", "hand_written_mlp"]


# --------------------------------------------------------------------------------------------------------- collectives
class Collectives(Protocol):
    """The collectives that the autograd functions call."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> None:
        """Sum of all ranks' contiguous ``x``, in place."""

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """All ranks' ``x``, one after the other along dimension 0."""

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        """Reduce-scatter along dimension 0: the part of the sum of all ranks' ``x`` for this rank."""

    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        """`all_gather` that runs until ``wait()`` of the returned handle."""

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        """The same for `reduce_scatter`."""


class Textbook:
    """The functions of `torch.distributed`, over a group or over all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.group = dist.get_rank(group), dist.get_world_size(group), group

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        dist.all_gather_into_tensor(out, x, group=self.group)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        dist.reduce_scatter_tensor(out, x, group=self.group)

    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        return dist.all_gather_into_tensor(out, x, group=self.group, async_op=True)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        return dist.reduce_scatter_tensor(out, x, group=self.group, async_op=True)


class Tuned:
    """Methods of the process group, without the checks and the look-ups of `torch.distributed`."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.group: Any = group or dist.group.WORLD
        self.sum = dist.AllreduceOptions()

    def all_reduce(self, x: Tensor) -> None:
        self.group.allreduce([x], self.sum).wait()

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self.group._allgather_base(out, x).wait()

    def reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        self.group._reduce_scatter_base(out, x).wait()

    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        return self.group._allgather_base(out, x)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        return self.group._reduce_scatter_base(out, x)


# ------------------------------------------------------------------------------------------------- autograd functions
Function = Callable[[Tensor], Tensor]


def column_and_row(collectives: Collectives) -> tuple[Function, Function]:
    """Megatron's f (identity forward, all-reduce backward) and g (all-reduce forward, identity backward)."""

    def reduced(x: Tensor) -> Tensor:
        x = x.contiguous()
        collectives.all_reduce(x)
        return x

    class CopyToRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return reduced(gradient)

    class ReduceFromRanks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return reduced(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return CopyToRanks.apply, ReduceFromRanks.apply


def gather_and_scatter(collectives: Collectives) -> tuple[Function, Function]:
    """The same under sequence parallelism, for (batch, sequence, features): all-gather forward and reduce-scatter
    backward, and the reverse."""
    size = collectives.size

    def gathered(x: Tensor) -> Tensor:
        batch, sequence, features = x.shape
        out = x.new_empty((size * batch, sequence, features))
        collectives.all_gather(out, x.contiguous())
        return torch.cat(out.chunk(size, 0), 1)

    def scattered(x: Tensor) -> Tensor:
        batch, sequence, features = x.shape
        out = x.new_empty((batch, sequence // size, features))
        collectives.reduce_scatter(out, torch.cat(x.chunk(size, 1), 0))
        return out

    class GatherFromSequence(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return gathered(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return scattered(gradient)

    class ScatterToSequence(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return scattered(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gathered(gradient)

    return GatherFromSequence.apply, ScatterToSequence.apply


# -------------------------------------------------------------------------------------------------------------- modules
class ColumnMlp(Mlp):
    """Copies its input to the ranks."""

    enter: Function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.enter(x))))


class ColumnAttention(Attention):
    """Copies its input to the ranks, or gathers it from the sequence, once for three projections."""

    enter: Function

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return self.wo(self.mix(self.enter(x), cos, sin, past))


class ColumnFeedForward(FeedForward):
    """Copies its input to the ranks, or gathers it from the sequence, once for two projections."""

    enter: Function

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RowLinear(nn.Linear):
    """Every rank computes a summand of the output; the bias counts once."""

    leave: Function

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def _become(module: nn.Module, parallel: type[nn.Module], **functions: Function) -> None:
    module.__class__ = parallel
    for name, function in functions.items():
        setattr(module, name, function)


def _shard(linear: nn.Linear, dim: int, rank: int, size: int) -> None:
    """Keep this rank's part of the weight along ``dim``; the bias goes with output features."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim)[rank].clone())
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(size)[rank].clone())


def hand_written_mlp(model: Mlp, collectives: Collectives) -> Mlp:
    """Parallelise ``model`` in place."""
    rank, size = collectives.rank, collectives.size
    enter, leave = column_and_row(collectives)
    _shard(model.up, 0, rank, size)
    _shard(model.down, 1, rank, size)
    _become(model, ColumnMlp, enter=enter)
    _become(model.down, RowLinear, leave=leave)
    return model


def hand_written_block(
    block: LlamaBlock, collectives: Collectives, sequence_parallel: bool
) -> tuple[LlamaBlock, Callable[[], None] | None]:
    """Parallelise ``block`` in place. With sequence parallelism its input and output are shards of the sequence. The
    second value then is a function to call after backward: it sums the norms' gradients of all ranks, in one
    collective."""
    rank, size = collectives.rank, collectives.size
    enter, leave = (gather_and_scatter if sequence_parallel else column_and_row)(collectives)
    attention, feed_forward = block.attention, block.feed_forward
    for linear in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
        _shard(linear, 0, rank, size)
    for linear in (attention.wo, feed_forward.w2):
        _shard(linear, 1, rank, size)
        _become(linear, RowLinear, leave=leave)
    _become(attention, ColumnAttention, enter=enter)
    _become(feed_forward, ColumnFeedForward, enter=enter)
    if not sequence_parallel:
        return block, None
    norms = (block.attention_norm.weight, block.ffn_norm.weight)
    return block, lambda: _sum_gradients(norms, collectives)


def _sum_gradients(parameters: Sequence[nn.Parameter], collectives: Collectives) -> None:
    """Megatron's ``_allreduce_layernorm_grads``: one all-reduce of all gradients in a row."""
    gradients = [p.grad for p in parameters]
    flat = _flatten_dense_tensors(gradients)
    collectives.all_reduce(flat)
    for gradient, summed in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(summed)
