"""The case `cuda`: ``python -m benchmarks.cuda_process RANK RANKS FOLDER ROUNDS TURN``."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import llama, mlp, optimizer
from benchmarks.ranks import write_result
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import MlpSizes
from benchmarks.timing import Effort, Step, interleaved, ratios, spread
from benchmarks.torch_groups import fake_group
from benchmarks.torch_versions import HYPER_PARALLEL, Version, mlp_versions

TOLERANCE = 1e-5


@contextmanager
def single_rank(folder: str) -> Iterator[None]:
    """A world of one over NCCL."""
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _captured(version: Version) -> tuple[Callable[[], Any], Callable[[], float]]:
    """Replay of forward and backward as a CUDA graph, and the largest error of its output and gradients."""
    x, parameters = version.inputs[0], list(version.model.parameters())

    def values() -> list[torch.Tensor]:
        found = [p.grad for p in parameters]
        return [x.grad.clone(), *((g.to_local() if hasattr(g, "to_local") else g).clone() for g in found)]

    version.forward_and_backward()
    wanted = values()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            version.clear()
            version.forward_and_backward()
    torch.cuda.current_stream().wait_stream(side)
    version.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        version.forward_and_backward()

    def error() -> float:
        graph.replay()
        torch.cuda.synchronize()
        pairs = zip(values(), wanted, strict=True)
        return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs)

    return graph.replay, error


def _synchronized(run: Callable[[], Any]) -> Step:
    def both() -> None:
        run()
        torch.cuda.synchronize()

    return Step(both)


def _graphs(title: str, effort: Effort) -> tuple[Table, Goal]:
    """The MLP of hyper_parallel, call by call and as a graph."""
    versions = {version.name: version for version in mlp_versions(MlpSizes(), "cuda")}
    eager = versions[HYPER_PARALLEL]
    replay, error = _captured(eager)
    goal = Goal(f"{title}: largest relative error of a CUDA graph's gradients", error(), TOLERANCE, strict=True)
    other = {version.name: version for version in mlp_versions(MlpSizes(), "cuda")}[HYPER_PARALLEL]
    eager_step = Step(_synchronized(other.forward_and_backward).run, other.clear)
    times = interleaved({"call by call": eager_step, "CUDA graph": _synchronized(replay)}, effort, time.perf_counter_ns)
    ratio = ratios(times, "call by call")
    table = Table(f"{title}: {HYPER_PARALLEL}, forward and backward", ["how", "microseconds", "ratio"])
    table.rows = [[name, spread(times[name]), spread(ratio[name])] for name in times]
    return table, goal


def main(folder: str, rounds: int, turn: float) -> None:
    """All that runs on a device."""
    warnings.simplefilter("ignore")
    effort = Effort(rounds, turn)
    result = Result(
        "cuda",
        f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; wall time until the device is done. "
        "Fake process group unless said otherwise.",
    )
    for case in (mlp, llama, optimizer):
        part = case.run(effort, "cuda")
        result.tables += part.tables
        result.goals += part.goals
    with fake_group(4):
        table, goal = _graphs("MLP, 4 ranks of a fake process group", effort)
        result.tables.append(table)
        result.goals.append(goal)
    with single_rank(folder):
        table, goal = _graphs("MLP, 1 rank over NCCL", effort)
        result.tables.append(table)
        result.goals.append(goal)
    for item in result.tables:
        item.title = f"CUDA: {item.title}"
    for entry in result.goals:
        entry.what = f"CUDA: {entry.what}"
    write_result(folder, [result])


if __name__ == "__main__":
    main(sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
