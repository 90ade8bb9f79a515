"""A process that has imported a framework and forks for each run of tests: this halves the overhead of a run.

    python -m ci.mutants.server FRAMEWORK

It reads runs from its input, one JSON list a line: the list of tests, the file for the log, the file for the events,
after how many failures to stop. The child writes the events, a JSON list a line: ``["begins", test]`` and ``["ends",
test, passed]``. To its output the server writes the child's process id when it begins, and its exit status when it
ends. Nothing of the library is imported here: each run imports the sources as they are then.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from multiprocessing import forkserver
from typing import Any

import pytest


class Follower:
    """A plugin of pytest that writes down which test begins and how it ends."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
        self.passed = True

    def write(self, *entry: Any) -> None:
        print(json.dumps(entry), file=self.file, flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.passed = True
        self.write("begins", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed = self.passed and not report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write("ends", nodeid, self.passed)


def run_tests(tests: str, log: str, events: str, failures: int) -> None:
    """Run the tests in the child process; it does not return."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - a killed process leaves its output
    arguments = [f"--maxfail={failures}", "-q", "-p", "no:cacheprovider", "--tb=short", f"@{tests}"]
    status = int(pytest.main(arguments, plugins=[Follower(events)]))
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    """Serve runs until the input ends."""
    framework = sys.argv[1]
    for module in ("numpy", framework):
        importlib.import_module(module)
    # One process for all runs, from which the workers of the pools are forked. Children must not ask whether it is
    # alive: it is no child of theirs.
    forkserver.set_forkserver_preload(["numpy", framework])
    forkserver.ensure_running()
    forkserver._forkserver.ensure_running = lambda: None
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run_tests(*json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
