"""Errors that the last run of the gates did not reach: ``raise`` statements that no test of any backend ran.

    python -m ci.raises [build/gate]

`make test` asks after all gates, and fails where it lists one: write a test that is refused so, in a table of wrong
uses (docs/gates.md names them), or, where nothing can lead there, take the statement out. Statements that have to stay
are in `KEPT`, with the reason. Errors that files of the library raise for each other count too. Lines that run in an
unmeasured subprocess, or on an unmeasured rank (tests/support/measured_ranks.py), do not count as reached.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from coverage import CoverageData

from ci.error_table import PACKAGE, ROOT

__all__ = ["KEPT", "outdated", "raises", "unreached"]

#: (file of the package, words of the statement) -> why no test can come to it, and why it is there all the same.
KEPT: dict[tuple[str, str], str] = {
    ("core/communication/redistribute.py", "no way to redistribute"): (
        "There is a way between any two layouts of one mesh and shape, over the replicated one, which the conformance "
        "suite takes for every pair. This says which pair it is, should a new placement break that."
    ),
}


def raises(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the statements that raise something new."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.lineno, ast.unparse(node)


def _statements(package: Path) -> Iterator[tuple[str, int, str]]:
    """(file of the package, line, text) of all of them but those of the kit for tests."""
    for path in sorted(package.rglob("*.py")):
        if "testing" not in path.relative_to(package).parts:
            for line, text in raises(path.read_text(encoding="utf-8")):
                yield path.relative_to(package).as_posix(), line, text


def unreached(
    package: Path, lines: Mapping[str, set[int]], kept: Mapping[tuple[str, str], str] = KEPT
) -> tuple[int, list[str]]:
    """The number of statements below ``package``, and the unreached ones as ``path:line: text``. Unreached are those
    not among ``lines`` for which `KEPT` has no reason.

    Args:
        package: folder.
        lines: path from the parent of the package -> the lines that ran.
        kept: see `KEPT`.
    """
    count, missed = 0, []
    for path, line, text in _statements(package):
        count += 1
        name = f"{package.name}/{path}"
        if line not in lines.get(name, ()) and not any(path == file and words in text for file, words in kept):
            missed.append(f"{name}:{line}: {text[:150]}")
    return count, missed


def outdated(
    package: Path, lines: Mapping[str, set[int]], kept: Mapping[tuple[str, str], str] = KEPT
) -> list[tuple[str, str]]:
    """The entries of ``kept`` of which there is no statement any more, or which a test has come to."""
    there = {
        (file, words)
        for path, line, text in _statements(package)
        for file, words in kept
        if path == file and words in text and line not in lines.get(f"{package.name}/{path}", ())
    }
    return [entry for entry in kept if entry not in there]


def reached(folder: Path) -> dict[str, set[int]]:
    """The lines that all parts of the gates have reached together, from their files of coverage."""
    found: dict[str, set[int]] = {}
    for path in (*folder.glob("*/combined/coverage"), *folder.glob("*/coverage.*.*")):
        data = CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            found.setdefault(name, set()).update(data.lines(name) or ())
    return found


def main() -> int:
    """Print them; returns the exit status."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "gate"
    lines = reached(folder)
    if not lines:
        raise SystemExit(f"{folder} has no coverage: run the gates first (make test)")
    count, missed = unreached(PACKAGE, lines)
    old = outdated(PACKAGE, lines)
    for statement in missed:
        print(f"no test came to {statement}")
    for path, words in old:
        print(f"take it out of KEPT in ci/raises.py: {path}: {words}")
    print(
        f"errors: tests came to {count - len(missed) - len(KEPT) + len(old)} of {count} statements that raise, "
        f"{len(KEPT) - len(old)} are kept with a reason, {len(missed)} are left"
    )
    return 1 if missed or old else 0


if __name__ == "__main__":
    sys.exit(main())
