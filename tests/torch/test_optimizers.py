"""Calls that optimizers, gradient clipping and loss scaling make and receive, on distributed parameters.

`test_optimizer_matrix` trains with every optimizer.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import ColwiseParallel, DTensor, RowwiseParallel, Shard, parallelize_module
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.support.programs import run_each
from tests.torch.support import close, device, full, randn, shard


def models(mesh: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model and the same one sharded unevenly over two or three ranks."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to(device())
    sharded = copy.deepcopy(plain)
    parallelize_module(sharded, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return plain, sharded


def loss_of(model: nn.Module, step: int) -> Any:
    return model(randn(5, 4, seed=step)).pow(2).mean()


@on_mesh(2, 2, names=("dp", "tp"))
def clip_by_norm(mesh: Any) -> None:
    for foreach in (None, True, False):
        for order in (2.0, 1.0, 3.0, float("inf")):
            plain, sharded = models(mesh["tp"])
            for model in (plain, sharded):
                loss_of(model, 0).backward()
            clipped = [
                nn.utils.clip_grad_norm_(m.parameters(), 0.05, norm_type=order, foreach=foreach)
                for m in (plain, sharded)
            ]
            close(clipped[1], clipped[0], f"norm {order}, foreach={foreach}")
            for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
                close(q.grad, p.grad, f"gradient clipped by norm {order}, foreach={foreach}")
    total = nn.utils.get_total_norm([p.grad for p in sharded.parameters()])
    nn.utils.clip_grads_with_norm_(sharded.parameters(), 0.01, total)
    nn.utils.clip_grad_value_(sharded.parameters(), 0.001)
    assert all(full(p.grad).abs().max() <= 0.001 for p in sharded.parameters())


@on_mesh()
def loss_scaling(mesh: Any) -> None:
    plain, sharded = models(mesh)
    for bad in (False, True):
        found = []
        for model in (plain, sharded):
            model.zero_grad()
            scaler = torch.amp.GradScaler(device().type, init_scale=8.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler.scale(loss_of(model, 0)).backward()
            if bad:
                # One element of the first weight, which one rank holds.
                g = model[0].weight.grad
                spoiled = full(g).clone()
                spoiled[-1, -1] = float("inf")
                model[0].weight.grad = shard(spoiled, mesh, Shard(0)) if isinstance(g, DTensor) else spoiled
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        assert found == [4.0, 4.0] if bad else found == [8.0, 8.0]
        for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
            close(q, p)


def b_like(a: Any) -> Any:
    return torch.zeros_like(a)


@on_mesh()
def kernels_over_lists(mesh: Any) -> None:
    a, b = shard(randn(5, 3), mesh, Shard(0)), shard(randn(4), mesh, Shard(0))
    sums = torch._foreach_add([a, b], [a, b])
    assert [s._layout for s in sums] == [a._layout, b._layout]
    close(sums[0], 2 * full(a))
    close(torch._foreach_mul([a], torch.tensor(2.0))[0], 2 * full(a))
    close(torch._foreach_mul([a], (a.sum() * 0 + 2.0))[0], 2 * full(a))
    close(torch._foreach_norm([a, b])[1], full(b).norm())
    close(torch._foreach_max([a])[0], full(a).max())
    for order in (1.0, 2.0, 3.0):
        close(torch._foreach_powsum([a, b], order)[0], full(a).abs().pow(order).sum())
    whole = shard(randn(5, 3, seed=1), mesh, Shard(1))
    torch._foreach_copy_([a], [whole])
    close(a, full(whole))
    # Layouts that differ, and shapes that broadcast, go tensor by tensor.
    close(torch._foreach_sub([a, a], [torch.zeros_like(a), whole])[1], torch.zeros(5, 3))
    column, row = shard(randn(5, 1), mesh, Shard(0)), shard(randn(1, 3), mesh, Shard(1))
    close(torch._foreach_mul([column], [row])[0], randn(5, 1) * randn(1, 3))
    close(torch._foreach_addcmul([a], [whole], [whole], 2.0)[0], full(a) + 2 * full(a) ** 2)
    torch._foreach_addcdiv_([a], [whole], [whole.abs() + 1], value=2.0)
    close(a, full(whole) + 2 * full(whole) / (full(whole).abs() + 1))
    partial = column.sum(0)
    close(torch._foreach_mul([partial], 2.0)[0], 2 * randn(5, 1).sum(0))
    with pytest.raises(ValueError, match="plain tensor"):
        torch._foreach_add_([a], [full(a)])
    if mesh.size() > 1:
        with pytest.raises(ValueError, match="_fused_sgd_ needs tensors with equal layouts"):
            zeros = dict.fromkeys(["weight_decay", "momentum", "lr", "dampening"], 0.0)
            torch._fused_sgd_([a], [whole], [], is_first_step=True, nesterov=False, maximize=False, **zeros)


@on_mesh()
def plain_tensors_and_distributed_numbers(mesh: Any) -> None:
    """Clipping without lists: its calls on the gradients of parameters that are not distributed."""
    number, plain = shard(randn(5), mesh, Shard(0)).sum(), randn(5, 3)
    wanted = randn(5).sum()
    for name in ("add_", "sub_", "mul_", "div_"):
        got = randn(5, 3)
        assert getattr(got, name)(number) is got and type(got) is torch.Tensor
        close(got, getattr(randn(5, 3), name)(wanted))
    close(plain.add_(number, alpha=2), randn(5, 3) + 2 * wanted)
    with pytest.raises(ValueError, match="plain tensor"):
        plain.mul_(shard(randn(5, 3), mesh, Shard(0)))
    # Each rank would compute a part of its gradient, or all of it: this cannot be known.
    with pytest.raises(ValueError, match="plain tensor"):
        plain.mul_(shard(randn(5), mesh, Shard(0)).requires_grad_().sum())


@on_mesh()
def closures_and_step_hooks(mesh: Any) -> None:
    """Interception is off while an element-wise optimizer steps, but not in the user's hooks and closures."""
    plain, sharded = models(mesh)
    for model in (plain, sharded):
        optimizer, seen = torch.optim.AdamW(model.parameters(), lr=0.1), []

        def closure(model: nn.Module = model, optimizer: Any = optimizer, seen: list = seen) -> Any:
            optimizer.zero_grad()
            seen.append(tuple(model[0].weight.shape))
            loss = model(randn(5, 4)).pow(2).mean() + model[0].weight.pow(2).sum()
            loss.backward()
            return loss

        optimizer.register_step_pre_hook(lambda o, a, k, m=model, s=seen: s.append(tuple(m[0].weight.shape)))
        optimizer.register_step_post_hook(lambda o, a, k, m=model, s=seen: s.append(m[0].weight.sum().item() * 0))
        losses = [float(full(optimizer.step(closure))) for _ in range(2)]
        assert losses[1] < losses[0] and seen == [(7, 4), (7, 4), 0.0] * 2

        def fail() -> Any:
            raise KeyError("closure")

        with pytest.raises(KeyError, match="closure"):
            optimizer.step(fail)
        assert tuple(model[0].weight.shape) == (7, 4)
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        close(q, p)


@on_mesh()
def training_loop_with_hooks_on_the_optimizer(mesh: Any) -> None:
    plain, sharded = models(mesh)
    for model in (plain, sharded):
        optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

        def step_at_once(p: Any, own: dict[Any, Any] = optimizers) -> None:
            own[p].step()
            own[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step_at_once)
        for step in range(2):
            loss_of(model, step).backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        close(q, p)


def test_clip_by_norm(pool: Any) -> None:
    pool.run(4, clip_by_norm)


PROGRAM = """
import torch
seen = []
class Mine(torch.optim.AdamW):
    pass
before = [cls([torch.ones(2, requires_grad=True)]) for cls in (torch.optim.AdamW, Mine)]
from hyper_parallel import Shard, distribute_tensor, init_device_mesh
mesh = init_device_mesh(None, (1,))
for cls in (torch.optim.AdamW, Mine):
    p = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
    p.pow(2).sum().backward()
    optimizer = cls([p])
    optimizer.register_step_post_hook(lambda *args: seen.append(1))
    optimizer.step()
    assert optimizer.state[p]["exp_avg"]._layout is p._layout
assert seen == [1, 1], seen
for optimizer in before:
    optimizer.step()
print("done")
"""


def test_optimizers_made_before() -> None:
    """Once a class has an instance, torch has wrapped its step already."""
    (ended,) = run_each(["-c", PROGRAM], [{}])
    assert (ended.status, ended.out.strip()) == (0, "done"), ended.err


JOBS = [
    plain_tensors_and_distributed_numbers,
    loss_scaling,
    kernels_over_lists,
    closures_and_step_hooks,
    training_loop_with_hooks_on_the_optimizer,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
@on_ranks(1, 2, 3)
def test_jobs(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)
