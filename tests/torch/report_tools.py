"""`Tools` for programs that run with any library that has torch's names, or on one device.

This file imports torch alone: so `torch.distributed.tensor` is asked where nothing else is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Model", "Tools", "randn", "weighted"]


class Tools:
    """A library for a program.

    Attributes:
        api: module or namespace with torch's names; None on one device.
        mesh: mesh of the ranks.
        ranks: number of ranks, 1 on one device.
        check: takes the output of each model, if a check of programs asks for it.
    """

    def __init__(self, api: Any = None, mesh: Any = None) -> None:
        self.api, self.mesh = api, mesh
        self.ranks = 1 if api is None else mesh.size()
        self.check: Callable[[Any], None] | None = None

    def cut(self, x: Tensor, dim: int | None = None) -> Any:
        """Distribute a tensor: a part along ``dim`` for each rank, or all of it."""
        if self.api is None:
            return x
        return self.api.distribute_tensor(x, self.mesh, [self.api.Replicate() if dim is None else self.api.Shard(dim)])

    def local(self, x: Any, partial: bool = False) -> Any:
        """This rank's tensor; with ``partial`` its gradient is said to be a summand."""
        return x if self.api is None else x.to_local(grad_placements=self._summands(partial))

    def _summands(self, partial: bool) -> Any:
        return [self.api.Partial()] if partial else None

    def placed(self, x: Any, name: str, *dim: int) -> Any:
        """Declare a tensor of this rank: ``placed(x, "Shard", 0)``. On one device it is whole."""
        return x if self.api is None else self.api.DTensor.from_local(x, self.mesh, [getattr(self.api, name)(*dim)])

    def whole(self, x: Any, partial: bool = False) -> Any:
        return x if self.api is None else x.full_tensor(grad_placements=self._summands(partial))

    def spread(self, model: nn.Module, plan: Callable[[Any], dict[str, Any]]) -> nn.Module:
        return model if self.api is None else self.api.parallelize_module(model, self.mesh, plan(self.api))

    def step(self, model: nn.Module, x: Tensor, loss: Callable[[Any], Any] | None = None) -> dict[str, Any]:
        """Return the output of a model, and the gradients of its parameters and of a floating-point input."""
        x = x.requires_grad_(x.is_floating_point())
        y = model(x)
        if self.check is not None:
            self.check(y)
        y = y.full_tensor() if hasattr(y, "full_tensor") else y
        (weighted(y) if loss is None else loss(y)).backward()
        grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
        return {"output": y, **grads, **({"gradient of the input": x.grad} if x.requires_grad else {})}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weighted(y: Tensor) -> Tensor:
    """A loss that tells elements apart."""
    return (y * randn(*y.shape, seed=9)).sum()


class Model(nn.Module):
    """Layers by name, and a forward ``run(self, x)``."""

    def __init__(self, run: Callable[[Any, Any], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p.copy_(randn(*p.shape, seed=i + 1) * 0.3)

    def forward(self, x: Any) -> Any:
        return self.run(self, x)
