"""The bodies of the tests, for the device of the backend under test: so that a machine without a GPU can run them too.

Each function takes the mesh first and can be a job of the test pool. The reference is the single-device model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel import ColwiseParallel, CommDebugMode, DTensor, RowwiseParallel, get_platform, parallelize_module
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import torch_adapter
from tests.torch.support import close, device, full, randn

MLP = {"up": ColwiseParallel(), "down": RowwiseParallel()}
ATTENTION = {"w[qkv]": ColwiseParallel(), "wo": RowwiseParallel()}
REDUCE: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "min": min,
    "avg": lambda xs: sum(xs) / len(xs),
    "product": lambda xs: xs[0] * (1 if len(xs) == 1 else xs[1]),
}
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def two_copies(make: Callable[[], nn.Module], plan: dict[str, Any], mesh: Any, dtype: Any = torch.float32) -> tuple:
    """The single-device model and a parallelised copy of it, with the same numbers on all ranks."""
    torch.manual_seed(0)
    single = make().to(device(), dtype)
    return single, parallelize_module(copy.deepcopy(single), mesh, plan)


@spmd.on_mesh()
def collectives(mesh: Any) -> str:
    """Every verb of the contract keeps its promise, for every dtype that it supports. Returns the backend."""
    platform, group, size, rank = get_platform(), mesh.platform_group(0), mesh.size(), mesh.get_local_rank()
    for dtype in DTYPES:

        def tensor(*numbers: float, dtype: Any = dtype) -> torch.Tensor:
            return torch.tensor(numbers).to(device(), dtype)

        def same(x: torch.Tensor, *numbers: float) -> None:
            assert x.device == device() and torch.equal(x, tensor(*numbers)), (x, numbers)

        everyone = list(range(1, size + 1))
        for op in ("sum", "max", "min", "avg", *(["product"] if size <= 2 else [])):
            wanted = REDUCE[op]([float(r) for r in everyone]) if dtype is not torch.bool else 1.0
            if platform.supports("all_reduce", op, tensor(1)):
                same(platform.all_reduce(tensor(rank + 1, rank + 1), op, group), wanted, wanted)
            if platform.supports("reduce_scatter", op, tensor(1)):
                same(platform.reduce_scatter(tensor(*[rank + 1] * size), op, group, size), wanted)
        same(platform.all_gather(tensor(rank + 1), group, size), *everyone)
        same(platform.all_to_all(tensor(*[rank + 1] * size), group, size), *everyone)
        same(platform.broadcast(tensor(rank + 1), size - 1, group), size)
        parts = [tensor(r) for r in everyone] if rank == 0 else None
        same(platform.scatter(tensor(0), parts, 0, group), rank + 1)
    platform.barrier(group)
    assert platform.all_gather_object({"rank": rank}, group, size) == [{"rank": r} for r in range(size)]
    return torch.distributed.get_backend(platform.native_group(group))


@spmd.on_mesh()
def styles(mesh: Any) -> dict[str, int]:
    """An MLP with sizes that do not divide, and attention: values and all gradients. Returns the collectives."""
    counts: Counter[str] = Counter()
    cases = [
        (lambda: torch_adapter.Mlp(10, 7), MLP, (3, 10)),
        (lambda: torch_adapter.Attention(24, 2), ATTENTION, (2, 5, 24)),
    ]
    for make, plan, shape in cases:
        single, model = two_copies(make, plan, mesh)
        x, y = (randn(*shape).requires_grad_() for _ in range(2))
        with CommDebugMode() as counted:
            out = model(x)
            out.square().mean().backward()
        counts.update(counted.get_comm_counts())
        wanted = single(y)
        wanted.square().mean().backward()
        assert out.device == device()
        close(out, wanted, "output")
        close(x.grad, y.grad, "gradient of the input")
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            close(p.grad, q.grad, name)
    return dict(counts)


@spmd.on_mesh()
def bfloat16_training(mesh: Any) -> list[float]:
    """Three steps of AdamW with clipping, in bfloat16: the losses fall as the single-device model's do."""
    single, model = two_copies(lambda: torch_adapter.Mlp(32, 64), MLP, mesh, torch.bfloat16)
    x, target = randn(16, 32).bfloat16(), randn(16, 32, seed=1).bfloat16()

    def train(module: nn.Module) -> list[float]:
        optimizer, losses = torch.optim.AdamW(module.parameters(), lr=0.01), []
        for _ in range(3):
            loss = nn.functional.mse_loss(module(x), target)
            optimizer.zero_grad()
            loss.backward()
            norm = full(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
            assert torch.isfinite(norm)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    losses, wanted = train(model), train(single)
    assert losses[-1] < losses[0]
    close(torch.tensor(losses), torch.tensor(wanted), "losses", tolerance=0.02)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert isinstance(p, DTensor) and p.dtype is torch.bfloat16 and p.device == device()
        close(full(p).float(), q.detach().float(), "parameter", tolerance=0.02)
    return losses


def step(model: nn.Module, x: torch.Tensor, outputs: dict[str, torch.Tensor]) -> None:
    """Forward and backward into ``outputs`` and the gradients that are there. Keeps no graph of autograd alive, whose
    nodes would belong to the stream of the warm-up."""
    y = model(x)
    y.square().mean().backward()
    outputs["y"] = y.detach()


@spmd.on_mesh()
def replayed_graph(mesh: Any, capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None) -> None:
    """A captured step of a parallelised MLP, replayed on other numbers, gives the single-device model's result.

    Args:
        capture: makes a function that repeats the one that it is given; None captures a CUDA graph.
    """
    single, model = two_copies(lambda: torch_adapter.Mlp(16, 32), MLP, mesh)
    x, outputs = randn(4, 16), {}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # a graph adds to memory that stays where it is
    replay = (capture or cuda_graph)(lambda: step(model, x, outputs))
    other = randn(4, 16, seed=3)
    x.copy_(other)
    for p in model.parameters():
        p.grad.zero_()
    replay()
    wanted = single(other)
    wanted.square().mean().backward()
    close(outputs["y"], wanted, "output of the graph")
    for (name, p), q in zip(model.named_parameters(), single.named_parameters(), strict=True):
        close(p.grad, q[1].grad, name)


def cuda_graph(work: Callable[[], None]) -> Callable[[], None]:
    """Warm up on a side stream, as torch asks, then capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@spmd.on_mesh()
def side_stream(mesh: Any) -> None:
    """Forward, backward and their collectives on a stream of the user's: they wait for each other in stream order.

    The input is made on that stream, behind a lot of work. A collective that did not wait would read old numbers.
    """
    single, model = two_copies(lambda: torch_adapter.Mlp(64, 128), MLP, mesh)
    x = torch.zeros(8, 64, device=device())
    wanted_x = randn(8, 64)
    # Without a GPU these are stand-ins of the same interface, which do things in order.
    streams: Any = torch.cuda if device().type == "cuda" else torch.cpu
    stream = streams.Stream()
    streams.synchronize()
    with streams.stream(stream):
        busy = torch.ones(1024, 1024, device=device())
        for _ in range(20):
            busy = (busy @ busy).clamp(0, 1)
        x.copy_(wanted_x * busy[0, 0])
        y = model(x)
        y.square().mean().backward()
        result = y.detach().clone()
    streams.synchronize()
    wanted = single(wanted_x)
    wanted.square().mean().backward()
    close(result, wanted, "output on the stream")
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        close(p.grad, q.grad, name)
