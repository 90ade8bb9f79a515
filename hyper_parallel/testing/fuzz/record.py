"""The file that says which programs were run last: ci/last_fuzz.json."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["add_run"]


def add_run(file: Path, platform: str, first: int, count: int, outcomes: dict[str, int], seconds: float) -> None:
    """Add a run to ``file``. Runs of one commit add up; the first of another commit replaces those of before."""
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    commit = _commit(file)
    entry = known.get(platform)
    if entry is None or entry["commit"] != commit:
        entry = known[platform] = {"commit": commit, "programs": 0, "outcomes": {}, "runs": []}
    entry["programs"] += count
    for kind, number in outcomes.items():
        entry["outcomes"][kind] = entry["outcomes"].get(kind, 0) + number
    entry["runs"].append(
        {
            "date": datetime.date.today().isoformat(),
            "first seed": first,
            "count": count,
            "seconds": round(seconds),
            "framework": _framework(platform),
        }
    )
    file.write_text(json.dumps(known, indent=2) + "\n")


def _commit(file: Path) -> str:
    """The commit that ran, as far as git knows one."""
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=file.parent, capture_output=True, text=True, check=False
    )
    return run.stdout.strip()


def _framework(platform: str) -> str:
    from importlib.metadata import version

    name = platform.split("-")[0]
    return f"{name} {version(name)}"
