"""A block with experts over gloo: this library's, a dispatcher written by hand, and gathered tokens."""

from __future__ import annotations

from benchmarks.ranks import launch
from benchmarks.report import Result
from benchmarks.timing import Effort

__all__ = ["run"]


def run(effort: Effort) -> Result:
    """Measure with 4 ranks."""
    return launch(
        "benchmarks.experts_rank",
        4,
        str(max(6, effort.rounds * 2 // 5)),
        environment={"HYPER_PARALLEL_PLATFORM": "torch-cpu", "OMP_NUM_THREADS": "1"},
    )[0]
