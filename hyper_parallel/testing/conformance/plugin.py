"""Plugin for pytest: the pool of worker processes of the backend, and counts of checks by group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

import pytest

from hyper_parallel.testing.conformance.report import Failure, Report
from hyper_parallel.testing.extent import MARKER, keep_the_gate
from hyper_parallel.testing.pool import JOB_TIMEOUT, WorkerPool

__all__ = ["Counter", "SelectedPool", "pool"]

_REPORT = pytest.StashKey[Report]()


class SelectedPool(WorkerPool):
    """A pool that skips a check if it asks for a number of ranks that the command did not select."""

    def __init__(self, platform: str, world_sizes: Sequence[int]) -> None:
        super().__init__(platform, max(world_sizes))
        self.world_sizes = world_sizes

    def run(self, world_size: int, job: str | Callable[..., Any], *args: Any, timeout: float = JOB_TIMEOUT) -> list:
        """Run a job on ranks. See `WorkerPool.run`."""
        __tracebackhide__ = True
        if world_size not in self.world_sizes:
            pytest.skip(f"{world_size} ranks were not asked for")
        return super().run(world_size, job, *args, timeout=timeout)


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Iterator[WorkerPool]:
    """Yield the worker processes of the backend."""
    report = pytestconfig.stash[_REPORT]
    with SelectedPool(report.backend, report.world_sizes) as workers:
        yield workers


class Counter:
    """Hooks of pytest that fill ``report``."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def pytest_configure(self, config: pytest.Config) -> None:
        """Store the backend for the fixture, and register the markers."""
        config.stash[_REPORT] = self.report
        config.addinivalue_line("markers", MARKER)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the checks that ``--quick`` omits."""
        keep_the_gate(config, items)

    def pytest_sessionstart(self) -> None:
        """Store the start time."""
        self._started = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        """Store the duration."""
        self.report.seconds = time.monotonic() - self._started

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be imported as a failure of its group."""
        if report.failed:
            self._fail(report.nodeid, report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count each check once: after its call, or after a set-up that skipped or failed."""
        group = self.report.group(_group_of(report.nodeid))
        if report.failed:
            phase = "" if report.when == "call" else f" ({report.when})"
            self._fail(report.nodeid + phase, report.longreprtext)
        elif report.skipped:
            group.skipped += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            reason = reason.removeprefix("Skipped: ")
            self.report.skip_reasons[reason] = self.report.skip_reasons.get(reason, 0) + 1
        elif report.when == "call":
            group.passed += 1

    def _fail(self, check: str, message: str) -> None:
        self.report.group(_group_of(check)).failed += 1
        self.report.failures.append(Failure(check, message))


def _group_of(nodeid: str) -> str:
    """Return the group of a check: ``test_style_matrix.py::test_x[1]`` is in the group ``style_matrix``."""
    return PurePosixPath(nodeid.split("::")[0]).stem.removeprefix("test_")
