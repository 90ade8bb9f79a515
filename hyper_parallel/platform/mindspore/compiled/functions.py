"""Collectives inside of MindSpore's graphs, in pairs of forward and backward, on plain local tensors.

They are cells, because a graph takes its backward from `bprop`. MindSpore parses the source of both methods: ``self``
must have that name, and values decided in Python are attributes. As in `core.communication.transitions`, the cotangent
of a tensor that all ranks have is whole. Parts have parts as cotangents. The cells ending on ``ForParts`` have
consumers each of which returns a summand.

On CPU graphs have all-reduce, of single and half precision, and all-gather, among all ranks only. So a smaller group
gathers. Parts of unequal sizes are gathered by adding up the parts between zeros. To reduce and scatter is to add up
and take one's part, as in PyNative mode.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint, nn, ops

from hyper_parallel.platform.mindspore.basics.private import GlobalComm
from hyper_parallel.platform.mindspore.processes.launch import device_target

__all__ = [
    "Exchange",
    "Gather",
    "GatherForParts",
    "Part",
    "ReadForParts",
    "Ranks",
    "Scatter",
    "ScatterAndAdd",
    "SumUp",
    "Same",
]


class Ranks:
    """The ranks of a group, as these cells need them.

    Args:
        group: name of the group.
        size, rank: how many they are, and which one this is.
    """

    def __init__(self, group: str, size: int, rank: int) -> None:
        self.group, self.size, self.rank = group, size, rank


class Same(nn.Cell):
    """Function that needs no collective."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x: Tensor) -> Tensor:
        return x


class _Reducing(nn.Cell):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, ranks.group)


class _AllGather(nn.Cell):
    """Parts along ``dim``, of ``sizes`` or equal, to the whole."""

    def __init__(self, ranks: Ranks, dim: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.dim, self.size, self.rank = dim, ranks.size, ranks.rank
        self.sizes = sizes if sizes and min(sizes) != max(sizes) else ()
        self.native = not self.sizes and (device_target() != "CPU" or ranks.group == GlobalComm.WORLD_COMM_GROUP)
        if self.native:
            self.collective = ops.AllGather(ranks.group)
        else:
            self.collective = ops.AllReduce(ops.ReduceOp.SUM, ranks.group)
        self.before, self.after = sum(self.sizes[: self.rank]), sum(self.sizes[self.rank + 1 :])

    def construct(self, x: Tensor) -> Tensor:
        dim = self.dim % x.ndim
        if self.native:
            y = self.collective(x)
            if dim != 0:
                y = mint.cat(mint.chunk(y, self.size, 0), dim)
            return y
        before, after = self.before, self.after
        if not self.sizes:
            before, after = self.rank * x.shape[dim], (self.size - self.rank - 1) * x.shape[dim]
        if before > 0:
            x = mint.cat((ops.zeros(x.shape[:dim] + (before,) + x.shape[dim + 1 :], x.dtype), x), dim)  # noqa: RUF005
        if after > 0:
            x = mint.cat((x, ops.zeros(x.shape[:dim] + (after,) + x.shape[dim + 1 :], x.dtype)), dim)  # noqa: RUF005
        return self.collective(x)


class _OwnPart(nn.Cell):
    """The whole to this rank's part along ``dim``."""

    def __init__(self, ranks: Ranks, dim: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.dim, self.size, self.rank, self.sizes = dim, ranks.size, ranks.rank, sizes
        self.first, self.count = (sum(sizes[: ranks.rank]), sizes[ranks.rank]) if sizes else (0, 0)

    def construct(self, x: Tensor) -> Tensor:
        dim = self.dim % x.ndim
        first, count = self.first, self.count
        if not self.sizes:
            count = x.shape[dim] // self.size
            first = count * self.rank
        return mint.narrow(x, dim, first, count)


class _ReduceScatter(nn.Cell):
    """Summands to this rank's part of their sum along ``dim``, which are equal parts."""

    def __init__(self, ranks: Ranks, dim: int) -> None:
        super().__init__(auto_prefix=False)
        self.dim, self.size = dim, ranks.size
        self.native = device_target() != "CPU"
        self.part = _OwnPart(ranks, dim)
        if self.native:
            self.collective = ops.ReduceScatter(ops.ReduceOp.SUM, ranks.group)
        else:
            self.collective = ops.AllReduce(ops.ReduceOp.SUM, ranks.group)

    def construct(self, x: Tensor) -> Tensor:
        if not self.native:
            return self.part(self.collective(x))
        dim = self.dim % x.ndim
        if dim != 0:
            x = mint.cat(mint.chunk(x, self.size, dim), 0)
        return self.collective(x)


class ReadForParts(_Reducing):
    """Megatron's f: a tensor that all ranks have, for consumers that each return a summand of the cotangent."""

    def construct(self, x: Tensor) -> Tensor:
        return x

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (self.all_reduce(dout),)


class SumUp(_Reducing):
    """Megatron's g: summands to their sum."""

    def construct(self, x: Tensor) -> Tensor:
        return self.all_reduce(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (dout,)


class Gather(nn.Cell):
    """Parts to the whole, for consumers that return the whole cotangent."""

    def __init__(self, ranks: Ranks, dim: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.part = _AllGather(ranks, dim, sizes), _OwnPart(ranks, dim, sizes)

    def construct(self, x: Tensor) -> Tensor:
        return self.gather(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (self.part(dout),)


class GatherForParts(nn.Cell):
    """Equal parts to the whole, for consumers that each return a summand of the cotangent."""

    def __init__(self, ranks: Ranks, dim: int) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.scatter = _AllGather(ranks, dim), _ReduceScatter(ranks, dim)

    def construct(self, x: Tensor) -> Tensor:
        return self.gather(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (self.scatter(dout),)


class Part(nn.Cell):
    """The whole to this rank's part."""

    def __init__(self, ranks: Ranks, dim: int, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.part = _AllGather(ranks, dim, sizes), _OwnPart(ranks, dim, sizes)

    def construct(self, x: Tensor) -> Tensor:
        return self.part(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (self.gather(dout),)


class Scatter(nn.Cell):
    """Summands to this rank's part of their sum."""

    def __init__(self, ranks: Ranks, dim: int) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.scatter = _AllGather(ranks, dim), _ReduceScatter(ranks, dim)

    def construct(self, x: Tensor) -> Tensor:
        return self.scatter(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (self.gather(dout),)


class Exchange(nn.Cell):
    """Equal parts along one dimension to parts along another; through the whole, as CPU has nothing else."""

    def __init__(self, ranks: Ranks, source: int, target: int) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.part = _AllGather(ranks, source), _OwnPart(ranks, target)
        self.gather_back, self.part_back = _AllGather(ranks, target), _OwnPart(ranks, source)

    def construct(self, x: Tensor) -> Tensor:
        return self.part(self.gather(x))

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (self.part_back(self.gather_back(dout)),)


class ScatterAndAdd(nn.Cell):
    """Summands to this rank's part of their sum and of a bias, which all ranks have. Of a forward that does not use the
    bias on all ranks MindSpore would leave its gradient out."""

    def __init__(self, ranks: Ranks, dim: int) -> None:
        super().__init__(auto_prefix=False)
        self.dim, self.gather, self.scatter = dim, _AllGather(ranks, dim), _ReduceScatter(ranks, dim)
        self.part = _OwnPart(ranks, -1)

    def construct(self, x: Tensor, bias: Tensor) -> Tensor:
        if self.dim % x.ndim == x.ndim - 1:
            bias = self.part(bias)
        return self.scatter(x) + bias

    def bprop(self, x: Tensor, bias: Tensor, out: Tensor, dout: Tensor) -> Any:
        whole = self.gather(dout)
        return whole, whole.reshape((-1, whole.shape[-1])).sum(0)
