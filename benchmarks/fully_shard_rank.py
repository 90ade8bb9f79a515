"""One rank over gloo of the case `fully_shard`: ``python -m benchmarks.fully_shard_rank RANK RANKS FOLDER N``."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.gloo_rank import slowest
from benchmarks.ranks import wall_times, write_result
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Step, ratios, spread
from benchmarks.torch_fully_sharded import BY_NAME, fully_sharded
from benchmarks.torch_versions import HYPER_PARALLEL, TEXTBOOK, TORCH, UNSHARDED, Version

SIZES = LlamaSizes(batch=1, sequence=128, features=256, hidden=768, heads=8)
TOLERANCE = 1e-4


def main(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Check and time every version on (2, ranks / 2) processes."""
    warnings.simplefilter("ignore")
    machine.pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = Result(
        "fully_shard", f"{ranks} processes over gloo, one thread each; wall time of the slowest rank; {SIZES}."
    )
    title = f"fully sharded over gloo, dp=2, tp={ranks // 2}"
    versions = [v for v in fully_sharded(SIZES, 2, ranks // 2) if v.name != UNSHARDED]
    outputs = {version.name: _output_after_a_step(version) for version in versions}
    wanted = outputs[TEXTBOOK]
    for name in (BY_NAME, HYPER_PARALLEL, TORCH):
        error = float((outputs[name] - wanted).norm() / wanted.norm())
        what = f"{title}: output of {name} after a step of SGD, relative difference to hand-written code"
        result.goals.append(Goal(what, error, TOLERANCE, strict=name == HYPER_PARALLEL))
    steps = {version.name: Step(version.forward_and_backward, version.clear) for version in versions}
    times = wall_times(steps, rounds, dist.barrier, slowest)
    to_textbook, to_torch = ratios(times, TEXTBOOK), ratios(times, TORCH)
    table = Table(f"{title}: forward and backward", ["version", "milliseconds", "ratio to textbook", "ratio to torch"])
    table.rows = [[name, *(spread(column[name]) for column in (times, to_textbook, to_torch))] for name in times]
    result.tables.append(table)
    if rank == 0:
        write_result(folder, [result])
    dist.barrier()
    dist.destroy_process_group()


def _output_after_a_step(version: Version) -> torch.Tensor:
    """The model's output after its parameters have taken a step: so gradients are compared too."""
    version.forward_and_backward()
    torch.optim.SGD(version.model.parameters(), lr=0.1).step()
    version.clear()
    with torch.no_grad():
        return version.forward().detach().clone()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
