"""Which errors the last run of the gates did not come to: ``raise`` statements that no test of any backend reached.

    python -m ci.raises [build/gate]

Errors that files of the library raise for each other are listed too. What runs in a subprocess that no coverage
measures, or on a rank that measures none (tests/support/measured_ranks.py), counts as not reached.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from coverage import CoverageData

from ci.error_table import PACKAGE, ROOT

__all__ = ["raises", "unreached"]


def raises(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the statements that raise something new."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield node.lineno, ast.unparse(node)


def unreached(package: Path, lines: Mapping[str, set[int]]) -> tuple[int, list[str]]:
    """How many statements there are below ``package``, and those that are not among ``lines``, as ``path:line: text``.

    Args:
        package: folder.
        lines: path from the parent of the package -> the lines that ran.
    """
    count, missed = 0, []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package.parent).as_posix()
        if "testing" in path.relative_to(package).parts:
            continue
        for line, text in raises(path.read_text(encoding="utf-8")):
            count += 1
            if line not in lines.get(name, ()):
                missed.append(f"{name}:{line}: {text[:150]}")
    return count, missed


def reached(folder: Path) -> dict[str, set[int]]:
    """What the parts of the gates have reached together, from the files of coverage that they have left."""
    found: dict[str, set[int]] = {}
    for path in (*folder.glob("*/combined/coverage"), *folder.glob("*/coverage.*.*")):
        data = CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            found.setdefault(name, set()).update(data.lines(name) or ())
    return found


def main() -> None:
    """Print them."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "gate"
    lines = reached(folder)
    if not lines:
        raise SystemExit(f"{folder} has no coverage: run the gates first (make test)")
    count, missed = unreached(PACKAGE, lines)
    print("\n".join(missed))
    print(f"{count - len(missed)} of {count} statements that raise were reached")


if __name__ == "__main__":
    main()
