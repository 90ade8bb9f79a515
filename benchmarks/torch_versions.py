"""The versions of each model that are measured side by side, on PyTorch. All start from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh as torch_device_mesh

import hyper_parallel
from benchmarks.plans import llama_plan, mlp_plan
from benchmarks.sizes import LlamaSizes, MlpSizes
from benchmarks.torch_hand_written import Textbook, Tuned, hand_written_block, hand_written_mlp
from benchmarks.torch_models import LlamaBlock, Mlp, rotary_tables

__all__ = [
    "DTENSORS",
    "HYPER_PARALLEL",
    "LIBRARIES",
    "TEXTBOOK",
    "TORCH",
    "TORCH_DTENSORS",
    "TUNED",
    "UNSHARDED",
    "Version",
    "llama_versions",
    "mlp_versions",
]

UNSHARDED = "unsharded"
TEXTBOOK = "hand-written, textbook"
TUNED = "hand-written, tuned"
HYPER_PARALLEL = "hyper_parallel"
DTENSORS = "hyper_parallel, DTensors between modules"
TORCH = "torch.distributed.tensor"
TORCH_DTENSORS = "torch.distributed.tensor, DTensors between modules"

#: torch's names in one namespace, as hyper_parallel has them.
_TORCH: Any = SimpleNamespace(**{**vars(torch_parallel), **vars(torch_tensor), "init_device_mesh": torch_device_mesh})
LIBRARIES: dict[str, Any] = {HYPER_PARALLEL: hyper_parallel, TORCH: _TORCH}


@dataclass
class Version:
    """A model with its inputs.

    Attributes:
        name: its name in tables.
        model: the module.
        inputs: positional arguments; those that need gradients are leaves.
        cotangent: the start of backward, laid out as the output.
        finish: to be called after backward.
        block: makes the context manager in which backward runs.
    """

    name: str
    model: nn.Module
    inputs: tuple[Any, ...]
    cotangent: Any = None
    finish: Callable[[], None] | None = None
    block: Callable[[], AbstractContextManager] | None = None

    def forward(self) -> Any:
        """The output, ready to use."""
        return _ready(self.model(*self.inputs))

    def forward_and_backward(self) -> None:
        """One step of training, without the optimizer."""
        y = _ready(self.model(*self.inputs))
        if self.block is None:
            y.backward(self.cotangent)
        else:
            with self.block():
                y.backward(self.cotangent)
        if self.finish is not None:
            self.finish()

    def clear(self) -> None:
        """Drop all gradients. Not timed."""
        for tensor in (*self.inputs, *self.model.parameters()):
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None


def _ready(y: Any) -> Any:
    """Wait for the output of torch's styles, which otherwise is not ready before its first use."""
    if type(y) is not torch.Tensor:
        local = y._local_tensor if isinstance(y, torch_tensor.DTensor) else y
        if isinstance(local, AsyncCollectiveTensor):
            local.wait()
    return y


def _mesh(library: Any, device: str) -> Any:
    return library.init_device_mesh(device, (dist.get_world_size(),))


def _seeded(make: Callable[[], Any], device: str) -> Any:
    torch.manual_seed(1)
    return make().to(device)


def mlp_versions(sizes: MlpSizes, device: str = "cpu") -> list[Version]:
    """Every version of the MLP."""
    generator = torch.Generator().manual_seed(2)
    x, cotangent = (torch.randn(sizes.batch, sizes.features, generator=generator).to(device) for _ in range(2))

    def version(name: str, model: nn.Module, cotangent: Any = cotangent) -> Version:
        return Version(name, model, (x.clone().requires_grad_(),), cotangent)

    def model() -> Mlp:
        return _seeded(lambda: Mlp(sizes), device)

    versions = [
        version(UNSHARDED, model()),
        version(TEXTBOOK, hand_written_mlp(model(), Textbook())),
        version(TUNED, hand_written_mlp(model(), Tuned())),
    ]
    for name, dtensors in ((HYPER_PARALLEL, False), (DTENSORS, True), (TORCH, False), (TORCH_DTENSORS, True)):
        library = LIBRARIES[TORCH if "torch" in name else HYPER_PARALLEL]
        mesh = _mesh(library, device)
        parallel = library.parallelize_module(model(), mesh, mlp_plan(library, dtensors))
        start = library.DTensor.from_local(cotangent, mesh, [library.Replicate()]) if dtensors else cotangent
        versions.append(version(name, parallel, start))
    return versions


def llama_versions(
    sizes: LlamaSizes, sequence_parallel: bool = False, decode: bool = False, device: str = "cpu"
) -> list[Version]:
    """Every version of the block; with ``decode`` its input is one token, with the keys and values of those before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(2)
    length = 1 if decode else sizes.sequence
    x, cotangent = (torch.randn(sizes.batch, length, sizes.features, generator=generator).to(device) for _ in range(2))
    cos, sin = (t[-length:].to(device) for t in rotary_tables(sizes.cached + 1 if decode else length, sizes.head_size))
    past = None
    if decode:
        shape = (sizes.batch, sizes.heads, sizes.cached, sizes.head_size)
        past = tuple(torch.randn(shape, generator=generator).to(device) for _ in range(2))

    def part(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(size, 1)[rank].contiguous() if sequence_parallel else t

    def cache(wrap: Callable[[torch.Tensor], Any] | None = None) -> tuple[Any, ...]:
        """Keys and values of this rank's heads, as an argument."""
        if past is None:
            return ()
        mine = tuple(t.chunk(size, 1)[rank].contiguous() for t in past)
        return (mine if wrap is None else tuple(wrap(t) for t in mine),)

    def version(
        name: str, model: nn.Module, tables: tuple[Any, ...], past: tuple, cotangent: Any, finish: Any = None
    ) -> Version:
        shard = x if name == UNSHARDED else part(x)
        block = hyper_parallel.coalesce_gradients if sequence_parallel and name in (HYPER_PARALLEL, DTENSORS) else None
        return Version(name, model, (shard.clone().requires_grad_(), *tables, *past), cotangent, finish, block)

    def block() -> LlamaBlock:
        return _seeded(lambda: LlamaBlock(sizes), device)

    versions = [version(UNSHARDED, block(), (cos, sin), () if past is None else (past,), cotangent)]
    for name, collectives in ((TEXTBOOK, Textbook()), (TUNED, Tuned())):
        parallel, finish = hand_written_block(block(), collectives, sequence_parallel)
        versions.append(version(name, parallel, (cos, sin), cache(), part(cotangent), finish))
    for name, dtensors in ((HYPER_PARALLEL, False), (DTENSORS, True), (TORCH, False), (TORCH_DTENSORS, True)):
        if name == TORCH_DTENSORS and device == "cpu":
            continue  # torch has no sharding rule for attention on CPU
        library = LIBRARIES[TORCH if "torch" in name else HYPER_PARALLEL]
        mesh, whole = _mesh(library, device), library.Replicate()
        tables = 3 if decode else 2  # the cache is one more input
        parallel = library.parallelize_module(block(), mesh, llama_plan(library, sequence_parallel, dtensors, tables))
        if not dtensors:
            versions.append(version(name, parallel, (cos, sin), cache(), part(cotangent)))
            continue

        def distributed(t: torch.Tensor, placement: Any, library: Any = library, mesh: Any = mesh) -> Any:
            return library.DTensor.from_local(t, mesh, [placement])

        if not sequence_parallel:
            for norm in (parallel.attention_norm, parallel.ffn_norm):
                library.distribute_module(norm, mesh)
        rotary = tuple(distributed(t, whole) for t in (cos, sin))
        # A default argument binds the library of this turn of the loop.
        heads = cache(lambda t, distributed=distributed, library=library: distributed(t, library.Shard(1)))
        start = distributed(part(cotangent), library.Shard(1) if sequence_parallel else whole)
        versions.append(version(name, parallel, rotary, heads, start))
    return versions
