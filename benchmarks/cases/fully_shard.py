"""`fully_shard` against torch's FSDP2 and hand-written ZeRO-3: time of the host, collectives, memory, and over gloo."""

from __future__ import annotations

from benchmarks.ranks import launch
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Effort
from benchmarks.torch_fully_sharded import BY_NAME, LAYERS, fully_sharded
from benchmarks.torch_groups import fake_group
from benchmarks.torch_memory import peak_bytes
from benchmarks.torch_passes import FORWARD, FORWARD_AND_BACKWARD, time_pass
from benchmarks.torch_traffic import count_passes
from benchmarks.torch_versions import HYPER_PARALLEL, TEXTBOOK, TORCH, UNSHARDED, Version

__all__ = ["run"]

#: Large enough that parameters are most of the allocated memory.
LARGE = LlamaSizes(batch=1, sequence=8, features=256, hidden=512, heads=4)


def run(effort: Effort) -> Result:
    """Measure over 4 data parallel ranks, and over 2 x 2, data and tensor parallel."""
    sizes = LlamaSizes()
    result = Result(
        "fully_shard",
        f"{LAYERS} Llama blocks ({sizes}), each a unit, 4 ranks of a fake process group, float32. Memory: with "
        f"{LARGE}; the peak that a step allocates, gradients included, above the memory held before it.",
    )
    with fake_group(4):
        for dp, tp in ((4, 1), (2, 2)):
            title = f"fully sharded, dp={dp}" + (f", tp={tp}" if tp > 1 else "")
            versions = fully_sharded(sizes, dp, tp)
            for name in (FORWARD, FORWARD_AND_BACKWARD):
                table = time_pass(title, name, versions, effort)
                result.tables.append(table)
                for rival, limit in [(TORCH, 1.0)] if tp == 1 else [(TEXTBOOK, 1.1), (BY_NAME, 1.1)]:
                    ratio = _median(table, HYPER_PARALLEL) / _median(table, rival)
                    result.goals.append(Goal(f"{table.title}: {HYPER_PARALLEL} to {rival}", ratio, limit))
            result.tables.append(_traffic(title, versions))
            large = fully_sharded(LARGE, dp, tp)
            peaks = {version.name: _peak(version) for version in large if version.name != UNSHARDED}
            table = Table(f"{title}: memory", ["version", "bytes"])
            table.rows = [[name, f"{peak:,}"] for name, peak in peaks.items()]
            result.tables.append(table)
            ratio = peaks[HYPER_PARALLEL] / peaks[TORCH]
            result.goals.append(Goal(f"{title}: memory of {HYPER_PARALLEL} to {TORCH}", ratio, 1.0))
    rounds = max(6, effort.rounds * 2 // 5)
    environment = {"HYPER_PARALLEL_PLATFORM": "torch-cpu", "OMP_NUM_THREADS": "1"}
    (real,) = launch("benchmarks.fully_shard_rank", 4, str(rounds), environment=environment)
    return Result("fully_shard", f"{result.how}\n{real.how}", result.tables + real.tables, result.goals + real.goals)


def _median(table: Table, name: str) -> float:
    return next(row[1]["median"] for row in table.rows if row[0] == name)


def _traffic(title: str, versions: list[Version]) -> Table:
    table = Table(f"{title}: collectives", ["version", "forward", "forward and backward"])
    for version in versions:
        forward, both = count_passes(version)
        table.rows.append([version.name, str(forward), str(both)])
    return table


def _peak(version: Version) -> int:
    for _ in range(2):
        version.forward_and_backward()
        version.clear()
    return peak_bytes(version.forward_and_backward)
