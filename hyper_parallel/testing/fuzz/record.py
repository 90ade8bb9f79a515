"""The record of the last runs of random programs: ci/last_fuzz.json."""

from __future__ import annotations

import datetime
import json
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hyper_parallel.testing.fuzz.campaign import BAD

__all__ = ["add_run", "commit_of"]


def add_run(
    file: Path, platform: str, commit: str, first: int, count: int, outcomes: dict[str, int], seconds: float
) -> None:
    """Add a run to ``file``. The counts of runs of any commit add up, until one run is bad.

    A bad run starts a new record, and so does the run after it. A run that continues where the last run of the same
    commit ended is merged with it.

    Args:
        file: a JSON file; it is created if it does not exist.
        platform: the backend; after a comma, the kind of programs.
        commit: commit of the run, see `commit_of`.
        first: first seed of the run.
        count: number of programs.
        outcomes: number of programs by outcome.
        seconds: duration of the run.
    """
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    entry = known.get(platform)
    if entry is None or _is_bad(entry["outcomes"]) or _is_bad(outcomes):
        entry = known[platform] = {"programs": 0, "outcomes": {}, "runs": []}
    entry["programs"] += count
    for kind, number in outcomes.items():
        entry["outcomes"][kind] = entry["outcomes"].get(kind, 0) + number
    run = {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "framework": _framework(platform),
        "first seed": first,
        "count": count,
        "seconds": round(seconds),
    }
    last = entry["runs"][-1] if entry["runs"] else None
    if last and last["commit"] == run["commit"] and last["first seed"] + last["count"] == first:
        run |= {name: last[name] + run[name] for name in ("count", "seconds")} | {"first seed": last["first seed"]}
        entry["runs"].pop()
    entry["runs"].append(run)
    file.write_text(json.dumps(known, indent=2) + "\n")


def _is_bad(outcomes: dict[str, int]) -> bool:
    return any(outcomes.get(kind) for kind in BAD)


def commit_of(folder: Path) -> str:
    """Return the commit in ``folder``, with ``+changes`` if the library has changes; empty if git knows no commit."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "hyper_parallel") else "")


def _framework(platform: str) -> str:
    name = platform.partition(",")[0].split("-")[0]
    return f"{name} {version(name)}"
