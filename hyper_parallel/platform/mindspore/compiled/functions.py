"""The steps of `STEPS` inside of MindSpore's graphs, on plain local tensors.

They are cells, because a graph takes its backward from `bprop`. MindSpore parses the source of both methods: ``self``
must have that name, and values decided in Python are attributes.

On CPU graphs have all-reduce, of single and half precision, and all-gather, among all ranks only. So a smaller group
gathers. Parts of unequal sizes are gathered by adding up the parts between zeros. To reduce and scatter is to add up
and take one's part, as in PyNative mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint, nn, ops

from hyper_parallel.platform.contract.programs import STEPS, step_between
from hyper_parallel.platform.mindspore.basics.private import GlobalComm
from hyper_parallel.platform.mindspore.processes.launch import device_target

__all__ = ["Ranks", "Same", "ScatterAndAdd", "Step", "step_cell"]


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


class _AllReduce(nn.Cell):
    """Summands to their sum."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(auto_prefix=False)
        self.collective = ops.AllReduce(ops.ReduceOp.SUM, ranks.group)

    def construct(self, x: Tensor) -> Tensor:
        return self.collective(x)


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


class _Exchange(nn.Cell):
    """Equal parts along one dimension to parts along another; through the whole, as CPU has nothing else."""

    def __init__(self, ranks: Ranks, source: int, target: int) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.part = _AllGather(ranks, source), _OwnPart(ranks, target)

    def construct(self, x: Tensor) -> Tensor:
        return self.part(self.gather(x))


#: The movements of data in `STEPS`: a cell for ranks, source, target and sizes of the parts. A bias alone becomes
#: summands, see `ScatterAndAdd`.
_MOVES: dict[str, Callable[[Ranks, Any, Any, tuple[int, ...]], nn.Cell]] = {
    "keep": lambda ranks, source, target, sizes: Same(),
    "sum": lambda ranks, source, target, sizes: _AllReduce(ranks),
    "gather": lambda ranks, source, target, sizes: _AllGather(ranks, source, sizes),
    "slice": lambda ranks, source, target, sizes: _OwnPart(ranks, target, sizes),
    "scatter": lambda ranks, source, target, sizes: _ReduceScatter(ranks, target),
    "exchange": lambda ranks, source, target, sizes: _Exchange(ranks, source, target),
}


class Step(nn.Cell):
    """A step of `STEPS` between two ways of holding a tensor."""

    def __init__(self, ranks: Ranks, name: str, source: Any, target: Any, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.move = _MOVES[STEPS[name].moves](ranks, source, target, sizes)
        self.back = _MOVES[STEPS[STEPS[name].back].moves](ranks, target, source, sizes)

    def construct(self, x: Tensor) -> Tensor:
        return self.move(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (self.back(dout),)


def step_cell(ranks: Ranks, source: Any, target: Any, sizes: tuple[int, ...] = (), for_parts: bool = False) -> nn.Cell:
    """The cell of the step between two ways of holding a tensor: see `step_between`."""
    name = step_between(source, target, for_parts)
    return Same() if name is None or ranks.size == 1 else Step(ranks, name, source, target, sizes)


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
