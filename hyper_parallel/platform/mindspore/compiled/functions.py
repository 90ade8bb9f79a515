"""The steps of `STEPS` inside of MindSpore's graphs, on plain local tensors.

The steps are cells, because a graph takes their backward from `bprop`. MindSpore parses the source of both methods. So
``self`` must have that name, and values decided in Python must be attributes.

On CPU, graphs have two collectives: all-gather among all ranks, and all-reduce in single and half precision. So a
smaller group gathers by an all-reduce. Shards of unequal sizes are also gathered by an all-reduce, of shards padded
with zeros. Reduce-scatter is an all-reduce and a slice, as in PyNative mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint, nn, ops

from hyper_parallel.platform.contract.programs import STEPS, Program, step_between
from hyper_parallel.platform.mindspore.basics.private import GlobalComm
from hyper_parallel.platform.mindspore.processes.launch import device_target

__all__ = ["Ranks", "Same", "ScatterAndAdd", "Step", "step_cell"]


class Ranks:
    """Group of a program, its size and this rank, for the cells below."""

    def __init__(self, how: Program) -> None:
        self.group, self.size, self.rank = how.group, how.size, how.rank


class Same(nn.Cell):
    """Cell that returns its input."""

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x: Tensor) -> Tensor:
        return x


class _AllReduce(nn.Cell):
    """Cell that all-reduces partial sums."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(auto_prefix=False)
        self.collective = ops.AllReduce(ops.ReduceOp.SUM, ranks.group)

    def construct(self, x: Tensor) -> Tensor:
        return self.collective(x)


class _AllGather(nn.Cell):
    """Cell that gathers shards along ``dim``. An empty ``sizes`` means shards of equal sizes."""

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
    """Cell that slices this rank's shard along ``dim`` from a replicated tensor."""

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
    """Cell that reduces partial sums and returns this rank's shard of the result along ``dim``. All shards have the
    same size."""

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
    """Cell that changes the sharded dimension, with equal shards. The cell gathers and slices, because CPUs have no
    all-to-all."""

    def __init__(self, ranks: Ranks, source: int, target: int) -> None:
        super().__init__(auto_prefix=False)
        self.gather, self.part = _AllGather(ranks, source), _OwnPart(ranks, target)

    def construct(self, x: Tensor) -> Tensor:
        return self.part(self.gather(x))


#: The movements of data in `STEPS`: functions of ranks, source, target and sizes of the shards that return a cell. No
#: cell makes summands of a replicated tensor: only a bias would need one, and `ScatterAndAdd` adds it.
_MOVES: dict[str, Callable[[Ranks, Any, Any, tuple[int, ...]], nn.Cell]] = {
    "keep": lambda ranks, source, target, sizes: Same(),
    "sum": lambda ranks, source, target, sizes: _AllReduce(ranks),
    "gather": lambda ranks, source, target, sizes: _AllGather(ranks, source, sizes),
    "slice": lambda ranks, source, target, sizes: _OwnPart(ranks, target, sizes),
    "scatter": lambda ranks, source, target, sizes: _ReduceScatter(ranks, target),
    "exchange": lambda ranks, source, target, sizes: _Exchange(ranks, source, target),
}


class Step(nn.Cell):
    """Cell that does a step of `STEPS`, and in backward the step of the cotangent."""

    def __init__(self, ranks: Ranks, name: str, source: Any, target: Any, sizes: tuple[int, ...] = ()) -> None:
        super().__init__(auto_prefix=False)
        self.move = _MOVES[STEPS[name].moves](ranks, source, target, sizes)
        self.back = _MOVES[STEPS[STEPS[name].back].moves](ranks, target, source, sizes)

    def construct(self, x: Tensor) -> Tensor:
        return self.move(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> Any:
        return (self.back(dout),)


def step_cell(ranks: Ranks, source: Any, target: Any, sizes: tuple[int, ...] = (), for_parts: bool = False) -> nn.Cell:
    """Return the cell that converts a tensor from one placement to another: see `step_between`."""
    name = step_between(source, target, for_parts)
    return Same() if name is None or ranks.size == 1 else Step(ranks, name, source, target, sizes)


class ScatterAndAdd(nn.Cell):
    """Cell that reduce-scatters partial sums and adds a replicated bias. All ranks use the bias in forward: otherwise
    MindSpore would omit its gradient."""

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
