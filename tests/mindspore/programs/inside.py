"""Programs with different things inside of their cells: hooks, recompute, mixed precision, writes."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from hyper_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.platform.mindspore.basics.private import AutogradFunction
from tests.mindspore.programs.cells import (
    CLASSES,
    FEATURES,
    HIDDEN,
    FeedForward,
    classified,
    mlp,
    mlp_plan,
    scored,
)
from tests.mindspore.programs.program import Program

__all__ = ["PROGRAMS"]


def hooked(kind: str) -> nn.Cell:
    """Hooks of the activation and of the first layer."""
    net = mlp()
    if kind == "before":
        net[1].register_forward_pre_hook(lambda cell, args: (args[0] * 2,))
    elif kind == "after":
        net[1].register_forward_hook(lambda cell, args, output: output * 0.5)
    elif kind == "backward":
        net[1].register_backward_hook(lambda cell, into, out: tuple(g * 0.5 for g in into))
    elif kind == "styled":
        net[0].register_forward_hook(lambda cell, args, output: output * 0.5)
        net[2].register_forward_pre_hook(lambda cell, args: (args[0] + 1,))
    return scored(net)


class Watched(nn.Cell):
    """A hook of the gradient of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.hook = mlp(), ops.HookBackward(lambda g: g[0] * 0.5)

    def construct(self, x: Any) -> Any:
        return self.net(self.hook(ops.tanh(x * 1)))


class Straight(nn.Cell):
    """The sign, with the gradient of the identity."""

    def construct(self, x: Any) -> Any:
        return ops.sign(x)

    def bprop(self, x: Any, out: Any, dout: Any) -> tuple:
        return (dout,)


class Halved(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 0.5


class Between(nn.Cell):
    """An operation of the program between two layers."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(FEATURES, HIDDEN), nn.Dense(HIDDEN, CLASSES)
        self.between = between

    def construct(self, x: Any) -> Any:
        return self.down(self.between(self.up(x)))


class Dropping(nn.Cell):
    """Dropout before and after a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Dense(FEATURES, HIDDEN), nn.Dense(HIDDEN, HIDDEN), nn.Dense(HIDDEN, CLASSES)
        self.before, self.after = nn.Dropout(p=0.2), nn.Dropout(p=0.3)

    def construct(self, x: Any) -> Any:
        return self.head(self.after(self.down(ops.tanh(self.up(self.before(x))))))


class Recomputed(nn.Cell):
    """`mindspore.recompute` in the forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Dense(FEATURES, HIDDEN), FeedForward(), nn.Dense(HIDDEN, CLASSES)
        self.options = options

    def construct(self, x: Any) -> Any:
        return self.last(ms.recompute(self.block, self.first(x), **self.options))


def recomputed() -> nn.Cell:
    net = scored(nn.SequentialCell(nn.Dense(FEATURES, HIDDEN), FeedForward(), nn.Dense(HIDDEN, CLASSES)))
    net.recompute()
    return net


class Counting(nn.Cell):
    """Writes how often it ran, and a running mean of its input, and reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Parameter(Tensor(0, ms.int32), name="count", requires_grad=False)
        self.mean = Parameter(Tensor(np.zeros(FEATURES, np.float32)), name="moving", requires_grad=False)
        self.net = mlp()

    def construct(self, x: Any) -> Any:
        ops.assign_add(self.count, Tensor(1, ms.int32))
        ops.assign(self.mean, 0.9 * self.mean + 0.1)
        return self.net(x + self.mean) * (1 + 0.1 * self.count.astype(ms.float32))


class Tupled(nn.Cell):
    """Weights in a `ParameterTuple`."""

    def __init__(self) -> None:
        super().__init__()
        weights = [Parameter(Tensor(np.zeros((FEATURES, FEATURES), np.float32)), name=f"weight_{i}") for i in range(2)]
        self.weights, self.net = ParameterTuple(weights), mlp()

    def construct(self, x: Any) -> Any:
        for weight in self.weights:
            x = ops.tanh(ops.matmul(x, weight))
        return self.net(x)


class Penalised(nn.Cell):
    """A penalty of all weights, in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def construct(self, x: Any, targets: Any) -> Any:
        penalty = sum(ops.square(p).sum() for p in self.net.trainable_params() if "weight" in p.name)
        return ops.cross_entropy(self.net(x), targets) + 0.01 * penalty


class CompiledLoss(nn.Cell):
    """A loss that jit compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def construct(self, x: Any, targets: Any) -> Any:
        return compiled_loss(self.net(x), targets)


@ms.jit
def compiled_loss(logits: Any, targets: Any) -> Any:
    return ops.cross_entropy(logits, targets)


def half(kind: str) -> nn.Cell:
    net = mlp()
    if kind == "cells":
        net[0].to_float(ms.float16)
        net[2].to_float(ms.float16)
        return scored(net)
    return scored(ms.amp.auto_mixed_precision(net, "auto", ms.float16))


_PART = "ValueError: mindspore.recompute(FeedForward) gives no gradient of"


def block_plan() -> dict[str, Any]:
    return {
        f"_backbone.{name}": style for name, style in zip(("block.up", "block.down"), mlp_plan().values(), strict=True)
    }


def between_plan() -> dict[str, Any]:
    return {f"_backbone.{name}": style for name, style in zip(("up", "down"), mlp_plan().values(), strict=True)}


def _of_net(says: str, net: Any, plan: Any = mlp_plan, **more: Any) -> Program:
    return Program(says, net, classified, plan, **more)


PROGRAMS: dict[str, Program] = {
    "hook before": _of_net("a forward pre hook of an activation", lambda: hooked("before")),
    "hook after": _of_net("a forward hook of an activation", lambda: hooked("after")),
    "hook of a backward": _of_net("a backward hook of an activation", lambda: hooked("backward")),
    "hooks of layers with styles": _of_net("hooks of the layers that the plan names", lambda: hooked("styled")),
    "HookBackward": _of_net(
        "`ops.HookBackward` of an activation", lambda: scored(Watched()), lambda: mlp_plan("_backbone.net")
    ),
    "a bprop": _of_net("a cell with a `bprop`", lambda: scored(Between(Straight())), between_plan),
    "a _Function": _of_net("a `_Function`", lambda: scored(Between(Halved.apply)), between_plan),
    "stop_gradient": _of_net(
        "`ops.stop_gradient` of a shard",
        lambda: scored(Between(lambda x: x * ops.stop_gradient(ops.tanh(x)))),
        between_plan,
    ),
    "recompute of the net": _of_net(
        "`Cell.recompute()`",
        recomputed,
        lambda: {f"_backbone.1.{name}": style for name, style in zip(("up", "down"), mlp_plan().values(), strict=True)},
    ),
    "recompute in the forward": _of_net(
        "`mindspore.recompute` of a block",
        lambda: scored(Recomputed()),
        block_plan,
        refused={"fully_shard": _PART, "replicate": _PART, "2 x 2": _PART},
    ),
    "recompute, not reentrant": _of_net(
        "`mindspore.recompute(use_reentrant=False)`", lambda: scored(Recomputed(use_reentrant=False)), block_plan
    ),
    "half precision of layers": _of_net("`Cell.to_float`", lambda: half("cells"), tolerance=3e-2),
    "half precision by lists": _of_net('`auto_mixed_precision(net, "auto")`', lambda: half("lists"), tolerance=3e-2),
    "writes in the forward": _of_net(
        "a counter and a running mean", lambda: scored(Counting()), lambda: mlp_plan("_backbone.net")
    ),
    "ParameterTuple": _of_net(
        "weights in a `ParameterTuple`", lambda: scored(Tupled()), lambda: mlp_plan("_backbone.net")
    ),
    "penalty": _of_net("`trainable_params()` in `construct`", Penalised, lambda: mlp_plan("net")),
    "dropout": _of_net(
        "`nn.Dropout` between layers, of a distributed batch",
        lambda: scored(Dropping()),
        between_plan,
        is_distributed=True,
    ),
    "dropout of features": _of_net(
        "`nn.Dropout` of features that ranks share, as DTensors, of a distributed batch",
        lambda: scored(Between(nn.SequentialCell(nn.Dropout(p=0.3), nn.Tanh()))),
        lambda: {"_backbone.up": ColwiseParallel(use_local_output=False), "_backbone.down": RowwiseParallel()},
        is_distributed=True,
    ),
    "compiled loss": _of_net("a loss under `jit`", CompiledLoss, lambda: mlp_plan("net")),
}
