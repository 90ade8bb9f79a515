"""The models at sizes that two cores can do, on real processes."""

from __future__ import annotations

from benchmarks.ranks import launch
from benchmarks.report import Result
from benchmarks.timing import Effort

__all__ = ["run"]


def run(effort: Effort) -> Result:
    """Measure with 2 and with 4 ranks."""
    rounds = max(6, effort.rounds * 2 // 5)
    two, four = (
        launch(
            "benchmarks.gloo_rank",
            ranks,
            str(rounds),
            environment={"HYPER_PARALLEL_PLATFORM": "torch-cpu", "OMP_NUM_THREADS": "1"},
        )[0]
        for ranks in (2, 4)
    )
    return Result("gloo", f"{two.how}\n{four.how}", two.tables + four.tables, two.goals + four.goals)
