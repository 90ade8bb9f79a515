"""Drive the pool of workers through all operators, and go on behind those that hang."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hyper_parallel.testing.pool import JobError, WorkerPool

__all__ = ["ORDER", "found_by", "operators", "worst"]

#: Verdicts from the best to the worst.
ORDER = ("own rule", "gathered", "refused", "unsteady", "wrong", "hanging")
_JUDGE = "tests.support.operator_table.judge:judge"
_NAMES = "tests.support.operator_table.judge:names_of"
#: Operators in one job.
BATCH = 20
JOB_TIMEOUT = 900.0


def operators(pool: WorkerPool) -> tuple[str, list[str]]:
    """The module and the names of the operators of the pool's backend."""
    return pool.run(pool.size, _NAMES, pool.platform, timeout=JOB_TIMEOUT)[0]


def found_by(pool: WorkerPool, names: list[str], samples: int, many: bool, tell: Any = None) -> dict[str, Any]:
    """Operator -> the findings of `judge`. See there."""
    found: dict[str, Any] = {}
    remaining = list(names)
    with tempfile.TemporaryDirectory(prefix="operator-table-") as folder:
        while remaining:
            path = Path(folder) / f"{len(remaining)}.jsonl"
            path.touch()
            hung = ""
            try:
                pool.run(
                    pool.size, _JUDGE, pool.platform, remaining[:BATCH], samples, many, str(path), timeout=JOB_TIMEOUT
                )
            except JobError as error:
                hung = str(error)
            begun = ""
            for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                begun = line.get("begun", begun)
                if "name" in line:
                    found[line.pop("name")] = line
            if hung:
                if not begun:
                    raise RuntimeError(f"no operator was begun: {hung}")
                found[begun] = {"found": {"forward": {"hanging": [hung[-3000:]]}}}
            remaining = [name for name in remaining if name not in found]
            if tell is not None:
                tell(found, f"{len(found)} of {len(names)}" + (f", {begun} hangs" if hung else ""))
    return found


def worst(line: dict[str, Any], form: str) -> str:
    """The worst verdict in one form, "" where it was not tried."""
    verdicts = line.get("found", {}).get(form, {})
    return max(verdicts, key=ORDER.index, default="")
