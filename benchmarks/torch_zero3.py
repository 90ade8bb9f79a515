"""Fully sharded data parallelism written by hand: ZeRO-3 (Rajbhandari et al. 2020).

The parameters of a module are one flat vector, of which each rank keeps a part. It is gathered for the forward of the
module, freed after it, gathered again when backward comes to the module, and its gradient is reduce-scattered. What a
library has to offer besides is left out: parameters by name, sizes that do not divide, dtypes, frozen parameters.
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


def shard_by_hand(module: nn.Module, collectives: Collectives) -> nn.Module:
    """Shard the parameters of ``module`` in place, as one unit. Gradients are averaged."""
    unit = _Unit(module, collectives)
    forward = module.forward

    def run(*args: Any) -> Tensor:
        unit.gather()
        for (holder, name), whole in zip(unit.slots, unit.whole_parameters(module.shard), strict=True):
            holder.__dict__[name] = whole
        y = forward(*args)
        unit.free()
        return unit.before_backward(y)

    module.__dict__["forward"] = run
    return module


class _Unit:
    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self.collectives = collectives
        self.slots = [
            (holder, name) for holder in module.modules() for name, p in holder._parameters.items() if p is not None
        ]
        parameters = [holder._parameters.pop(name) for holder, name in self.slots]
        self.shapes = [p.shape for p in parameters]
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.sizes, self.length = [p.numel() for p in parameters], len(flat)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % collectives.size))
        self.own = padded.chunk(collectives.size)[collectives.rank].clone()
        module.shard = nn.Parameter(self.own)
        self.whole = padded
        self.bytes = padded.untyped_storage().nbytes()
        self.free()
        self.whole_parameters, self.before_backward = self._functions()

    def gather(self) -> None:
        storage = self.whole.untyped_storage()
        if not storage.size():
            storage.resize_(self.bytes)
            with same_version(self.whole):
                self.collectives.all_gather(self.whole, self.own)

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        flat = [g.reshape(-1) for g in gradients]
        if len(self.whole) > self.length:
            flat.append(flat[0].new_zeros(len(self.whole) - self.length))
        mine = torch.empty_like(self.own)
        self.collectives.reduce_scatter(mine, torch.cat(flat))
        return mine.div_(self.collectives.size)

    def _functions(self) -> tuple[Any, Any]:
        unit = self

        class WholeParameters(Function):
            @staticmethod
            def forward(ctx: Any, shard: Tensor) -> tuple[Tensor, ...]:
                parts = unit.whole[: unit.length].split(unit.sizes)
                return tuple(p.view(shape).detach() for p, shape in zip(parts, unit.shapes, strict=True))

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                unit.free()
                return unit.reduce(gradients)

        class BeforeBackward(Function):
            @staticmethod
            def forward(ctx: Any, y: Tensor) -> Tensor:
                return y.view_as(y)

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                unit.gather()
                return gradient

        return WholeParameters.apply, BeforeBackward.apply
