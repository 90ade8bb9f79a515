"""The time of dry runs, `search` and `check_plan`, and how their predictions compare with a real step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.planning_rank import CHECKED, TOKENS, model
from benchmarks.ranks import launch
from benchmarks.report import Goal, Result, Table
from benchmarks.timing import Effort
from hyper_parallel import check_plan
from hyper_parallel.planning import dry_run, search
from hyper_parallel.planning.llama import MODELS, llama_plan
from hyper_parallel.platform.dry import dry_world

__all__ = ["run"]

LARGE, FEW, MANY = "llama-3-70b", 512, 16384
#: Seconds that a person at a terminal still waits for an answer.
PATIENCE = 60.0


def _seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    return call(), time.perf_counter() - began


def _loss(output: Any) -> Any:
    return output.float().square().mean()


def run(effort: Effort) -> Result:
    """Each once, but for the comparison of world sizes, whose fastest of several counts."""
    repeats = 3 if effort.rounds > 50 else 1
    result = Result(
        "planning",
        f"{LARGE} without data, forward and backward; every way to spread it over {FEW} ranks; a Llama of four "
        "layers compared with the single device on two ranks; and bytes of a real step of that Llama on 4 ranks, "
        "dp=2 x tp=2, over gloo, next to the prediction. The peak is that of one rank, by the counting of storages.",
    )
    with dry_world(1) as platform, platform.without_data():
        large = platform.make_decoder(MODELS[LARGE])
    token = torch.zeros(1, 4096, dtype=torch.int64, device="meta")
    batch = torch.zeros(FEW, 4096, dtype=torch.int64, device="meta")

    def dry(ranks: int) -> float:
        options: dict[str, Any] = {"recompute": True, "mixed_precision": True}
        runs = (
            _seconds(lambda: dry_run(large, {"dp": ranks // 8, "tp": 8}, llama_plan(), token, **options))
            for _ in range(repeats)
        )
        return min(seconds for _, seconds in runs)

    dry(FEW)  # things that are made once per process are made now
    few, many = dry(FEW), dry(MANY)
    plans = {"tp": llama_plan(False), "tp + sequence": llama_plan()}
    ways, searched = _seconds(lambda: search(large, FEW, plans, batch, mixed_precision=True))
    report, checked = _seconds(lambda: check_plan(model(), 2, llama_plan(), TOKENS, loss=_loss))
    table = Table("Time taken", ["what", "seconds"])
    table.rows += [
        [f"dry_run of {LARGE} on {FEW} ranks", few],
        [f"dry_run of {LARGE} on {MANY} ranks", many],
        [f"search: {len(ways.candidates)} ways for {LARGE} on {FEW} ranks", searched],
        ["check_plan on 2 local ranks, with their start", checked],
    ]
    (real,) = launch("benchmarks.planning_rank", CHECKED, environment={"HYPER_PARALLEL_PLATFORM": "torch-cpu"})
    result.tables += [table, *real.tables]
    result.goals += [
        Goal(f"dry_run on {MANY} ranks / on {FEW} ranks", many / few, 1.3),
        Goal(f"search for {LARGE} on {FEW} ranks, seconds", searched, PATIENCE),
        Goal("check_plan on 2 ranks, seconds", checked, PATIENCE),
        Goal("check_plan finds the plan wrong", float(not report), 0.0, strict=True),
        *real.goals,
    ]
    return result
