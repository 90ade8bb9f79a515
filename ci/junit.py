"""Reader of pytest's JUnit reports: numbers of passed tests, failed tests, and the time of each file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Report", "seconds_of_files", "slowest"]

#: Characters of an error that are shown at the end of a run; the full error was printed before.
MOST_OF_A_MESSAGE = 400


class Report:
    """Report of one pytest process.

    Args:
        path: path of the report.
        root: the project that contains the test files.

    Attributes:
        passed, failed, skipped: numbers of tests.
        failures: failed test -> its error in a line.
        seconds: test file -> total time of its tests.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.passed = self.failed = self.skipped = 0
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
            self.failed += count["failures"] + count["errors"]
            self.skipped += count["skipped"]
            self.passed += count["tests"] - count["failures"] - count["errors"] - count["skipped"]
            for case in suite.iter("testcase"):
                self._case(case, root)

    def _case(self, case: ElementTree.Element, root: Path) -> None:
        file, rest = file_of(root, case.get("classname", ""))
        name = "::".join([*([file] if file else []), *rest, case.get("name", "")])
        if file:
            self.seconds[file] += float(case.get("time", 0))
        for problem in (*case.iterfind("failure"), *case.iterfind("error")):
            self.failures.setdefault(name, in_a_line(problem.get("message", "")))


def in_a_line(message: str) -> str:
    """Return the first and the last line of an error. The last has the reason if ranks of a pool have failed."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))[:MOST_OF_A_MESSAGE]


def file_of(root: Path, dotted: str) -> tuple[str, list[str]]:
    """Return the file at the start of ``dotted``, such as ``tests.unit.test_a.TestB``, and the words after it."""
    words = dotted.split(".")
    for n in range(len(words), 0, -1):
        file = "/".join(words[:n]) + ".py"
        if (root / file).is_file():
            return file, words[n:]
    return "", [word for word in words if word]


def reports(folder: Path) -> Iterator[Path]:
    """Yield the reports in the output folder of a part."""
    yield from sorted(folder.glob("junit-*.xml"))


def seconds_of_files(root: Path, folder: Path) -> dict[str, float]:
    """Return test file -> its time in the last run of the part with this output folder. Empty if there was no run."""
    total: dict[str, float] = defaultdict(float)
    for path in reports(folder):
        with suppress(ElementTree.ParseError):  # the report of an interrupted run
            for file, seconds in Report(path, root).seconds.items():
                total[file] += seconds
    return dict(total)


def slowest(root: Path, folders: dict[str, Path], count: int = 20) -> list[str]:
    """Return lines about the slowest test files.

    Args:
        root: the project.
        folders: part -> the folder with its reports.
        count: number of files.
    """
    found = [
        (seconds, part, file)
        for part, folder in folders.items()
        for file, seconds in seconds_of_files(root, folder).items()
    ]
    return [f"{seconds:7.1f} s  {part}  {file}" for seconds, part, file in sorted(found, reverse=True)[:count]]
