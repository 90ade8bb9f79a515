"""The models in MindSpore, and their hand-written parallel versions.

Hand-written code is Megatron's f and g as autograd functions around `mindspore.mint.distributed`. On CPU there is no
reduce-scatter: it is an all-reduce and a slice, as in the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common._grad_function import _Function
from mindspore.mint import distributed as dist

from benchmarks.sizes import LlamaSizes, MlpSizes

__all__ = ["LlamaBlock", "Mlp", "all_reduce", "hand_written_block", "hand_written_mlp", "tables"]

#: Name of the default group; set by `benchmarks.mindspore_rank`.
GROUP = "mccl_world_group"


class Mlp(nn.Cell):
    """Two linear layers with a ReLU between them."""

    def __init__(self, sizes: MlpSizes) -> None:
        super().__init__()
        self.up = mint.nn.Linear(sizes.features, sizes.hidden)
        self.down = mint.nn.Linear(sizes.hidden, sizes.features)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(mint.nn.functional.relu(self.up(x)))


def tables(sequence: int, head_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine and sine of each position's rotation, each (sequence, 1, head_size / 2), and the causal mask."""
    angles = np.outer(np.arange(sequence), 10000.0 ** (-np.arange(0, head_size, 2) / head_size))[:, None, :]
    mask = np.triu(np.full((sequence, sequence), -np.inf, np.float32), 1)
    return Tensor(np.cos(angles).astype(np.float32)), Tensor(np.sin(angles).astype(np.float32)), Tensor(mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, sequence, heads, head_size)."""
    first, second = mint.chunk(x, 2, dim=-1)
    return mint.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class RmsNorm(nn.Cell):
    """An RMS norm of elementary operations, because the fused one has no kernel on CPU."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(features, np.float32)), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        return x * mint.rsqrt(mint.mean(x * x, dim=-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Cell):
    """Causal attention over however many heads the projections return."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.head_size = sizes.head_size
        self.wq, self.wk, self.wv, self.wo = (
            mint.nn.Linear(sizes.features, sizes.features, bias=False) for _ in range(4)
        )

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, sequence = x.shape[:2]
        query, key, value = (w(x).reshape(batch, sequence, -1, self.head_size) for w in (self.wq, self.wk, self.wv))
        query, key = rotate(query, cos, sin).transpose(1, 2), rotate(key, cos, sin).transpose(1, 2)
        scores = ops.bmm(query * self.head_size**-0.5, key.transpose(2, 3)) + mask
        mixed = ops.bmm(mint.nn.functional.softmax(scores, dim=-1), value.transpose(1, 2))
        return self.wo(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Cell):
    """SwiGLU."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.w1, self.w3 = (mint.nn.Linear(sizes.features, sizes.hidden, bias=False) for _ in range(2))
        self.w2 = mint.nn.Linear(sizes.hidden, sizes.features, bias=False)

    def construct(self, x: Tensor) -> Tensor:
        return self.w2(mint.nn.functional.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Cell):
    """Attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(sizes.features)
        self.attention = Attention(sizes)
        self.ffn_norm = RmsNorm(sizes.features)
        self.feed_forward = FeedForward(sizes)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.feed_forward(self.ffn_norm(x))


# -------------------------------------------------------------------------------------------------------- hand-written
def all_reduce(x: Tensor, op: str = "sum") -> Tensor:
    """Reduce in place a tensor that is contiguous and all of its storage."""
    dist.all_reduce(x, op, GROUP)
    return x


def _all_gather(x: Tensor) -> Tensor:
    parts = [ops.zeros(x.shape, x.dtype) for _ in range(dist.get_world_size(GROUP))]
    dist.all_gather(parts, x, GROUP)
    return mint.cat(parts, 1)


def _reduce_scatter(x: Tensor) -> Tensor:
    part = x.shape[1] // dist.get_world_size(GROUP)
    return all_reduce(x).narrow(1, dist.get_rank(GROUP) * part, part).contiguous()


class CopyToRanks(_Function):
    """Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return all_reduce(gradient.contiguous())


class ReduceFromRanks(_Function):
    """Megatron's g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class GatherFromSequence(_Function):
    """All-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _all_gather(x.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _reduce_scatter(gradient.contiguous())


class ScatterToSequence(_Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _all_gather(gradient.contiguous())


class ColumnMlp(Mlp):
    def construct(self, x: Tensor) -> Tensor:
        return self.down(mint.nn.functional.relu(self.up(CopyToRanks.apply(x))))


class ColumnAttention(Attention):
    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        return super().construct(self.enter(x), cos, sin, mask)


class ColumnFeedForward(FeedForward):
    def construct(self, x: Tensor) -> Tensor:
        return super().construct(self.enter(x))


class RowLinear(mint.nn.Linear):
    """Every rank computes a summand of the output; the bias counts once."""

    def construct(self, x: Tensor) -> Tensor:
        y = self.leave(mint.nn.functional.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def _become(cell: nn.Cell, parallel: type[nn.Cell], **functions: Callable[[Tensor], Tensor]) -> None:
    cell.__class__ = parallel
    for name, function in functions.items():
        object.__setattr__(cell, name, function)


def _shard(linear: nn.Cell, dim: int) -> None:
    rank, size = dist.get_rank(GROUP), dist.get_world_size(GROUP)
    for name in ("weight", "bias") if dim == 0 else ("weight",):
        whole = getattr(linear, name)
        if whole is not None:
            part = np.ascontiguousarray(np.split(whole.asnumpy(), size, dim)[rank])
            setattr(linear, name, Parameter(Tensor(part), name=whole.name))


def hand_written_mlp(model: Mlp) -> Mlp:
    """Parallelise ``model`` in place."""
    _shard(model.up, 0)
    _shard(model.down, 1)
    _become(model, ColumnMlp)
    _become(model.down, RowLinear, leave=ReduceFromRanks.apply)
    return model


def hand_written_block(block: LlamaBlock, sequence_parallel: bool) -> LlamaBlock:
    """Parallelise ``block`` in place. With sequence parallelism the gradients of its norms are to be summed."""
    enter, leave = (GatherFromSequence, ScatterToSequence) if sequence_parallel else (CopyToRanks, ReduceFromRanks)
    attention, feed_forward = block.attention, block.feed_forward
    for linear in (attention.wq, attention.wk, attention.wv, feed_forward.w1, feed_forward.w3):
        _shard(linear, 0)
    for linear in (attention.wo, feed_forward.w2):
        _shard(linear, 1)
        _become(linear, RowLinear, leave=leave.apply)
    _become(attention, ColumnAttention, enter=enter.apply)
    _become(feed_forward, ColumnFeedForward, enter=enter.apply)
    return block
