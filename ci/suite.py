"""Pytest processes, one or several, that run the tests of a part of the gate."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TextIO

import junit
from reporter import Part
from results import Row

__all__ = ["Tests", "processes_for", "shares_of"]

#: Time limit in seconds: 1.5 times the longest part on a slow machine, 54 minutes. Tests have shorter limits.
PART_TIMEOUT = 80 * 60
#: Most pytest processes: each has four ranks, and most machines lack memory for more.
MOST_PROCESSES = 8


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_for(count: int) -> int:
    """Return the number of pytest processes for a part on ``count`` cores.

    Two parts run at a time. Each process has four ranks, most of which wait: 6 processes on 16 cores, 1 on up to 5.
    """
    return min(MOST_PROCESSES, max(1, count * 3 // 8))


def shares_of(tests: Mapping[str, int], seconds: Mapping[str, float], count: int) -> list[list[str]]:
    """Divide test files into at most ``count`` shares of about equal duration.

    Args:
        tests: file -> number of its tests.
        seconds: file -> its last duration. Durations of other files are estimated from their number of tests.
        count: largest number of shares.
    """
    known = sum(seconds[file] for file in tests if file in seconds)
    counted = sum(number for file, number in tests.items() if file in seconds)
    each = known / counted if known else 1.0
    weights = {file: seconds.get(file, each * number) for file, number in tests.items()}
    shares: list[list[str]] = [[] for _ in range(count)]
    sizes = [0.0] * count
    for file in sorted(weights, key=lambda name: -weights[name]):
        least = sizes.index(min(sizes))
        shares[least].append(file)
        sizes[least] += weights[file]
    return [share for share in shares if share]


class Tests:
    """Settings for the tests of all parts, which also run the pytest processes.

    Args:
        root: the project.
        processes: number of pytest processes over which the test files of a part are split.
        measured: whether tests run under coverage, which takes a quarter of the time.
        build: folder below ``root`` for data and reports.
        variables: further environment variables.
        files: the requested tests; None for all.
        timeout: time limit in seconds of one process.

    Attributes:
        ran: folders and files that were passed to pytest, in any part.
        stopped: whether the run was interrupted.
    """

    def __init__(
        self,
        root: Path,
        processes: int = 1,
        measured: bool = True,
        build: Path = Path("build") / "gate",
        variables: Mapping[str, str] | None = None,
        files: list[str] | None = None,
        timeout: int = PART_TIMEOUT,
    ) -> None:
        self.root = root
        self.processes = processes
        self.measured = measured
        self.build = root / build
        self.variables = dict(variables or {})
        self.files = files
        self.timeout = timeout
        self.ran: set[str] = set()
        self.stopped = False

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process, with ``variables``. Python may write bytecode: otherwise each of
        hundreds of processes would compile the sources again."""
        inherited = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**inherited, **self.variables, **variables}

    def unmeasured(self) -> Tests:
        """Return a copy of the settings, without coverage."""
        other = copy.copy(self)
        other.measured = False
        return other

    def run(self, row: Row, folders: list[str], variables: Mapping[str, str], command: list[str], part: Part) -> None:
        """Run pytest on ``folders`` under coverage, and add the counts to ``row``.

        Data and reports go to a folder of the part. ``command`` starts Python.
        """
        output = self.build / row.backend
        seconds = junit.seconds_of_files(self.root, output)
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        self.ran.update(folders)
        part.say(f"== {row.name}: {' '.join(folders)}")
        environment = {**self.environment(variables), "COVERAGE_FILE": str(output / "coverage")}
        started = time.monotonic()
        shares = self._shares(folders, environment, command, seconds, part)
        reports = [output / f"junit-{n}.xml" for n in range(len(shares))]
        part.watch([report.with_suffix(".events") for report in reports])
        # Several processes get separate logs, so that their output does not mix.
        log = part.log if len(shares) == 1 else None
        with ThreadPoolExecutor(len(shares)) as threads:
            problems = threads.map(partial(self._pytest, environment, command, log), shares, reports)
        row.problem = next(filter(None, problems), "")
        row.seconds = time.monotonic() - started
        for report in reports:
            if log is None:
                part.log.write(report.with_suffix(".txt").read_text(encoding="utf-8", errors="replace"))
            if report.exists():
                self._count(row, report)
            else:
                row.problem = row.problem or "pytest wrote no report"
        if not row.passed:
            row.problem = row.problem or "no test ran"  # skipped tests prove nothing

    def _shares(
        self,
        folders: list[str],
        environment: dict[str, str],
        command: list[str],
        seconds: Mapping[str, float],
        part: Part,
    ) -> list[list[str]]:
        """Collect the test files below ``folders``, and return shares of about equal duration."""
        if self.processes == 1 or any("::" in folder for folder in folders):
            return [folders]
        part.doing("collecting")
        collect = [*command, "-m", "pytest", "--collect-only", "-q", *folders]
        found = subprocess.run(collect, cwd=self.root, env=environment, check=False, capture_output=True, text=True)
        files = Counter(line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line)
        return shares_of(files, seconds, self.processes) or [folders]

    def _pytest(
        self, environment: dict[str, str], command: list[str], log: TextIO | None, tests: list[str], report: Path
    ) -> str:
        """Run ``tests`` in one pytest process, with ``log`` or its own log. Return the problem or an empty string."""
        events = ["-p", "ci.progress", "--progress", str(report.with_suffix(".events"))]
        pytest = ["-m", "pytest", "-q", *events, f"--junitxml={report}", *tests]
        own = report.with_suffix(".txt")
        with nullcontext(log) if log else own.open("w", encoding="utf-8") as output:
            try:
                done = subprocess.run(
                    [*command, *(["-m", "coverage", "run"] if self.measured else []), *pytest],
                    cwd=self.root,
                    env=environment,
                    timeout=self.timeout,
                    check=False,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            except subprocess.TimeoutExpired:
                return f"over {self.timeout} s"
        if done.returncode:
            return "no test ran" if done.returncode == 5 else f"pytest exit {done.returncode}"
        return ""

    def _count(self, row: Row, path: Path) -> None:
        report = junit.Report(path, self.root)
        row.passed += report.passed
        row.failed += report.failed
        row.skipped += report.skipped
        row.failed_tests |= report.failures
