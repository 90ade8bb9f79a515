"""A block with experts in three versions: for this library, with a dispatcher by hand, and with gathered tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ByHand", "Experts", "Gathered", "Mixture"]


def by_expert(x: Tensor, counts: list[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU of several experts, for tokens sorted by expert."""
    out = []
    for rows, up, back in zip(x.split(counts), gate_up, down, strict=True):
        gate, value = (rows @ up).chunk(2, -1)
        out.append((F.silu(gate) * value) @ back)
    return torch.cat(out)


class Experts(nn.Module):
    """Stacked weights."""

    def __init__(self, count: int, features: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, features, 2 * hidden) * features**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, features) * hidden**-0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return by_expert(x, counts.tolist(), self.gate_up, self.down)


class Mixture(nn.Module):
    """Send each token to its best experts.

    Args:
        count: of all experts.
        best: how many a token is sent to.
        features, hidden: sizes.
    """

    def __init__(self, count: int, best: int, features: int, hidden: int) -> None:
        super().__init__()
        self.count, self.best = count, best
        self.router = nn.Linear(features, count, bias=False)
        self.experts = Experts(count, features, hidden)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.best)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        y = self.routed(x[order // self.best], flat.bincount(minlength=self.count))
        return (y[order.argsort()].unflatten(0, (-1, self.best)) * weights.unsqueeze(-1)).sum(1)

    def routed(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The outputs for tokens sorted by expert."""
        y: Tensor = self.experts(tokens, counts)
        return y


class _Exchange(torch.autograd.Function):
    """An all-to-all of as many rows as there are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = received, sent
        out = x.new_empty((sum(received), x.shape[1]))
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Exchange.forward(ctx, g, *ctx.sizes), None, None


class ByHand(Mixture):
    """The same with a dispatcher on which no library has a part. This rank has its part of the experts alone.

    Gradients of experts are divided by the number of ranks, since each has a loss of its own.

    Args:
        whole: the model on one device, whose weights it takes.
    """

    def __init__(self, whole: Mixture) -> None:
        nn.Module.__init__(self)
        self.count, self.best, ranks = whole.count, whole.best, dist.get_world_size()
        self.router = nn.Linear(whole.router.in_features, whole.count, bias=False)
        self.router.weight.data = whole.router.weight.detach().clone()
        for name in ("gate_up", "down"):
            part = getattr(whole.experts, name).detach().chunk(ranks)[dist.get_rank()].clone()
            self.register_parameter(name, nn.Parameter(part))
            getattr(self, name).register_hook(lambda g: g / ranks)

    def routed(self, tokens: Tensor, counts: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        given = torch.empty_like(counts)
        dist.all_to_all_single(given, counts)
        theirs = given.view(ranks, -1)
        sent, received = counts.view(ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        arrived = _Exchange.apply(tokens, sent, received)
        own = torch.arange(theirs.shape[1]).repeat(ranks).repeat_interleave(theirs.flatten())
        order = own.argsort(stable=True)
        y = by_expert(arrived[order], theirs.sum(0).tolist(), self.gate_up, self.down)
        return _Exchange.apply(y[order.argsort()], received, sent)


class _Gather(torch.autograd.Function):
    """The tokens of all ranks; the cotangents of each rank's are summed there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0] * dist.get_world_size(), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return _Scatter.forward(ctx, g)


class _Scatter(torch.autograd.Function):
    """The sums over the ranks of what they have for the tokens of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0] // dist.get_world_size(), *x.shape[1:]))
        dist.reduce_scatter_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return _Gather.forward(ctx, g)


class Gathered(ByHand):
    """The replicated way: each rank gets the tokens of all, and computes what its experts give for them."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = _Gather.apply(x)
        weights, chosen = self.router(x).softmax(-1).topk(self.best)
        weights, whole = _Gather.apply(weights), torch.empty(tokens.shape[0], self.best, dtype=chosen.dtype)
        dist.all_gather_into_tensor(whole, chosen)
        own = self.gate_up.shape[0]
        local = whole.flatten() - own * dist.get_rank()
        routes = ((local >= 0) & (local < own)).nonzero().flatten()
        routes = routes[local[routes].argsort(stable=True)]
        rows = routes // self.best
        y = by_expert(tokens[rows], local[routes].bincount(minlength=own).tolist(), self.gate_up, self.down)
        out = torch.zeros_like(tokens).index_add(0, rows, y * weights.flatten()[routes].unsqueeze(-1))
        return _Scatter.apply(out)
