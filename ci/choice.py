"""The tests that `make test FILES=` selects, and the parts of the gate in which they run.

An entry is a file of tests, a folder of them, or a test in pytest's own form, ``file::test``.
"""

from __future__ import annotations

import difflib
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["checked", "left_out", "within"]

#: Python code that prints which files of tests the backend under test does not run, from the tests' configuration.
QUESTION = "import tests.conftest\nprint(*tests.conftest.left_out(), sep='\\n')"


def checked(root: Path, entries: Iterable[str], parts: Mapping[str, list[str]], asked: Iterable[str]) -> list[str]:
    """Return the entries as paths below ``root``.

    Args:
        root: the project.
        entries: entries as the user wrote them.
        parts: every part -> the folders and files that it can run.
        asked: parts that are to run.

    Raises:
        ValueError: for an entry that does not exist, or that no part in ``asked`` can run. The message has the remedy.
    """
    found, asked = [], list(asked)
    for entry in entries:
        written, colons, test = entry.partition("::")
        path = Path(os.path.relpath(root / written, root)).as_posix()
        if not (root / path).exists():
            known = [file.relative_to(root).as_posix() for file in root.glob("tests/*/test_*.py")]
            close = difflib.get_close_matches(path, known, n=1)
            raise ValueError(f"FILES: there is no {written}" + (f"; did you mean {close[0]}?" if close else ""))
        able = [part for part, places in parts.items() if within([path], places)]
        if not able:
            places = sorted({place for places in parts.values() for place in places if not place.endswith(".py")})
            raise ValueError(f"FILES: no part runs {written}: name files of tests in {', '.join(places)}")
        if not set(able) & set(asked):
            raise ValueError(
                f"FILES: {written} is for {', '.join(able)}, not for {', '.join(asked)}: "
                "leave PLATFORM out, or choose another"
            )
        found.append(path + colons + test)
    return found


def within(entries: Iterable[str], places: Iterable[str]) -> list[str]:
    """Return the ``entries`` that are one of the folders and files ``places``, or are below one of them."""
    places = list(places)
    return [entry for entry in entries if any(Path(entry.partition("::")[0]).is_relative_to(place) for place in places)]


def left_out(root: Path, command: list[str], environment: Mapping[str, str]) -> set[str]:
    """Return the files of tests that the backend of ``environment`` does not run, from all folders.

    Args:
        root: the project.
        command: command that starts Python for this backend.
        environment: environment variables, with ``HYPER_PARALLEL_PLATFORM``.

    Raises:
        RuntimeError: if the configuration of the tests cannot be read.
    """
    if not (root / "tests" / "conftest.py").exists():
        return set()
    question = [*command, "-c", QUESTION]
    answer = subprocess.run(question, cwd=root, env=environment, check=False, capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(f"tests/conftest.py does not say which files run: {answer.stderr.strip()[-500:]}")
    return {f"tests/{name}" for name in answer.stdout.split()}
