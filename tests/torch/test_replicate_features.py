"""`replicate` with torch's features around a module: copies, autocast, graphs that are used twice, hooks, compilers."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Replicate,
    ReplicatedModule,
    Shard,
    coalesce_gradients,
    distribute_tensor,
    parallelize_module,
    replicate,
)
from hyper_parallel.core.communication import asynchronous
from hyper_parallel.core.communication.recorder import LISTENERS
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn


class Mixed(nn.Module):
    """Parameters of three dtypes, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6).double(), nn.Linear(6, 3).bfloat16()
        self.d = nn.Linear(3, 2)

    def forward(self, x: Any, last: bool = True) -> Any:
        h = torch.tanh(self.b(torch.tanh(self.a(x)).double()))
        return self.d(self.c(h.bfloat16()).float()) if last else h


def two(module: nn.Module, mesh: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A module, its replicated copy, and this rank's batch; ranks have the same."""
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    plain = module.to(device())
    return plain, replicate(copy.deepcopy(plain), mesh, **options), randn(3, 4)


def check(plain: Any, copied: Any, what: str, tolerance: float = 1e-5) -> None:
    for (name, p), q in zip(plain.named_parameters(), copied.parameters(), strict=True):
        close(q, p, f"{what}: {name}", tolerance)
        assert (p.grad is None) is (q.grad is None), f"{what}: gradient of {name}"
        if p.grad is not None:
            close(q.grad, p.grad, f"{what}: gradient of {name}", tolerance)


@on_mesh()
def dtypes(mesh: Any) -> None:
    for cap in (1e-6, 25):
        for last in ([True, False], [False, False], [True, True]):
            plain, copied, x = two(Mixed(), mesh, bucket_cap_mb=cap)
            (sum(plain(x, flag).double().sum() for flag in last) / 2).backward()
            with CommDebugMode() as comm:
                copied(x, last[mesh.get_local_rank(0)]).double().sum().backward()
            check(plain, copied, f"{last}", 2e-2)
            assert len(comm.events) == (8 if cap < 1 else 3)
    # The collectives of a loss of one parameter, and no others.
    plain, copied, x = two(Mixed(), mesh)
    with CommDebugMode() as comm:
        (got,) = torch.autograd.grad(copied(x).sum(), [copied.b.weight])
    close(got, torch.autograd.grad(plain(x).sum(), [plain.b.weight])[0], "one gradient", 2e-2)
    assert len(comm.events) == 3 and all(p.grad is None for p in copied.parameters())
    plain(x).sum().backward(inputs=[plain.a.bias])
    copied(x).sum().backward(inputs=[copied.a.bias])
    check(plain, copied, "inputs", 2e-2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))


@on_mesh()
def graphs(mesh: Any) -> None:
    plain, copied, x = two(mlp(), mesh)
    for m in (plain, copied):
        given = x.clone().requires_grad_()
        loss = (m(given) ** 2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        a, b = m(given), m(m(given))
        (a * b).sum().backward()
        first, second = m(given).sum(), m(given * 2).square().sum()
        second.backward()
        first.backward()
    check(plain, copied, "graphs")
    (of_input,) = torch.autograd.grad(copied(given).square().sum(), [given])
    close(of_input, torch.autograd.grad(plain(given).square().sum(), [given])[0], "gradient of the input")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(copied(x), plain(x), mode.__name__)
            copied(x).add_(1)
    with torch.no_grad():
        for m in (plain, copied):
            for p in m.parameters():
                p.mul_(0.5)
    y = copied(x)
    y += 1
    y.sum().backward()
    (plain(x) + 1).sum().backward()
    check(plain, copied, "after a write")
    # A forward without backward, and other parameters after it.
    copied(x).sum()
    for m in (plain, copied):
        m.double()
        m(x.double()).sum().backward()
    check(plain, copied, "in another dtype")
    seen = []
    copied[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.placements))
    copied[0].weight.register_hook(lambda g: g * 2)
    copied(x.double()).sum().backward()
    assert seen == [(Replicate(),)]
    plain[0].weight.register_hook(lambda g: g * 2)
    plain(x.double()).sum().backward()
    check(plain, copied, "hooks")
    with pytest.raises(RuntimeError, match="second-order gradients"):
        torch.autograd.grad(copied(x.double()).square().sum(), list(copied.parameters()), create_graph=True)
    copied.zero_grad()
    copied(x.double()).sum().backward()


@on_mesh()
def copies(mesh: Any) -> None:
    plain, copied, x = two(mlp(), mesh)
    copied(x).sum().backward()
    assert isinstance(copied, ReplicatedModule) and isinstance(copied, nn.Sequential)
    other = copy.deepcopy(copied)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    plain(x).sum().backward()
    check(plain, copied, "next to a copy")
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    for again in (copy.deepcopy(other), copy.copy(other), torch.load(file, weights_only=False)):
        again.zero_grad()
        with again.no_sync():
            again(x).sum().backward()
        again(x).sum().backward()
        twice = copy.deepcopy(plain)
        with torch.no_grad():
            for p in twice.parameters():
                p.mul_(2)
        twice.zero_grad()
        (twice(x).sum() * 2).backward()
        check(twice, again, "a copy")
    copied.load_state_dict(other.state_dict())
    assert all(isinstance(v, DTensor) for v in other.state_dict().values())
    close(copied(x), other(x), "loaded")
    # Nothing of a model outlives it, whatever became of its graph.
    for backward in (True, False):
        model = replicate(mlp().to(device()), mesh)
        y = model(x).sum()
        if backward:
            y.backward()
        gone = weakref.ref(model[0].weight)
        del model, y
        gc.collect()
        assert gone() is None, backward


@dataclass
class Output:
    y: Any
    more: Any = None


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other, self.lstm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        self.aside = self.other(x).square().sum()
        return Output(self.linear(x), more=[{"x": self.lstm(x.detach()), "fixed": self.linear(x).detach()}, (3, None)])


@on_mesh()
def returned(mesh: Any) -> None:
    plain, copied, x = two(Returns(), mesh)
    for module in (plain, copied):
        out = module(x)
        assert not out.more[0]["fixed"].requires_grad and out.more[1] == (3, None)
        (out.y.sum() + out.more[0]["x"].sum() * 3 + module.aside).backward()
        assert isinstance(module.linear.weight, nn.Parameter)
        module(x)
        module.aside.backward()  # of something that was not returned
    check(plain, copied, "results")
    close(copied.lstm.running_mean, plain.lstm.running_mean, "buffer")
    plain, copied, x = two(Returns(), mesh, broadcast_buffers=True)
    copied(x + mesh.get_local_rank(0)).y.sum().backward()
    copied(x)
    plain(x)
    plain(x)
    close(copied.lstm.running_mean, plain.lstm.running_mean, "buffer of the first rank")


@on_mesh()
def autocast(mesh: Any) -> None:
    plain, copied, x = two(mlp(), mesh)
    for m in (plain, copied):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = m(x)
        assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
    check(plain, copied, "autocast", 2e-2)
    with coalesce_gradients():
        copied(x).sum().backward()
    plain(x).sum().backward()
    check(plain, copied, "coalesce_gradients", 2e-2)
    # Modules that are called by themselves, and one that reads the parameters of another.
    for m in (plain, copied):
        m.zero_grad()
        h = m[2](torch.relu(m[0](x)))
        h.sum().backward()
    check(plain, copied, "parts")
    attention = two(nn.MultiheadAttention(4, 2, batch_first=True), mesh)[:2]
    for m in attention:
        m(x[None], x[None], x[None])[0].sum().backward()
    check(*attention, "attention")
    recurrent = two(nn.LSTM(4, 5, batch_first=True), mesh)[:2]
    for m in recurrent:
        m(x[None])[0].square().sum().backward()
    check(*recurrent, "recurrent")


@on_mesh()
def overlapped(mesh: Any) -> None:
    """The first bucket is sent before backward comes to the first layer, and waited for after."""
    order: list[str] = []
    original = asynchronous.start

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            order.append("wait")
            self.work.wait()

    def start(*args: Any) -> Any:
        order.append("send")
        return Watched(original(*args))

    model = replicate(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).to(device()), mesh, bucket_cap_mb=7e-5)
    for i, layer in enumerate(model):
        layer.register_full_backward_hook(lambda *_, i=i: order.append(f"layer {i}"))
    asynchronous.start = start  # type: ignore[assignment]
    try:
        model(randn(2, 4).requires_grad_()).sum().backward()
    finally:
        asynchronous.start = original
    sent = ["send", "layer 2", "send", "layer 1", "send", "layer 0"]
    if mesh.platform.fast is None:  # nothing brings backward to a bucket before its turn
        sent = sorted(sent, key=lambda what: what == "send")
    assert order == [*sent, "wait", "wait", "wait"]


@on_mesh()
def refused(mesh: Any) -> None:
    x = randn(3, 4)
    nested = nn.Sequential(mlp(), mlp()).to(device())
    replicate(nested[0], mesh)
    with pytest.raises(ValueError, match="'0' of Sequential is under replicate already"):
        replicate(nested, mesh)
    assert not isinstance(nested[1][0].weight, DTensor)
    close(nested(x), nested(x))
    with pytest.raises(TypeError, match="takes a Module"):
        replicate(x, mesh)
    with pytest.raises(ValueError, match="positive number of MiB"):
        replicate(mlp(), mesh, bucket_cap_mb=0)
    with pytest.raises(ValueError, match="has no values"):
        replicate(nn.LazyLinear(4), mesh)
    empty = replicate(nn.Linear(4, 4, device="meta"), mesh)
    with pytest.raises(ValueError, match=r"parameter 'weight' has no values.*to_empty"):
        empty(x)
    model = replicate(mlp().to(device()), mesh)
    with pytest.raises(ValueError, match="one batch"):
        model((x, distribute_tensor(x, mesh, [Shard(0)])))
    with pytest.raises(ValueError, match="placed"):
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
    sparse = replicate(nn.Embedding(5, 3, sparse=True).to(device()), mesh)
    with pytest.raises(TypeError, match="dense gradients"):
        sparse(torch.tensor([1, 2], device=device())).sum().backward()
    # All modules are called by one function. Where earlier tests have compiled it to torch's limit, torch skips it.
    torch._dynamo.reset()
    # Not in a CommDebugMode: torch compiles nothing inside of a mode that sees operations.
    sent: list[Any] = []
    LISTENERS.append(sent.append)
    try:
        with pytest.raises(Exception, match="a unit of data parallelism, which cannot be compiled"):
            torch.compile(model, backend="eager", fullgraph=True)(x)
    finally:
        LISTENERS.remove(sent.append)
    assert not sent
    inside = replicate(mlp().to(device()), mesh)
    inside[0].compile(backend="eager")
    inside(x).sum().backward()
    assert inside[0].weight.grad is not None
    model[0].weight = nn.Parameter(torch.ones(7, 4, device=device()))
    with pytest.raises(ValueError, match=r"the parameter '0\.weight' was replaced"):
        model(x)
    ignoring = nn.Sequential(mlp(), mlp()).to(device())
    replicate(ignoring, mesh, ignored_modules=[ignoring[1]])
    ignoring(x).sum().backward()
    assert not isinstance(ignoring[1][0].weight, DTensor) and ignoring[0][0].weight.grad is not None


@pytest.mark.parametrize(
    "job", [dtypes, graphs, copies, returned, autocast, overlapped, refused], ids=lambda job: job.__name__
)
def test_replicate(pool: Any, job: Any) -> None:
    pool.run(2, job)


@on_mesh()
def without_values(mesh: Any) -> None:
    """A model on meta, which each rank initialises in its own way: the first one's values count, in a mesh of all."""
    torch.manual_seed(5)
    single = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    replicate(model, None if mesh.size() == torch.distributed.get_world_size() else mesh)
    model.to_empty(device=device())
    taken = model.state_dict()
    with torch.no_grad():
        for x, y in zip(model.state_dict().values(), single.state_dict().values(), strict=True):
            getattr(x, "to_local", lambda x=x: x)().copy_(y + mesh.get_local_rank(0))
    single.to(device()).eval()
    model.eval()
    x = randn(2, 4).double()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (single, model)]
    for _ in range(2):
        for m, optimizer in zip((single, model), optimizers, strict=True):
            m(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        close(model(x), single(x))
    for name, y in single.state_dict().items():
        found = taken[name]
        close(found.full_tensor() if isinstance(found, DTensor) else found, y, name)


@on_ranks(1, 2, 4)
def test_models_without_values(pool: Any, world_size: int) -> None:
    pool.run(world_size, without_values)
