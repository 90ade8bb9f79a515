"""One rank over gloo of the case `replicate`: ``python -m benchmarks.replicate_rank RANK RANKS FOLDER ROUNDS``."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.cases.replicate import DDP, OURS, PLAIN, Pass, versions
from benchmarks.gloo_rank import slowest
from benchmarks.ranks import wall_times, write_result
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Step, ratios, spread

SIZES = LlamaSizes(batch=1, sequence=128, features=256, hidden=768, heads=8)
TOLERANCE = 1e-4


def main(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Check and time every version."""
    warnings.simplefilter("ignore")
    machine.pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = Result("replicate", f"{ranks} processes over gloo, one thread each; wall time of the slowest; {SIZES}.")
    title = f"replicate over gloo, {ranks} ranks"
    passes = versions(SIZES, ranks=ranks)
    for step in passes.values():
        step.x = step.x + rank  # each rank has a batch of its own
    error = max(
        float((a - b).norm() / b.norm()) for a, b in zip(*map(_gradients, (passes[OURS], passes[DDP])), strict=True)
    )
    result.goals.append(
        Goal(f"{title}: gradients, largest relative difference to {DDP}", error, TOLERANCE, strict=True)
    )
    times = wall_times({name: Step(s, s.clear) for name, s in passes.items()}, rounds, dist.barrier, slowest)
    to_ddp, to_plain = ratios(times, DDP), ratios(times, PLAIN)
    table = Table(f"{title}: forward and backward", ["version", "milliseconds", f"ratio to {DDP}", f"ratio to {PLAIN}"])
    table.rows = [[name, *(spread(column[name]) for column in (times, to_ddp, to_plain))] for name in times]
    result.tables.append(table)
    if rank == 0:
        write_result(folder, [result])
    dist.barrier()
    dist.destroy_process_group()


def _gradients(step: Pass) -> list[torch.Tensor]:
    step()
    gradients = [p.grad for p in step.model.parameters()]
    found = [g.to_local().clone() if hasattr(g, "to_local") else g.clone() for g in gradients]  # type: ignore[union-attr]
    step.clear()
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
