"""A plugin of pytest that tells coverage which test runs, in this process and in the workers of its pools.

    coverage run -m pytest -p ci.mutants.recording --record=FOLDER tests/...

Workers start once and serve many tests, so each gets a small job before the first job of a test, which switches the
context of its measurement. ``FOLDER/tests.jsonl`` gets a line for every test: its name, whether it passed, its seconds,
and whether it is nightly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.testing.pool import WorkerPool

SWITCH = "ci.mutants.recording:switch"


def switch(test: str) -> None:
    """Count the lines that this process runs from now on as reached by ``test``."""
    coverage = sys.modules.get("coverage")
    measurement = coverage.Coverage.current() if coverage else None
    # A rank that was told not to measure (tests/support/measured_ranks.py) refuses a context.
    if measurement is not None and measurement._started:
        measurement.switch_context(test)


class Recorder:
    """Knows which test runs; see the module."""

    def __init__(self, folder: Path) -> None:
        self.test = ""
        self.seconds = 0.0
        self.passed = True
        #: pool -> the test and the start of its workers that they were told last
        self.told: dict[int, tuple[str, int]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / "tests.jsonl").open("w", encoding="utf-8")

    def follow_pools(self) -> None:
        """Have every pool with a framework tell its workers the test before they run a job."""
        run, started = WorkerPool.run, self.told

        @wraps(run)
        def told_run(pool: WorkerPool, world_size: int, job: Any, *args: Any, **options: Any) -> list:
            __tracebackhide__ = True
            if pool.platform is not None and started.get(id(pool)) != (self.test, pool.starts):
                run(pool, pool.size, SWITCH, self.test)
                started[id(pool)] = (self.test, pool.starts)
            return run(pool, world_size, job, *args, **options)

        WorkerPool.run = told_run  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.test, self.seconds, self.passed = item.nodeid, 0.0, True
        switch(self.test)
        result = yield
        switch("")
        nightly = item.get_closest_marker("nightly") is not None
        entry = {"test": self.test, "passed": self.passed, "seconds": round(self.seconds, 3), "nightly": nightly}
        print(json.dumps(entry), file=self.log, flush=True)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        self.passed = self.passed and not report.failed


def pytest_addoption(parser: pytest.Parser) -> None:
    """The folder of the log."""
    parser.addoption("--record", type=Path, help="where to write which tests ran")


def pytest_configure(config: pytest.Config) -> None:
    """Record when a folder is given."""
    if folder := config.getoption("--record"):
        recorder = Recorder(folder)
        recorder.follow_pools()
        config.pluginmanager.register(recorder, "recorder of mutants")
