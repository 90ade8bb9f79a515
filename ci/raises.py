"""Errors that the last run of the gates did not reach: ``raise`` statements that no test of any backend ran.

    python -m ci.raises [build/gate]

`make test` runs this after all gates, and fails if it lists a statement. Then add a test that triggers the error to a
table of wrong uses (docs/gates.md names them). If nothing can trigger the error, remove the statement. Statements that
must stay are in `KEPT`, with the reason. Errors that one file of the library raises for another count too. Lines that
run in an unmeasured subprocess, or on an unmeasured rank (tests/support/measured_ranks.py), do not count as reached.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from coverage import CoverageData

from ci.error_table import PACKAGE, ROOT

__all__ = ["KEPT", "outdated", "raises", "unreached"]

#: (file of the package, words of the statement) -> why no test can reach it, and why it must stay.
KEPT: dict[tuple[str, str], str] = {
    ("core/communication/redistribute.py", "no collective produces the placements"): (
        "There is a way between any two layouts of one mesh and shape, over the replicated one, which the conformance "
        "suite takes for every pair. This says which pair it is, should a new placement break that."
    ),
}


def raises(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the ``raise`` statements that name an exception."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.lineno, ast.unparse(node)


def _statements(package: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, text) of all ``raise`` statements of the package, except in the tools for tests."""
    for path in sorted(package.rglob("*.py")):
        if "testing" not in path.relative_to(package).parts:
            for line, text in raises(path.read_text(encoding="utf-8")):
                yield path.relative_to(package).as_posix(), line, text


def unreached(
    package: Path, lines: Mapping[str, set[int]], kept: Mapping[tuple[str, str], str] = KEPT
) -> tuple[int, list[str]]:
    """Return the number of ``raise`` statements below ``package``, and the unreached ones as ``path:line: text``.

    A statement is unreached if its line did not run and ``kept`` has no reason for it.

    Args:
        package: folder of the package.
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
    """Return the entries of ``kept`` whose statement does not exist any more, or is reached by a test."""
    there = {
        (file, words)
        for path, line, text in _statements(package)
        for file, words in kept
        if path == file and words in text and line not in lines.get(f"{package.name}/{path}", ())
    }
    return [entry for entry in kept if entry not in there]


def reached(folder: Path) -> dict[str, set[int]]:
    """Return the lines that all parts of the gate reached together, from their coverage files."""
    found: dict[str, set[int]] = {}
    for path in (*folder.glob("*/combined/coverage"), *folder.glob("*/coverage.*.*")):
        data = CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            found.setdefault(name, set()).update(data.lines(name) or ())
    return found


def main() -> int:
    """Print unreached statements and outdated entries of `KEPT`, and return the exit status."""
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
