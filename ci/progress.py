"""Plugin of pytest that writes events as they happen, for the progress lines of `ci/reporter.py`.

    python -m pytest -p ci.progress --progress FILE ...

Each line of the file is an event, a JSON object: ``{"collected": 12}``, ``{"started": NAME}``,
``{"failed": NAME, "text": TRACEBACK}`` as soon as a test has failed, and ``{"finished": NAME, "outcome": "passed"}``.
Other programs write such events with `Events`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["Events"]


class Events:
    """A file of events; each call appends a line at once."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def add(self, **event: Any) -> None:
        """Write one event."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


class Progress:
    """Hooks of pytest that write events."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._outcome = "passed"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._events.add(failed=report.nodeid, text=report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._events.add(collected=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = "passed"
        self._events.add(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcome = "failed"
            printed = [f"{title:-^80}\n{text}" for title, text in report.sections]
            self._events.add(failed=report.nodeid, text="\n".join([report.longreprtext, *printed]))
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._events.add(finished=nodeid, outcome=self._outcome)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", metavar="FILE", help="write events as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--progress"):
        config.pluginmanager.register(Progress(Events(path)))
