"""One rank of the case `gloo`: ``python -m benchmarks.gloo_rank RANK RANKS FOLDER ROUNDS``."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.ranks import wall_times, write_result
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes, MlpSizes
from benchmarks.timing import Step, ratios, spread
from benchmarks.torch_traffic import count_passes
from benchmarks.torch_versions import (
    DTENSORS,
    HYPER_PARALLEL,
    TEXTBOOK,
    TUNED,
    UNSHARDED,
    Version,
    llama_versions,
    mlp_versions,
)
from benchmarks.traffic import differences

MLP = MlpSizes(batch=256, features=512, hidden=2048)
LLAMA = LlamaSizes(batch=1, sequence=256, features=512, hidden=1536, heads=8)
TOLERANCE = 1e-4


def main(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Check and time every version."""
    warnings.simplefilter("ignore")
    machine.pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    result = Result(
        "gloo",
        f"{ranks} processes over gloo, one thread each; wall time of the slowest rank. Llama block: {LLAMA}.",
    )
    for title, versions in (
        (f"MLP {MLP}, {ranks} ranks", mlp_versions(MLP)),
        (f"Llama block, {ranks} ranks", llama_versions(LLAMA)),
        (f"Llama block, sequence parallel, {ranks} ranks", llama_versions(LLAMA, sequence_parallel=True)),
    ):
        error = max(_error(version, versions[0], rank, ranks) for version in versions[1:])
        result.goals.append(
            Goal(f"{title}: largest relative error of outputs and gradients", error, TOLERANCE, strict=True)
        )
        counted = {version.name: count_passes(version) for version in versions}
        for name in (HYPER_PARALLEL, DTENSORS):
            what = f"{title}: kinds of collectives that differ from hand-written, {name}"
            result.goals.append(Goal(what, differences(counted[name], counted[TUNED]), 0, strict=True))
        for name in ("forward", "forward and backward"):
            result.tables.append(_table(title, name, versions, rounds))
    if rank == 0:
        write_result(folder, [result])
    dist.barrier()
    dist.destroy_process_group()


def _table(title: str, name: str, versions: list[Version], rounds: int) -> Table:
    steps = {
        version.name: Step(version.forward if name == "forward" else version.forward_and_backward, version.clear)
        for version in versions
    }
    times = wall_times(steps, rounds, dist.barrier, slowest)
    columns = (times, ratios(times, TEXTBOOK), ratios(times, TUNED))
    table = Table(f"{title}: {name}", ["version", "milliseconds", "ratio to textbook", "ratio to tuned"])
    table.rows = [[version, *(spread(column[version]) for column in columns)] for version in times]
    return table


def slowest(numbers: list[float]) -> list[float]:
    """The largest of all ranks, element by element."""
    largest = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def _error(version: Version, unsharded: Version, rank: int, ranks: int) -> float:
    """Largest error of output, gradient of the input and gradients of parameters, relative to the norm of each."""

    def values(v: Version) -> dict[str, Any]:
        v.clear()
        found = {"output": v.forward()}
        v.forward_and_backward()
        found["input"] = v.inputs[0].grad
        found.update((name, p.grad) for name, p in v.model.named_parameters())
        v.clear()
        return found

    wanted, errors = values(unsharded), []
    for name, value in values(version).items():
        whole = wanted[name].detach()
        mine = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        for dim, (a, b) in enumerate(zip(mine.shape, whole.shape, strict=True)):
            if a != b:
                whole = whole.chunk(ranks, dim)[rank]
        errors.append(float((mine - whole).norm() / whole.norm()))
    assert version.name != UNSHARDED
    return max(errors)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
