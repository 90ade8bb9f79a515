"""The versions of data parallelism that are measured side by side, on PyTorch: several Llama blocks, each a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh as torch_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import hyper_parallel
from benchmarks.plans import llama_plan
from benchmarks.sizes import LlamaSizes
from benchmarks.torch_hand_written import Textbook, Tuned, hand_written_block
from benchmarks.torch_models import Blocks, rotary_tables
from benchmarks.torch_versions import HYPER_PARALLEL, LIBRARIES, TEXTBOOK, TORCH, TUNED, UNSHARDED, Version
from benchmarks.torch_zero3 import shard_by_hand

__all__ = ["BY_NAME", "LAYERS", "ON_TOP", "fully_sharded"]

LAYERS = 4
BY_NAME = "hand-written, textbook, parameters by name"
ON_TOP = "torch's fully_shard on hyper_parallel's styles"
_FULLY_SHARD: dict[str, Any] = {HYPER_PARALLEL: hyper_parallel.fully_shard, TORCH: torch_fully_shard}
_INIT_MESH: dict[str, Any] = {HYPER_PARALLEL: hyper_parallel.init_device_mesh, TORCH: torch_device_mesh}


def fully_sharded(sizes: LlamaSizes, dp: int, tp: int = 1, device: str = "cpu") -> list[Version]:
    """Every version of `LAYERS` blocks whose parameters are fully sharded over ``dp`` rows of ``tp`` ranks. The ranks
    of a row are tensor parallel, without sequence parallelism. Each row has a batch of its own."""
    shape, names = ((dp,), ("dp",)) if tp == 1 else ((dp, tp), ("dp", "tp"))
    row = dist.get_rank() // tp
    generator = torch.Generator().manual_seed(2 + row)
    x, cotangent = (torch.randn(sizes.batch, sizes.sequence, sizes.features, generator=generator) for _ in range(2))
    tables = rotary_tables(sizes.sequence, sizes.head_size)

    def version(name: str, spread: Callable[[nn.Module], nn.Module], whole: bool = False) -> Version:
        torch.manual_seed(1)
        model = Blocks(sizes, LAYERS)
        for layer in model.layers:
            spread(layer)
        if whole:
            _FULLY_SHARD[name](model, mesh=meshes[name]["dp"])
        return Version(
            name, model.to(device), (x.to(device).requires_grad_(), *(t.to(device) for t in tables)), cotangent
        )

    meshes = {name: init(device, shape, mesh_dim_names=names) for name, init in _INIT_MESH.items()}
    mesh = meshes[TORCH]
    versions = [version(UNSHARDED, lambda layer: layer)]
    for name, kind in ((TEXTBOOK, Textbook), (TUNED, Tuned), (BY_NAME, Textbook)):
        units: list[Any] = []

        def by_hand(layer: Any, name: str = name, kind: Any = kind, units: list[Any] = units) -> nn.Module:
            if tp > 1:
                hand_written_block(layer, kind(mesh.get_group("tp")), sequence_parallel=False)
            return shard_by_hand(layer, kind(mesh.get_group("dp")), units, name == BY_NAME)

        versions.append(version(name, by_hand))
    for name in (HYPER_PARALLEL, TORCH):

        def by_library(layer: Any, name: str = name) -> nn.Module:
            if tp > 1:
                library = LIBRARIES[name]
                plan = llama_plan(library, sequence_parallel=False, dtensors=False)
                library.parallelize_module(layer, meshes[name]["tp"], plan)
            return _FULLY_SHARD[name](layer, mesh=meshes[name]["dp"])

        versions.append(version(name, by_library, whole=True))
    return versions
