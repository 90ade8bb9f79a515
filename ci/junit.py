"""Reader of pytest's reports in JUnit's format: how many tests passed, which failed, how long each file took."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Report", "seconds_of_files", "slowest"]

#: Characters of an error that are shown at the end of a run; all of it stands further up.
MOST_OF_A_MESSAGE = 400


class Report:
    """Report of one process of pytest.

    Args:
        path: of the report.
        root: the project, whose files the tests are in.

    Attributes:
        passed, failed, skipped: numbers of tests.
        failures: test that failed -> its error in a line.
        seconds: file of tests -> how long its tests took.
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
    """Return the first and the last line of an error: the latter has the reason where ranks of a pool have failed."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))[:MOST_OF_A_MESSAGE]


def file_of(root: Path, dotted: str) -> tuple[str, list[str]]:
    """Return the file that ``dotted``, such as ``tests.unit.test_a.TestB``, begins with, and the words after it."""
    words = dotted.split(".")
    for n in range(len(words), 0, -1):
        file = "/".join(words[:n]) + ".py"
        if (root / file).is_file():
            return file, words[n:]
    return "", [word for word in words if word]


def reports(folder: Path) -> Iterator[Path]:
    """Yield the reports of a part that has run in ``folder``."""
    yield from sorted(folder.glob("junit-*.xml"))


def seconds_of_files(root: Path, folder: Path) -> dict[str, float]:
    """Return file of tests -> how long it took in the last part that ran in ``folder``. Empty where none has."""
    total: dict[str, float] = defaultdict(float)
    for path in reports(folder):
        with suppress(ElementTree.ParseError):  # of a run that was cut off
            for file, seconds in Report(path, root).seconds.items():
                total[file] += seconds
    return dict(total)


def slowest(root: Path, folders: dict[str, Path], count: int = 20) -> list[str]:
    """Return lines about the files of tests that took longest.

    Args:
        root: the project.
        folders: part -> the folder with its reports.
        count: how many files.
    """
    found = [
        (seconds, part, file)
        for part, folder in folders.items()
        for file, seconds in seconds_of_files(root, folder).items()
    ]
    return [f"{seconds:7.1f} s  {part}  {file}" for seconds, part, file in sorted(found, reverse=True)[:count]]
