"""Rows of the nightly table of torch.compile: six models with Inductor, and every style on four ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from hyper_parallel import ColwiseParallel, Replicate, fully_shard, parallelize_module, vocab_parallel_cross_entropy
from hyper_parallel.testing.spmd import device_mesh
from tests.torch.compiled import fresh, step
from tests.torch.decoder import Sizes
from tests.torch.support import close, device, randn
from tests.torch.test_compile import COLWISE_ROWWISE, Logits, Mlp, block_plan
from tests.torch.test_compile_models import WORDS, Gpt, planned, transformers_llama
from tests.torch.test_compile_styles import GROUPS, some_styles

__all__ = ["MODELS", "ROWS", "run"]

Row = tuple[str, str, int]


def lengths(one: int) -> list[Any]:
    """Batches of ids of three lengths, multiples of ``one``."""
    return [(torch.arange(2 * n * one).view(2, -1) * 7 % WORDS).to(device()) for n in (2, 3, 5)]


def trained(
    single: nn.Module, model: nn.Module, xs: list[Any], make: Callable[[nn.Module], Callable[..., Any]] | None = None
) -> None:
    """Compare outputs and all gradients for three lengths; the second and the third compile nothing.

    Args:
        single, model: unsharded and parallelised.
        xs: an input of each length.
        make: gives the function of a model to compile; its forward by default.
    """
    counters.clear()
    reference = single if make is None else make(single)
    call: Any = torch.compile(model if make is None else make(model), fullgraph=True, dynamic=True)
    compiled = None
    for x in xs:
        y, gradient = step(model, x, call)
        wanted, wanted_gradient = step(single, x, reference)
        close(y, wanted, "the output")
        if gradient is not None:
            close(gradient, wanted_gradient, "the gradient of the input")
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            close(p.grad, q.grad, f"the gradient of {name}")
        graphs = counters["stats"]["unique_graphs"]
        assert graphs == (compiled or graphs), f"{graphs} graphs after {compiled}"
        compiled = graphs


def mlp(mesh: Any) -> None:
    single = Mlp()
    trained(single, parallelize_module(copy.deepcopy(single), mesh, COLWISE_ROWWISE), [randn(n, 6) for n in (2, 3, 5)])


def decoder(mesh: Any, sequence: bool) -> None:
    torch.manual_seed(0)
    single = Logits(Sizes(heads=4), False).to(device())
    trained(single, parallelize_module(copy.deepcopy(single), mesh, block_plan(sequence)), lengths(4))


def gpt(mesh: Any) -> None:
    """Packed weights, a tied head, and the loss of logits that stay sharded."""
    single = Gpt()
    model = parallelize_module(copy.deepcopy(single), mesh, planned(ColwiseParallel()))

    def loss(one: nn.Module) -> Callable[..., Any]:
        def of_whole(ids: Any) -> Any:
            return nn.functional.cross_entropy(one(ids).flatten(0, 1), ids.flatten())

        def of_parts(ids: Any) -> Any:
            return vocab_parallel_cross_entropy(one(ids).flatten(0, 1), ids.flatten(), mesh)

        return of_whole if one is single else of_parts

    trained(single, model, lengths(4), loss)
    whole = parallelize_module(copy.deepcopy(single), mesh, planned(ColwiseParallel(output_layouts=Replicate())))
    fresh(mesh)
    trained(single, whole, lengths(4))


def unit(mesh: Any) -> None:
    """A block that is compiled inside of a unit of `fully_shard`, on a mesh of two dimensions."""
    single = Mlp()
    model = parallelize_module(copy.deepcopy(single), mesh["tp"], COLWISE_ROWWISE)
    outer: Any = fully_shard(nn.Sequential(model), mesh=mesh["dp"])
    model.compile(fullgraph=True, dynamic=True)
    compiled = None
    counters.clear()
    for n in (3, 4, 6):
        xs = [randn(n, 6, seed=n + i) for i in range(2)]
        outer.zero_grad()
        single.zero_grad()
        outer(xs[mesh.get_local_rank("dp")]).square().sum().backward()
        (sum(single(x).square().sum() for x in xs) / 2).backward()
        for (name, p), q in zip(outer.named_parameters(), single.parameters(), strict=True):
            close(p.grad, q.grad, name)
        graphs = counters["stats"]["unique_graphs"]
        assert graphs == (compiled or graphs)
        compiled = graphs


MODELS: dict[str, Callable[[Any], None]] = {
    "MLP": mlp,
    "Llama block": lambda mesh: decoder(mesh, False),
    "sequence parallel": lambda mesh: decoder(mesh, True),
    "packed and tied GPT": gpt,
    "fully_shard unit": unit,
    "Hugging Face Llama": lambda mesh: transformers_llama.__wrapped__(mesh, "inductor"),
}
ROWS: list[Row] = [
    *(("styles", name, 4) for name in GROUPS),
    *(("inductor", name, world) for world in (2, 4) for name in MODELS),
]


def run(row: Row) -> None:
    """One row: on all ranks, of which the first take part."""
    kind, name, world = row
    mesh = device_mesh(2, world // 2, names=("dp", "tp")) if name == "fully_shard unit" else device_mesh(world)
    if kind == "styles":
        some_styles((name,))
    elif mesh is not None:
        fresh(mesh)
        MODELS[name](mesh)
