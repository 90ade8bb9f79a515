"""Fully sharded data parallelism written by hand: ZeRO-3 (Rajbhandari et al. 2020).

The parameters of a module form one flat vector, of which each rank keeps a part. The vector is gathered before the
module's forward, freed after it, and gathered again when backward reaches the module. Then its gradient is
reduce-scattered. While a module computes, forward prefetches the vector of the next module. Backward prefetches that of
the module before, and reduces the gradient of the module after it. Without that overlap, training would wait for the
network. The other duties of a library are left out. These are parameters by name, each with its own optimizer settings,
sizes that do not divide, and dtypes. So are frozen parameters, unused parameters, and a changing order of modules.

The first of these is there too, as a version of its own: each rank keeps a part of each parameter, which has a gradient
of its own. Then gathered values have to be put in order, and gradients have to be put in rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.torch_hand_written import Collectives

__all__ = ["shard_by_hand"]


def shard_by_hand(module: nn.Module, collectives: Collectives, units: list[Any], by_name: bool = False) -> nn.Module:
    """Shard the parameters of ``module`` in place, as one unit. Gradients are averaged.

    Args:
        module: the module.
        collectives: over data-parallel ranks.
        units: those of the modules that run before; this one is appended.
        by_name: keep a part of each parameter, whose first dimension divides, in place of one of the flat vector.
    """
    unit = (_UnitByName if by_name else _Unit)(module, collectives, units)
    forward = module.forward

    def run(*args: Any) -> Tensor:
        unit.gather()
        for (holder, name), whole in zip(unit.slots, unit.whole_parameters(*unit.shards), strict=True):
            holder.__dict__[name] = whole
        unit.begin_next(1)
        y = forward(*args)
        unit.free()
        return unit.before_backward(y)

    module.__dict__["forward"] = run
    return module


class _Unit:
    def __init__(self, module: nn.Module, collectives: Collectives, units: list[Any]) -> None:
        self.collectives, self.units, self.place = collectives, units, len(units)
        units.append(self)
        self.slots = [
            (holder, name) for holder in module.modules() for name, p in holder._parameters.items() if p is not None
        ]
        parameters = [holder._parameters.pop(name) for holder, name in self.slots]
        self.shapes = [p.shape for p in parameters]
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.sizes, self.length = [p.numel() for p in parameters], len(flat)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % collectives.size))
        self.own, self.shards = self.keep(module, parameters, padded)
        self.whole = padded
        self.data = padded.data  # where it is written: autograd does not count that, whenever the network does it
        self.bytes = padded.untyped_storage().nbytes()
        self.gathering: Any = None
        self.reducing: Any = None
        self.free()
        self.whole_parameters, self.before_backward = self._functions()

    def keep(self, module: nn.Module, parameters: list[Any], padded: Tensor) -> tuple[Tensor, list[nn.Parameter]]:
        """The tensor that this rank sends when parameters are gathered, and the parameters in it."""
        own = padded.chunk(self.collectives.size)[self.collectives.rank].clone()
        module.shard = nn.Parameter(own)
        return own, [module.shard]

    def begin(self) -> None:
        storage = self.whole.untyped_storage()
        if not storage.size():
            storage.resize_(self.bytes)
            self.gathering = self.collectives.start_all_gather(self.data, self.own)

    def begin_next(self, step: int) -> None:
        if 0 <= self.place + step < len(self.units):
            self.units[self.place + step].begin()

    def gather(self) -> None:
        self.begin()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        if self.place + 1 < len(self.units):
            self.units[self.place + 1].finish()
        mine, summands = torch.empty_like(self.own), self.rows_of(gradients)
        self.reducing = mine, summands, self.collectives.start_reduce_scatter(mine, summands)
        if not self.place:
            self.finish()

    def rows_of(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradients to reduce, rank by rank."""
        flat = [g.reshape(-1) for g in gradients]
        if len(self.whole) > self.length:
            flat.append(flat[0].new_zeros(len(self.whole) - self.length))
        return torch.cat(flat)

    def finish(self) -> None:
        if self.reducing is not None:
            mine, _, work = self.reducing
            self.reducing = None
            work.wait()
            mine.div_(self.collectives.size)
            self.add(mine)

    def add(self, mine: Tensor) -> None:
        """Add a reduced gradient to those before."""
        (shard,) = self.shards
        shard.grad = mine if shard.grad is None else shard.grad.add_(mine)

    def _functions(self) -> tuple[Any, Any]:
        unit = self

        class WholeParameters(Function):
            @staticmethod
            def forward(ctx: Any, *shards: Tensor) -> tuple[Tensor, ...]:
                parts = unit.whole[: unit.length].split(unit.sizes)
                return tuple(p.view(shape).detach() for p, shape in zip(parts, unit.shapes, strict=True))

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
                unit.free()
                unit.reduce(gradients)
                return (None,) * len(unit.shards)

        class BeforeBackward(Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y.view_as(y)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                unit.gather()
                unit.begin_next(-1)
                return gradient

        return WholeParameters.apply, BeforeBackward.apply


class _UnitByName(_Unit):
    """Ranks send rows in which each of their shards follows the other; the whole vector has parameter by parameter."""

    def keep(self, module: nn.Module, parameters: list[Any], padded: Tensor) -> tuple[Tensor, list[nn.Parameter]]:
        size, rank = self.collectives.size, self.collectives.rank
        parts = [p.detach().chunk(size)[rank] for p in parameters]
        self.local_shapes, self.lengths = [x.shape for x in parts], [x.numel() for x in parts]
        own = torch.cat([x.reshape(-1) for x in parts])
        shards = [
            nn.Parameter(x.view(shape)) for x, shape in zip(own.split(self.lengths), self.local_shapes, strict=True)
        ]
        for (holder, name), shard in zip(self.slots, shards, strict=True):
            holder._parameters[name] = shard
        self.rows = torch.empty_like(padded)
        by_rank = [row.split(self.lengths) for row in self.rows.chunk(size)]
        self.pieces = [row[i] for i in range(len(parts)) for row in by_rank]
        self.rows.untyped_storage().resize_(0)
        return own, shards

    def begin(self) -> None:
        if not self.whole.untyped_storage().size() and self.gathering is None:
            self.rows.untyped_storage().resize_(self.bytes)
            self.gathering = self.collectives.start_all_gather(self.rows, self.own)

    def gather(self) -> None:
        self.begin()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            self.whole.untyped_storage().resize_(self.bytes)
            torch.cat(self.pieces, out=self.data)
            self.rows.untyped_storage().resize_(0)

    def rows_of(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch._chunk_cat(gradients, 0, self.collectives.size).view(-1)

    def add(self, mine: Tensor) -> None:
        for shard, part, shape in zip(self.shards, mine.split(self.lengths), self.local_shapes, strict=True):
            gradient = part.view(shape)
            shard.grad = gradient if shard.grad is None else shard.grad.add_(gradient)
