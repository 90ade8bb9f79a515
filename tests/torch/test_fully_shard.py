"""`fully_shard` of one unit with torch's features around a module: checkpointing, copies, autocast, compilers, graphs
that are used twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import CommDebugMode, DTensor, Replicate, get_platform
from hyper_parallel.core.communication.recorder import LISTENERS
from hyper_parallel.core.data_parallel.fully_shard import buffers_of, fully_shard
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device


class Model(nn.Module):
    """Parameters of two dtypes, one of which only the first rank has a part of. Of several results one is a
    parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(4, 7)
        self.down = nn.Linear(7, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.up(x))
        return {
            "y": self.down(h.to(self.down.weight.dtype)).float(),
            "h": (h * self.scale, h.detach()),
            "scale": self.scale,
            "n": 3,
        }


class Shift(nn.Module):
    """A sum, which gives its own gradient to both operands."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return x + self.shift


def total(found: Any) -> Any:
    return (found["y"] ** 2).sum() + (found["h"][0] ** 3).sum() + (found["scale"] * 2).sum()


def of_two(a: Any, b: Any) -> Any:
    return total(a) * 0.1 + total(b) * total(a) * 0.01


def autocast(module: Any, x: Any) -> Any:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return total(module(x))


#: name -> loss of (module, input).
LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda m, x: total(m(x)),
    "one result": lambda m, x: m(x)["h"][0].sum(),
    "one dtype": lambda m, x: m(x)["scale"].sum(),
    "twice": lambda m, x: of_two(m(x), m(x * 2)),
    "in a row": lambda m, x: total(m(torch.cat([m(x)["h"][0][:, :3], x[:, :1]], 1))),
    "checkpoint": lambda m, x: total(checkpoint(m, x, use_reentrant=False)),
    "reentrant checkpoint": lambda m, x: checkpoint(lambda x: m(x)["y"] * 2, x, use_reentrant=True).sum(),
    "checkpoint of more": lambda m, x: checkpoint(lambda x: torch.sin(total(m(x))), x, use_reentrant=False),
    "autocast": autocast,
}


def models(mesh: Any, dtype: torch.dtype = torch.float16) -> tuple[Any, Any, list[Any]]:
    """A model, its sharded copy, and the parts of the batch of all ranks."""
    torch.manual_seed(0)
    plain = Model(dtype).to(device())
    parts = [torch.randn(2, 4, generator=torch.Generator().manual_seed(i)).to(device()) for i in range(mesh.size())]
    return (
        plain,
        fully_shard(copy.deepcopy(plain), mesh=mesh, reshard_after_forward=True),
        [x.requires_grad_() for x in parts],
    )


def check(plain: Any, sharded: Any, what: str, tolerance: float = 5e-3) -> None:
    """Half precision rounds sums of ranks otherwise than sums of a batch."""
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        wanted = torch.zeros_like(p) if p.grad is None else p.grad
        close(torch.zeros_like(p) if q.grad is None else q.grad, wanted, f"{what}: {name}", tolerance)


def freed(module: Any) -> bool:
    assert buffers_of(module)
    return all(b.whole.untyped_storage().nbytes() == 0 for b in buffers_of(module))


@on_mesh()
def losses(mesh: Any) -> None:
    for name, loss in LOSSES.items():
        plain, sharded, parts = models(mesh, torch.float32 if name == "autocast" else torch.float16)
        for _ in range(2):  # gradients are accumulated
            (sum(loss(plain, x) for x in parts) / len(parts)).backward()
            loss(sharded, parts[mesh.get_local_rank(0)].detach().requires_grad_()).backward()
            # A dtype that a loss does not need stays until the next call.
            assert freed(sharded) or name in ("one result", "one dtype", "in a row"), name
        check(plain, sharded, name, 3e-2 if name == "autocast" else 5e-3)


@on_mesh()
def graphs(mesh: Any) -> None:
    plain, sharded, parts = models(mesh)
    x = parts[mesh.get_local_rank(0)]
    # One graph, twice; gradients of the input alone, after which the forward reads new values.
    loss = total(sharded(x))
    loss.backward(retain_graph=True)
    loss.backward()
    (sum(total(plain(x)) for x in parts) / len(parts) * 2).backward()
    check(plain, sharded, "twice through one graph")
    (of_input,) = torch.autograd.grad(total(sharded(x)), [x])
    close(of_input, torch.autograd.grad(total(plain(x)), [x])[0], "gradient of the input")
    with torch.no_grad():
        for module in (plain, sharded):
            for p in module.parameters():
                p.mul_(1.5)
    close(sharded(x)["y"], plain(x)["y"], "new values")
    # Without gradients, in the other mode too, nothing is kept that a later forward would meet.
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        fresh = copy.deepcopy(sharded)
        with mode():
            close(fresh(x)["y"], plain(x)["y"], mode.__name__)
        total(fresh(x)).backward()
        close(fresh.half()(x.half())["y"], plain(x)["y"], "in another dtype", 1e-2)
    # A copy has parameters and storage of its own.
    copied = copy.deepcopy(sharded)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2)
    close(sharded(x)["y"], plain(x)["y"], "next to a copy")
    assert buffers_of(copied) == [] and copied(x)["y"].shape == (2, 3) and freed(copied)
    loss = total(sharded(x))
    with torch.no_grad():
        sharded.up.weight.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between a forward and its backward"):
        loss.backward()
    with pytest.raises(RuntimeError, match="second-order gradients"):
        torch.autograd.grad(total(sharded(x)), list(sharded.parameters()), create_graph=True)
    # An accumulated gradient stays as it is while the program writes to the one that it has given.
    shift = fully_shard(Shift().to(device()), mesh=mesh)
    given = torch.ones(3, device=device())
    shift.set_requires_gradient_sync(False)
    shift(given).backward(given)
    shift.set_requires_gradient_sync(True)
    shift(given).backward(given.zero_())
    close(shift.shift.grad, torch.ones(3, device=device()), "an accumulated gradient")


@on_mesh()
def around(mesh: Any) -> None:
    """Backward from an auxiliary loss alone, begun in each way: parameters are gathered first, and freed after."""
    kept: list[Any] = []

    def call(linear: Any, x: Any) -> Any:
        kept[:] = [torch.tanh(linear(linear(x))).square().sum()]
        return linear(x)

    torch.manual_seed(3)
    plain = Calls(call)
    sharded = fully_shard(copy.deepcopy(plain), mesh=mesh, reshard_after_forward=True)
    x = torch.randn(2, 4).to(device()).requires_grad_()

    def aside(module: Any) -> Any:
        module(x)
        return kept[0]

    wanted = torch.autograd.grad(aside(plain), [*plain.parameters(), x])
    gather = {"all_gather": 1} if mesh.size() > 1 else {}
    ways: dict[str, Callable[[Any], Any]] = {
        "backward": lambda y: y.backward(),
        "several roots": lambda y: torch.autograd.backward([y, x.sum() * 0]),
        "an edge": lambda y: torch.autograd.backward(torch.autograd.graph.get_gradient_edge(y)),
        "a distributed root": lambda y: DTensor.from_local(y, mesh, [Replicate()]).backward(),
        "grad": lambda y: torch.autograd.grad(y, [*sharded.parameters(), x]),
    }
    for name, way in ways.items():
        sharded.zero_grad()
        x.grad = None
        y = aside(sharded)
        assert freed(sharded)
        with CommDebugMode() as comm:
            found = way(y) or [*(p.grad for p in sharded.parameters()), x.grad]
        assert freed(sharded) and comm.get_comm_counts() == {**gather, "reduce_scatter": 1}, (name, comm.events)
        for g, of_plain in zip(found, wanted, strict=True):
            close(g, of_plain, name)
    y = aside(sharded)
    with torch.no_grad():
        sharded.linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between a forward and its backward"):
        y.backward()


@on_mesh()
def checkpoints_inside(mesh: Any) -> None:
    """A recomputation in backward finds whole parameters, and its gradients are reduced with the others."""
    for reentrant in (False, True):
        torch.manual_seed(3)
        plain = Calls(lambda m, x, how=reentrant: checkpoint(m, checkpoint(m, x, use_reentrant=how), use_reentrant=how))
        sharded = fully_shard(copy.deepcopy(plain), mesh=mesh, reshard_after_forward=True)
        parts = [torch.randn(2, 4).to(device()).requires_grad_() for _ in range(mesh.size())]
        x = parts[mesh.get_local_rank(0)]
        (sum(plain(x).sin().sum() for x in parts) / len(parts)).backward()
        for repeat in range(2):
            with CommDebugMode() as comm:
                sharded(x).sin().sum().backward()
            assert comm.get_comm_counts() == {"all_gather": 2, "reduce_scatter": 1}, (reentrant, comm.get_comm_counts())
            assert freed(sharded)
            for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
                close(q.grad, p.grad * (repeat + 1), f"{name}, reentrant {reentrant}")


class Calls(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.call = nn.Linear(4, 4, device=device()), call

    def forward(self, x: Any) -> Any:
        return self.call(self.linear, x)


@on_mesh()
def compiled(mesh: Any) -> None:
    plain, sharded, parts = models(mesh)
    x = parts[mesh.get_local_rank(0)]
    sent: list[Any] = []
    # Not in a CommDebugMode: torch compiles nothing inside of a mode that sees operations.
    LISTENERS.append(sent.append)
    try:
        with pytest.raises(Exception, match="a unit of data parallelism, which cannot be compiled"):
            torch.compile(sharded, backend="eager", fullgraph=True)(x)
    finally:
        LISTENERS.remove(sent.append)
    assert not sent
    close(torch.compile(sharded, backend="eager")(x)["y"], plain(x)["y"])  # the graph breaks around the unit
    sharded.up.compile(backend="aot_eager")
    close(sharded(x)["y"], plain(x)["y"])


@on_mesh()
def overlapped(mesh: Any) -> None:
    """A collective that has started is not done: other work can run before the wait for it."""
    platform: Any = get_platform()
    group = mesh.platform_group(0)
    x = torch.full((3,), 1.0 + mesh.get_local_rank(0), device=device())
    out = torch.empty(3 * mesh.size(), device=device())
    work = platform.start_collective("all_gather", out, x, "", group, mesh.size())
    assert hasattr(work, "is_completed")
    work.wait()
    close(out, torch.arange(1.0, mesh.size() + 1).repeat_interleave(3))
    half = torch.ones(3, dtype=torch.bfloat16)
    assert platform.from_bytes(platform.bytes_of(half), half.shape, half.dtype).dtype is torch.bfloat16


class Two(nn.Module):
    """Two layers, whose weights ``weights`` makes."""

    def __init__(self, weights: Callable[[], tuple[Any, Any]]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, device=device()), nn.Linear(4, 4, device=device())
        self.a.weight, self.b.weight = weights()

    def forward(self, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)))


@on_mesh()
def shared_memory(mesh: Any) -> None:
    """Parameters in one storage: those that share elements are refused, and others are right."""

    def of(take: Callable[[Any], tuple[Any, Any]], frozen: bool = False) -> Callable[[], Two]:
        def weights() -> tuple[Any, Any]:
            both = torch.linspace(-1, 1, 64, device=device()).reshape(8, 8)
            first, second = take(both)
            return nn.Parameter(first, not frozen), nn.Parameter(second, not frozen)

        def make() -> Two:
            torch.manual_seed(0)
            return Two(weights)

        return make

    for make in (of(lambda x: (x[:4, :4], x[:4, :4])), of(lambda x: (x[:4, :4], x[3:7, 3:7]))):
        model = make()
        with pytest.raises(ValueError, match=r"'a\.weight'.*'b\.weight'.*share memory.*the same Parameter object"):
            fully_shard(model, mesh=mesh)
        assert not isinstance(model.a.bias, DTensor)
        for layer in (model.a, model.b):  # nothing writes to them then
            layer.weight.requires_grad_(False)
        fully_shard(model, mesh=mesh)
    x = torch.linspace(-1, 1, 12, device=device()).reshape(3, 4)
    for make in (of(lambda x: (x[:4, :4], x[:4, 4:])), of(lambda x: (x[:4, :4].T, x[4:, :4]))):
        single, sharded = make(), fully_shard(make(), mesh=mesh)
        for model in (single, sharded):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(2):
                model(x).square().sum().backward()
                optimizer.step()
        for (name, p), q in zip(single.named_parameters(), sharded.named_parameters(), strict=True):
            close(q[1].full_tensor(), p, name)
            close(q[1].grad.full_tensor(), p.grad, name)


@pytest.mark.parametrize(
    "job",
    [losses, graphs, around, checkpoints_inside, compiled, overlapped, shared_memory],
    ids=lambda job: job.__name__,
)
def test_fully_shard(pool: Any, job: Any) -> None:
    pool.run(2, job)
