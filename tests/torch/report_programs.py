"""Programs of `tests.torch.reports`: ``program(t)`` with `Tools`, on one device or on a rank.

A program returns values by name, which are to be those of one device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.torch.report_tools import Model, Tools, randn, weighted

X = (2, 4, 8)


def up_down(**more: nn.Module) -> dict[str, nn.Module]:
    return {"up": nn.Linear(8, 24), "down": nn.Linear(24, 8), **more}


def mlp(a: Any) -> dict[str, Any]:
    return {"up": a.ColwiseParallel(), "down": a.RowwiseParallel()}


def by_sequence(a: Any) -> dict[str, Any]:
    return {
        "up": a.ColwiseParallel(),
        "down": a.RowwiseParallel(output_layouts=a.Shard(1)),
        "norm": a.SequenceParallel(use_local_output=True),
    }


def heads(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], -1, 6)


# ------------------------------------------------------------------------------------------- code between layers
def norm_in_heads(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        q = heads(m.up(x))
        q = q * (q.square().mean(-1, True) + 1e-5).rsqrt() * m.norm.weight
        return m.down(q.flatten(2))

    return t.step(t.spread(Model(run, **up_down(norm=nn.RMSNorm(6))), mlp), randn(*X))


def norm_over_heads(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        q = m.up(x)
        return m.down(q * (q.square().mean(-1, True) + 1e-5).rsqrt())

    return t.step(t.spread(Model(run, **up_down()), mlp), randn(*X))


def latent(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        q, rotary = heads(m.up(x)), m.shared(x)[..., 2:].unsqueeze(2)
        return m.down(torch.cat((q[..., :4] * rotary, q[..., 4:]), -1).flatten(2))

    return t.step(t.spread(Model(run, **up_down(shared=nn.Linear(8, 6))), mlp), randn(*X))


def router(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        return m.down(m.up(x) * m.gate(x).softmax(-1)[..., :1])

    return t.step(t.spread(Model(run, **up_down(gate=nn.Linear(8, 4))), mlp), randn(*X))


def bias_on_each_rank(t: Tools, divided: bool = False) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        bias = m.bias.weight.sum()
        y = m.up(x).sum(-1, keepdim=True) + (bias / t.ranks if divided else bias)
        return x + t.whole(t.placed(y, "Partial"))

    model = Model(run, up=nn.Linear(8, 24), bias=nn.Linear(1, 2))
    return t.step(t.spread(model, lambda a: {"up": a.ColwiseParallel()}), randn(*X))


def fused_projection(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        q, k, v = m.up(x).chunk(3, -1)
        return m.down(F.silu(q) * k * v)

    return t.step(t.spread(Model(run, up=nn.Linear(8, 72), down=nn.Linear(24, 8)), mlp), randn(*X))


def some_classes(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        return F.cross_entropy(m.up(x).flatten(0, 1), torch.arange(8))

    return t.step(t.spread(Model(run, up=nn.Linear(8, 24)), lambda a: {"up": a.ColwiseParallel()}), randn(*X))


def some_tokens(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        y = m.norm(m.down(F.relu(m.up(x))))
        return y.square().sum() / y[..., 0].numel()

    return t.step(t.spread(Model(run, **up_down(norm=nn.LayerNorm(8))), by_sequence), randn(*X))


def positions(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        y = m.norm(m.down(F.relu(m.up(x))))
        return m.out(y + m.table(torch.arange(y.shape[1])))

    def plan(a: Any) -> dict[str, Any]:
        return by_sequence(a) | {"out": a.ColwiseParallel(input_layouts=a.Shard(1), output_layouts=a.Replicate())}

    model = Model(run, **up_down(norm=nn.LayerNorm(8), table=nn.Embedding(4, 8), out=nn.Linear(8, 8)))
    return t.step(t.spread(model, plan), randn(*X))


def label_shift(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        y = m.norm(m.down(F.relu(m.up(x))))
        return y[:, :-1].flatten(0, 1).log_softmax(-1).square().mean()

    return t.step(t.spread(Model(run, **up_down(norm=nn.LayerNorm(8))), by_sequence), randn(*X))


def scale_of_a_part(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        y = m.up(x)
        return m.down(y * y.shape[-1] ** -0.5)

    return t.step(t.spread(Model(run, **up_down()), mlp), randn(*X))


# ------------------------------------------------------------------------------------------- layers and steps
def tied_weights(t: Tools) -> dict[str, Any]:
    model = Model(lambda m, ids: m.head(m.embed(ids)), embed=nn.Embedding(12, 8), head=nn.Linear(8, 12, bias=False))
    model.head.weight = model.embed.weight

    def plan(a: Any) -> dict[str, Any]:
        return {
            "embed": a.RowwiseParallel(input_layouts=a.Replicate()),
            "head": a.ColwiseParallel(output_layouts=a.Replicate()),
        }

    found = t.step(t.spread(model, plan), torch.arange(12).reshape(2, 6))
    return {**found, "weights that are trained": torch.tensor(len(list(model.parameters())))}


def vocabulary(t: Tools, padding: int | None = None) -> dict[str, Any]:
    model = Model(lambda m, ids: m.embed(ids), embed=nn.Embedding(13, 8, padding_idx=padding))
    plan = lambda a: {"embed": a.RowwiseParallel(input_layouts=a.Replicate())}  # noqa: E731
    return t.step(t.spread(model, plan), torch.arange(12).reshape(2, 6) + 1)


def clipped(t: Tools) -> dict[str, Any]:
    def run(m: Any, x: Any) -> Any:
        return m.norm(m.down(F.relu(m.up(x))))

    model = t.spread(Model(run, **up_down(norm=nn.LayerNorm(8))), mlp)
    t.step(model, randn(*X))
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    return {"norm": total, **{f"gradient of {name}": p.grad for name, p in model.named_parameters()}}


def loss_times_ranks(t: Tools) -> dict[str, Any]:
    model = t.spread(Model(lambda m, x: m.down(F.relu(m.up(x))), **up_down()), mlp)
    return t.step(model, randn(*X), lambda y: y.square().sum() / 8 * t.ranks)


# ------------------------------------------------------------------------------------------- DTensors themselves
def total_norm(t: Tools) -> dict[str, Any]:
    grads = [t.cut(randn(6, 4), 0), t.cut(randn(5, seed=1)), t.cut(randn(7, 3, seed=2), 1)]
    return {"norm": nn.utils.get_total_norm(grads)}


def clipped_dtensors(t: Tools) -> dict[str, Any]:
    weights = [nn.Parameter(t.cut(randn(6, 4) * 1e-6, 0)), nn.Parameter(t.cut(randn(5, seed=1) * 1e-6))]
    for w in weights:
        w.grad = w.detach().clone()
    nn.utils.clip_grad_norm_(weights, 1e-6)
    return {f"gradient {i}": w.grad * 1e6 for i, w in enumerate(weights)}


def summand_to_local(t: Tools) -> dict[str, Any]:
    x = t.cut(randn(4, 3), 0).requires_grad_()
    y = t.placed(t.local((x * x).sum(0)), "Partial")
    weighted(t.whole(y)).backward()
    return {"output": y, "gradient": x.grad}


def weight_to_local(t: Tools, said: bool = False) -> dict[str, Any]:
    x, w = t.cut(randn(4, 3), 0), t.cut(randn(3, seed=1)).requires_grad_()
    y = t.placed(t.local(x) * t.local(w, said), "Shard", 0)
    weighted(t.whole(y)).backward()
    return {"output": y, "gradient": w.grad}


def experts(t: Tools, said: bool = False) -> dict[str, Any]:
    x, w = t.cut(randn(4, 3), 0).requires_grad_(), t.cut(randn(2, 3, 3, seed=1), 0).requires_grad_()
    tokens = t.whole(x, said)
    y = torch.einsum("td,edh->th", tokens, t.local(w))
    weighted(t.whole(t.placed(y, "Partial"))).backward()
    return {"gradient of tokens": x.grad, "gradient of experts": w.grad}


def replicated_from_local(t: Tools) -> dict[str, Any]:
    x, w = randn(4, 3).requires_grad_(), t.cut(randn(3, 6, seed=1), 1).requires_grad_()
    y = t.whole(t.placed(x, "Replicate") @ w)
    weighted(y).backward()
    return {"output": y, "gradient of x": x.grad, "gradient of w": w.grad}


def recomputed(t: Tools) -> dict[str, Any]:
    torch.manual_seed(3)
    x = t.cut(torch.ones(4, 16), 0).requires_grad_()
    y = checkpoint(lambda x: F.dropout(x * 2.0), x, use_reentrant=False)
    y.sum().backward()
    return {"kept elements that have a gradient": (t.whole(y) != 0) == (t.whole(x.grad) != 0)}


def drawn(t: Tools) -> dict[str, Any]:
    torch.manual_seed(3)
    first, second = t.whole(F.dropout(t.cut(torch.ones(4, 16), 0))).chunk(2)
    return {"parts with other numbers": torch.tensor(not torch.equal(first, second))}


def view(t: Tools, shape: tuple[int, ...] = (12, 8), dim: int = 1, after: tuple[int, ...] = (-1, 6)) -> dict[str, Any]:
    x = t.cut(randn(*shape), dim).requires_grad_()
    y = x.view(after)
    weighted(t.whole(y)).backward()
    return {"output": y, "gradient": x.grad}


def convolution(t: Tools) -> dict[str, Any]:
    x, w = t.cut(randn(2, 3, 8, 16), 3).requires_grad_(), t.cut(randn(4, 3, 4, 4, seed=1)).requires_grad_()
    y = F.conv2d(x, w, stride=4)
    weighted(t.whole(y)).backward()
    return {"output": y, "gradient of x": x.grad, "gradient of w": w.grad}


def depthwise(t: Tools) -> dict[str, Any]:
    x, w = t.cut(randn(2, 4, 9), 1).requires_grad_(), t.cut(randn(4, 1, 3, seed=1), 0).requires_grad_()
    y = F.conv1d(x, w, groups=4)
    weighted(t.whole(y)).backward()
    return {"output": y, "gradient of x": x.grad, "gradient of w": w.grad}


def summand_and_number(t: Tools) -> dict[str, Any]:
    x = t.cut(randn(4, 3), 0)
    return {"sum": x.sum() + 10, "norm": torch.linalg.vector_norm(x) + 2}


def largest(t: Tools) -> dict[str, Any]:
    values, places = torch.max(t.cut(randn(4, 6), 1), dim=1)
    return {"values": values, "places": places, "argmax": torch.argmax(t.cut(randn(4, 6, seed=1), 1), 1)}


def number_of_a_sum(t: Tools) -> dict[str, Any]:
    return {f"times {i}": t.cut(randn(4), 0).mean() * i for i in (1, 2, 3)}
