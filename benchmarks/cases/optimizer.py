"""An optimizer step and gradient clipping with distributed parameters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.plans import llama_plan
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Effort, Step, interleaved, ratios, spread
from benchmarks.torch_groups import fake_group
from benchmarks.torch_models import LlamaBlock
from benchmarks.torch_traffic import count_collectives
from benchmarks.torch_versions import HYPER_PARALLEL, LIBRARIES, TORCH

__all__ = ["run"]

RANKS = 4
BLOCKS = 4
PLAIN = "plain"
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def _parameters(library: Any | None, device: str) -> list[nn.Parameter]:
    """Parameters of a few blocks, with gradients; plain ones have the shapes of this rank's shards."""
    sizes = LlamaSizes()
    if library is None:
        whole = _parameters(LIBRARIES[HYPER_PARALLEL], device)
        parameters = [nn.Parameter(p.to_local().detach().clone()) for p in whole]
    else:
        mesh, parameters = library.init_device_mesh(device, (RANKS,)), []
        for _ in range(BLOCKS):
            block = LlamaBlock(sizes).to(device)
            plan = llama_plan(library, sequence_parallel=True, dtensors=False)
            parameters += library.parallelize_module(block, mesh, plan).parameters()
    for p in parameters:
        p.grad = torch.ones_like(p)
    return parameters


def _timed(title: str, runs: dict[str, Callable[[], Any]], effort: Effort, device: str) -> Table:
    def step(run: Callable[[], Any]) -> Step:
        if device == "cpu":
            return Step(run)
        return Step(lambda: (run(), torch.cuda.synchronize()))

    clock = time.process_time_ns if device == "cpu" else time.perf_counter_ns
    times = interleaved({name: step(run) for name, run in runs.items()}, effort, clock)
    ratio = ratios(times, PLAIN)
    table = Table(title, ["parameters", "microseconds", "ratio to plain"])
    table.rows = [[name, spread(times[name]), spread(ratio[name])] for name in times]
    return table


def _ratio(table: Table) -> float:
    """Median ratio of hyper_parallel to plain."""
    return next(row[2]["median"] for row in table.rows if row[0] == HYPER_PARALLEL)


def run(effort: Effort, device: str = "cpu") -> Result:
    """AdamW in three implementations, and clip_grad_norm_."""
    libraries = {PLAIN: None, **LIBRARIES}
    with fake_group(RANKS):
        everyone = {name: _parameters(library, device) for name, library in libraries.items()}
        count = len(everyone[PLAIN])
        result = Result(
            "optimizer",
            f"The {count} parameters of {BLOCKS} Llama blocks ({LlamaSizes()}), {RANKS} ranks of a fake process group. "
            "Plain parameters are as large as one rank's shards.",
        )
        for name, options in IMPLEMENTATIONS.items():
            steps = {kind: torch.optim.AdamW(own, **options).step for kind, own in everyone.items()}
            table = _timed(f"AdamW, {name}", steps, effort, device)
            result.tables.append(table)
            result.goals.append(Goal(f"{table.title}: ratio to plain", _ratio(table), 1.05))

        clips = {kind: (lambda own=own: torch.nn.utils.clip_grad_norm_(own, 1.0)) for kind, own in everyone.items()}
        table = _timed("clip_grad_norm_", clips, effort, device)
        table.columns.append("collectives")
        for row in table.rows:
            with count_collectives() as traffic:
                norm = clips[row[0]]()
                if row[0] == TORCH:
                    norm.full_tensor()  # before that, torch's norm is a partial sum
            row.append(str(traffic))
            if row[0] == HYPER_PARALLEL:
                number = traffic.total
        result.tables.append(table)
        result.goals.append(Goal("clip_grad_norm_: ratio to plain", _ratio(table), 2.0))
        result.goals.append(Goal("clip_grad_norm_: collectives", number, 1, strict=True))
    return result
