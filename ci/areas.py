"""Coverage of the package by area: the percentage reached in each, and the required minimum."""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
from pathlib import Path, PurePosixPath

import results
from reporter import Part
from results import Area, Row
from suite import Tests

__all__ = ["COVERAGE_OF", "measure", "reached", "thresholds_in"]

COVERAGE = [sys.executable, "-m", "coverage"]
#: Prefix of a problem for which a coverage report was already shown.
COVERAGE_OF = "coverage of "


def measure(tests: Tests, row: Row, config: Path, part: Part) -> None:
    """Combine the coverage of the unit tests and of this backend's tests, and compare it with the thresholds.

    If too little was reached, a report goes to the log and the terminal, and an HTML report to
    ``build/gate/<backend>/html``. Each report takes half a minute, so a run that reached enough makes none.
    """
    root = tests.root
    thresholds = thresholds_in(config)
    output = tests.build / row.backend
    data = output / "combined" / "coverage"
    data.parent.mkdir()

    def coverage(*words: str | Path) -> subprocess.CompletedProcess[str]:
        part.doing(f"coverage {words[0]}")
        command = [*COVERAGE, *map(str, words)]
        done = subprocess.run(
            command, cwd=root, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(done.stdout, end="", file=part.log, flush=True)
        return done

    if coverage("combine", "--keep", "--quiet", f"--data-file={data}", tests.build / "unit", output).returncode:
        row.problem = row.problem or "no coverage data"
        return
    options = [f"--data-file={data}", f"--rcfile={config}"]
    report = output / "coverage.json"
    coverage("json", *options, "--quiet", "-o", report)
    files = json.loads(report.read_text())["files"] if report.exists() else {}
    row.areas = [Area(path, least, reached(files, path)) for path, least in thresholds.items()]
    if missed := [area.path for area in row.areas if area.missed]:
        print(f"\n== {row.name}: coverage", file=part.log, flush=True)
        shown = coverage("report", *options, "--skip-covered").stdout
        coverage("html", *options, "--quiet", f"--directory={output / 'html'}")
        part.show(f"\n== {row.name}: coverage\n{shown}")
        row.problem = row.problem or COVERAGE_OF + ", ".join(missed)


def thresholds_in(config: Path) -> dict[str, float]:
    """Return area -> minimum percentage from a file; empty if the file leaves out the backend's own code."""
    settings = configparser.ConfigParser()
    settings.read(config)
    areas = {path: float(least) for path, least in settings["areas"].items()} if "areas" in settings else {}
    own = any(results.is_own(path) for path in areas)
    return areas if own and all(least > 0 for least in areas.values()) else {}


def reached(files: dict, path: str) -> float:
    """Return the percentage of lines and branches that ran in the file or folder ``path``. It may also be a pattern of
    files such as ``folder/*.py``. The result is 0 if nothing there was measured."""

    def within(name: str) -> bool:
        return name == path or name.startswith(path + "/") or ("*" in path and PurePosixPath(name).match(path))

    there = [file["summary"] for name, file in files.items() if within(name)]
    ran = sum(summary["covered_lines"] + summary["covered_branches"] for summary in there)
    there_are = sum(summary["num_statements"] + summary["num_branches"] for summary in there)
    return 100 * ran / there_are if there_are else 0.0
