"""The file that says which programs were run last: ci/last_fuzz.json."""

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
    """Add a run to ``file``. Runs add up, whatever their commits, until one is bad: that one stands alone, and the next
    begins anew. A run that goes on where the last run of the same commit ended is part of it.

    Args:
        file: a JSON file, made where there is none.
        platform: the backend; after a comma, the kind of programs.
        commit: that ran, as `commit_of` says.
        first: its first seed.
        count: how many programs.
        outcomes: how many had each.
        seconds: it took.
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
    """The commit that runs, with ``+changes`` where the library is not as committed; empty where git knows none."""

    def git(*arguments: str) -> str:
        run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "hyper_parallel") else "")


def _framework(platform: str) -> str:
    name = platform.partition(",")[0].split("-")[0]
    return f"{name} {version(name)}"
