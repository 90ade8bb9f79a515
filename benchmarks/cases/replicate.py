"""Data parallelism: `replicate` against torch's DistributedDataParallel and torch's own `replicate`."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.device_mesh import init_device_mesh as torch_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ranks import launch
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Effort, Step, interleaved, ratios, spread
from benchmarks.torch_groups import fake_group
from benchmarks.torch_models import LlamaBlock, rotary_tables

__all__ = ["DDP", "OURS", "PLAIN", "TORCH", "Pass", "run", "versions"]

RANKS, BLOCKS = 4, 4
PLAIN, OURS, TORCH = "one device", "hyper_parallel.replicate", "torch's replicate"
DDP = "DistributedDataParallel"


class Model(nn.Module):
    """A few Llama blocks."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LlamaBlock(sizes) for _ in range(BLOCKS))
        cos, sin = rotary_tables(sizes.sequence, sizes.head_size)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


def versions(sizes: LlamaSizes, device: str = "cpu", ranks: int = RANKS) -> dict[str, Pass]:
    """Passes by name: forward and backward of a few Llama blocks."""
    from hyper_parallel import init_device_mesh, replicate

    torch.manual_seed(0)
    model = Model(sizes).to(device)
    x = torch.randn(sizes.batch, sizes.sequence, sizes.features, device=device)
    models = {
        PLAIN: copy.deepcopy(model),
        DDP: _ddp(model, gradient_as_bucket_view=True),
        f"{DDP}, find_unused_parameters": _ddp(model, find_unused_parameters=True),
        TORCH: torch_replicate(copy.deepcopy(model), mesh=torch_mesh(device, (ranks,))),
        OURS: replicate(copy.deepcopy(model), init_device_mesh(device, (ranks,), mesh_dim_names=("dp",))),
    }
    return {name: Pass(m, x) for name, m in models.items()}


def _ddp(model: Any, **options: bool) -> Any:
    ddp = DistributedDataParallel(copy.deepcopy(model), **options)
    if dist.get_backend() == "fake":
        # The future of an all-reduce of the fake group has no result, which torch asks for. A lambda has no
        # annotations, which it would look at.
        ddp.register_comm_hook(None, lambda _, bucket: _reduced(bucket.buffer()))  # type: ignore[arg-type]
    return ddp


def _reduced(buffer: Any) -> Any:
    dist.all_reduce(buffer.div_(RANKS), async_op=True)
    done: Any = torch.futures.Future()
    done.set_result(buffer)
    return done


class Pass:
    """A forward and backward of a model."""

    def __init__(self, model: Any, x: Any) -> None:
        self.model, self.x = model, x

    def __call__(self) -> None:
        self.model(self.x).sum().backward()

    def clear(self) -> None:
        """Clear the gradients."""
        for p in self.model.parameters():
            p.grad = None


def run(effort: Effort, device: str = "cpu") -> Result:
    """Forward and backward where arithmetic hardly counts."""
    sizes = LlamaSizes()
    result = Result(
        "replicate",
        f"{BLOCKS} Llama blocks ({sizes}), {RANKS} ranks of a fake process group, one bucket of gradients.",
    )
    with fake_group(RANKS):
        steps = {name: Step(step, step.clear) for name, step in versions(sizes, device).items()}
        times = interleaved(steps, effort, time.process_time_ns)
    table = Table("replicate: forward and backward", ["version", "microseconds", f"ratio to {DDP}"])
    ratio = ratios(times, DDP)
    table.rows = [[name, spread(times[name]), spread(ratio[name])] for name in times]
    result.tables.append(table)
    found = next(row[2]["median"] for row in table.rows if row[0] == OURS)
    result.goals.append(Goal(f"{table.title}: {OURS} to {DDP}", found, 1.0))
    if device != "cpu":
        return result
    environment = {"HYPER_PARALLEL_PLATFORM": "torch-cpu", "OMP_NUM_THREADS": "1"}
    (real,) = launch("benchmarks.replicate_rank", 2, str(max(6, effort.rounds * 2 // 5)), environment=environment)
    return Result("replicate", f"{result.how}\n{real.how}", result.tables + real.tables, result.goals + real.goals)
