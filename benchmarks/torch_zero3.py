"""Fully sharded data parallelism written by hand: ZeRO-3 (Rajbhandari et al. 2020).

The parameters of a module are one flat vector, of which each rank keeps a part. It is gathered for the forward of the
module, freed after it, gathered again when backward comes to the module, and its gradient is reduce-scattered. While a
module computes, the vector of the next one is gathered, in backward that of the one before, and the gradient of the
module after it is reduced: without that, training would wait for the network. What a library has to offer besides is
left out: parameters by name, each with an optimizer's settings of its own, sizes that do not divide, dtypes, frozen
parameters, parameters that were not used, another order of modules than the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd import _unsafe_preserve_version_counter as same_version

from benchmarks.torch_hand_written import Collectives

__all__ = ["shard_by_hand"]


def shard_by_hand(module: nn.Module, collectives: Collectives, units: list[Any]) -> nn.Module:
    """Shard the parameters of ``module`` in place, as one unit. Gradients are averaged.

    Args:
        module: the module.
        collectives: over data-parallel ranks.
        units: those of the modules that run before; this one is appended.
    """
    unit = _Unit(module, collectives, units)
    forward = module.forward

    def run(*args: Any) -> Tensor:
        unit.gather()
        for (holder, name), whole in zip(unit.slots, unit.whole_parameters(unit.shard), strict=True):
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
        self.own = padded.chunk(collectives.size)[collectives.rank].clone()
        self.shard = module.shard = nn.Parameter(self.own)
        self.whole = padded
        self.bytes = padded.untyped_storage().nbytes()
        self.gathering: Any = None
        self.reducing: Any = None
        self.free()
        self.whole_parameters, self.before_backward = self._functions()

    def begin(self) -> None:
        storage = self.whole.untyped_storage()
        if not storage.size():
            storage.resize_(self.bytes)
            with same_version(self.whole):
                self.gathering = self.collectives.start_all_gather(self.whole, self.own)

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
        flat = [g.reshape(-1) for g in gradients]
        if len(self.whole) > self.length:
            flat.append(flat[0].new_zeros(len(self.whole) - self.length))
        if self.place + 1 < len(self.units):
            self.units[self.place + 1].finish()
        mine, summands = torch.empty_like(self.own), torch.cat(flat)
        self.reducing = mine, summands, self.collectives.start_reduce_scatter(mine, summands)
        if not self.place:
            self.finish()

    def finish(self) -> None:
        if self.reducing is not None:
            mine, _, work = self.reducing
            self.reducing = None
            work.wait()
            mine.div_(self.collectives.size)
            self.shard.grad = mine if self.shard.grad is None else self.shard.grad.add_(mine)

    def _functions(self) -> tuple[Any, Any]:
        unit = self

        class WholeParameters(Function):
            @staticmethod
            def forward(ctx: Any, shard: Tensor) -> tuple[Tensor, ...]:
                parts = unit.whole[: unit.length].split(unit.sizes)
                return tuple(p.view(shape).detach() for p, shape in zip(parts, unit.shapes, strict=True))

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> None:
                unit.free()
                unit.reduce(gradients)

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
