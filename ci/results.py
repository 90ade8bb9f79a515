"""Results of gates: one row for each backend, stored as JSON, shown as a table in a terminal and in Markdown.

`ci/gate.py` writes ``build/gate/table.{json,md}``; `ci/table.py` and `ci/hardware/report.py` read the JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

__all__ = [
    "AREAS",
    "OWN",
    "PACKAGE",
    "Area",
    "Row",
    "commit_of",
    "committed_tree",
    "from_dict",
    "is_own",
    "markdown",
    "read",
    "stamp",
    "terminal",
    "today",
    "tree",
    "write",
]

#: Areas whose coverage a row shows.
PACKAGE = "hyper_parallel"
CORE = "hyper_parallel/core"
TENSOR_PARALLEL = "hyper_parallel/core/tensor_parallel"
#: Folder of the backends' own areas. A pattern in it names files that all backends share.
OWN = "hyper_parallel/platform"
AREAS = ("core", "tensor_parallel", "own_folder")
COLUMNS = ["backend", "passed", "failed", "skipped", *AREAS, "at_least", "seconds", "verdict"]


def is_own(path: str) -> bool:
    """Return whether an area belongs to the backend itself, not to the code that all backends share."""
    return path.startswith(OWN) and "*" not in path and path != OWN + "/contract"


@dataclass
class Area:
    """A folder or file of the package, the percentage of it that was reached, and the required minimum."""

    path: str
    least: float
    reached: float

    @property
    def missed(self) -> bool:
        """Return whether less than the minimum was reached."""
        return self.reached < self.least


@dataclass
class Row:
    """The result of a gate for one backend.

    Attributes:
        backend: name of the backend, or ``"unit"``.
        device: the device of its tests: ``"CPU"``, ``"GPU"``, ``"fake GPU"``, ``"NPU"``, ``"simulated NPU"``.
        passed, failed, skipped: numbers of tests.
        seconds: duration of the tests.
        areas: coverage of each measured area.
        problem: reason why the gate failed.
        left_out: reason why nothing was run.
        failed_tests: failed test -> its error in a line, or an empty string if that is not known.
        commit, date: commit and date of the run.
        tree: git's id of ``hyper_parallel/`` as it was in the run; empty if git gave none.
        partial: whether only some of its tests were requested. The numbers then say little about the backend.
        torch: the release of torch that ``make test TORCH=`` requested; empty for the pinned release.
    """

    backend: str
    device: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    areas: list[Area] = field(default_factory=list)
    problem: str = ""
    left_out: str = ""
    failed_tests: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    tree: str = ""
    partial: bool = False
    torch: str = ""

    @property
    def name(self) -> str:
        """Name of the backend and its device."""
        return f"{self.backend} ({self.device})" if self.device else self.backend

    @property
    def verdict(self) -> str:
        """Text of the last column."""
        return f"FAIL: {self.problem}" if self.problem else f"LEFT OUT: {self.left_out}" if self.left_out else "ok"

    def area(self, column: str) -> Area | None:
        """Return the area of the column ``core``, ``tensor_parallel`` or ``own_folder``; None for an unmeasured one."""
        wanted = {"core": CORE, "tensor_parallel": TENSOR_PARALLEL}.get(column)
        of_column = (a for a in self.areas if (a.path == wanted if wanted else is_own(a.path)))
        return min(of_column, key=lambda area: area.reached - area.least, default=None)

    def coverage(self, column: str) -> str:
        """Return the percentage reached, rounded down (99.96 is not 100), or a dash."""
        area = self.area(column)
        return "-" if area is None else f"{int(area.reached * 10) / 10:g}%"

    def cells(self) -> list[str]:
        """Return the cells of the row in the table."""
        least = [area and f"{area.least:g}%" for area in map(self.area, AREAS)]
        return [
            self.name,
            *map(str, (self.passed, self.failed, self.skipped)),
            *map(self.coverage, AREAS),
            " / ".join(text or "-" for text in least) if any(least) else "-",
            f"{self.seconds:.0f}",
            self.verdict,
        ]


def _git(root: Path, *command: str, **variables: str) -> str:
    """Return the output of ``git`` in ``root``.

    Raises:
        subprocess.CalledProcessError: if the command fails.
    """
    environment = {**os.environ, **variables}
    done = subprocess.run(["git", *command], cwd=root, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit_of(root: Path, but: Iterable[str] = ()) -> str:
    """Return the commit of the project in ``root``, with ``+changes`` if a file other than ``but`` differs from it."""
    others = [f":(exclude){path}" for path in but]
    try:
        commit = _git(root, "rev-parse", "--short=10", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changed else "")


def today() -> str:
    """Return today's date as the tables show it."""
    return datetime.now(timezone.utc).date().isoformat()


def tree(root: Path) -> str:
    """Return git's id of ``hyper_parallel/`` as it is in ``root``, committed or not; empty if git fails.

    Two trees with the same files have the same id. The index of the checkout is not changed.
    """
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        try:
            _git(root, "read-tree", "HEAD", **index)  # so that tracked files count even if .gitignore names them
            _git(root, "add", "--all", "--", PACKAGE, **index)
            return _git(root, "write-tree", f"--prefix={PACKAGE}/", **index)
        except (OSError, subprocess.CalledProcessError):
            return ""


def committed_tree(root: Path) -> str:
    """Return git's id of ``hyper_parallel/`` in the commit that is checked out in ``root``; empty if git fails."""
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", f"HEAD:{PACKAGE}")
    except (OSError, subprocess.CalledProcessError):
        return ""


def stamp(root: Path, rows: Iterable[Row], begun: str | None = None) -> None:
    """Set the commit, the id of the code and today's date of each row.

    ``make test TORCH=2.14.1`` passes its ``TORCH`` to the gate in the environment. Rows then name the release.

    Args:
        root: the project.
        rows: rows of a run that has just ended.
        begun: result of `tree` at the start of the run. If the code has changed since, rows get no id.
    """
    code, commit, date = tree(root), commit_of(root), today()
    code = code if begun in (None, code) else ""
    for row in rows:
        row.commit, row.date, row.tree = commit, date, code
        row.torch = os.environ.get("TORCH", "") if row.backend.startswith("torch-") else ""


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> list[Row]:
    """Read a file that `write` has written.

    Raises:
        SystemExit: if there is no such file.
    """
    if not path.exists():
        raise SystemExit(f"{path} is missing: run the gates first, make test or ci/<backend>")
    return [from_dict(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def from_dict(row: dict) -> Row:
    """Return the row from which ``dataclasses.asdict`` made the dict ``row``."""
    return Row(**{**row, "areas": [Area(**area) for area in row["areas"]]})


def terminal(rows: Iterable[Row]) -> str:
    """Return the table for a terminal, in columns; the verdict comes last, because it may be wide."""
    lines = [[name.replace("_", " ") for name in COLUMNS], *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS) - 1)]
    rendered = []
    for line in lines:
        first, *numbers = (f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(line[:-1]))
        rendered.append("  ".join([first, *numbers, line[-1]]))
    return "\n".join(rendered)


def markdown(rows: Iterable[Row]) -> str:
    """Return the table in Markdown."""
    head = [name.replace("_", " ") for name in COLUMNS]
    rules = ["---", *["---:"] * (len(COLUMNS) - 2), "---"]
    lines = [head, rules, *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
