"""Starting the ranks of a case, each a process of its own, and the facts that they agree on."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Result
from benchmarks.timing import Step, frozen, no_collection

__all__ = ["launch", "read", "wall_times", "write_result"]

_TIMEOUT = 900


def launch(module: str, ranks: int, *arguments: str, environment: dict[str, str] | None = None) -> list[Result]:
    """Run ``python -m module RANK RANKS FOLDER ARGUMENTS`` for each rank; returns the results that rank 0 wrote with
    `write_result`.

    Raises:
        RuntimeError: when a rank fails, with the output of that rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module]
        logs = [open(Path(folder) / f"log{rank}", "w+") for rank in range(ranks)]  # noqa: SIM115 - closed below
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), folder, *arguments],
                env={**os.environ, **(environment or {})},
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            _wait(processes, logs, module)
            return read(Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for log in logs:
                log.close()


def _wait(processes: list[subprocess.Popen], logs: list, module: str) -> None:
    end = time.monotonic() + _TIMEOUT
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    for rank, process in enumerate(processes):
        if process.poll() != 0:
            logs[rank].seek(0)
            problem = "took too long" if process.poll() is None else f"failed with {process.poll()}"
            raise RuntimeError(f"rank {rank} of {module} {problem}:\n{logs[rank].read()[-4000:]}")


def write_result(folder: str, results: list[Result]) -> None:
    """Hand results to the process that launched this one."""
    record = [dataclasses.asdict(result) for result in results]
    (Path(folder) / "results.json").write_text(json.dumps(record))


def read(folder: Path) -> list[Result]:
    """The results that `write_result` wrote."""
    return [Result.from_dict(data) for data in json.loads((folder / "results.json").read_text())]


def wall_times(
    steps: dict[str, Step], rounds: int, meet: Callable[[], object], slowest: Callable[[list], list]
) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank: of each step, one call a round. Steps take turns, in an order drawn anew for
    each round, the same on all ranks: the first one can take longer than the others.

    Args:
        steps: the functions to time.
        rounds: turns of each step, after one to warm up.
        meet: waits for all ranks, before each turn.
        slowest: from this rank's numbers to the largest of all ranks, element by element.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    with frozen():
        for _ in range(rounds + 1):
            with no_collection():
                for name, step in order.sample(list(steps.items()), len(steps)):
                    meet()
                    start = time.perf_counter()
                    step.run()
                    times[name].append((time.perf_counter() - start) * 1000)
                    step.clear()
    return {name: slowest(own)[1:] for name, own in times.items()}
