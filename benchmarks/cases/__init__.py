"""The cases by name. Each module has ``run(effort)``, which gives a `report.Result`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from benchmarks.report import Result
from benchmarks.timing import Effort

__all__ = ["NAMES", "find"]

NAMES = (
    "mlp",
    "llama",
    "compile",
    "collectives",
    "operators",
    "optimizer",
    "plain_code",
    "long_sequences",
    "gloo",
    "experts",
    "fully_shard",
    "replicate",
    "loading",
    "checkpoint",
    "planning",
    "mindspore",
    "cuda",
)


def find(name: str) -> Callable[[Effort], Result]:
    """``run`` of the case; its module is imported now."""
    run: Callable[[Effort], Result] = importlib.import_module(f"benchmarks.cases.{name}").run
    return run
