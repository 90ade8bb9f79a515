"""The record of the last nightly run, ``ci/last_nightly.json``, and its table in docs/gates.md.

    python3 ci/nightly_table.py [--check]

`ci/nightly.py` adds each part that has ended, and rewrites the table. Each part keeps the record of its last run.
``--check`` changes nothing, and ends with an error if the page is out of date.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from results import Row

__all__ = ["BEGIN", "END", "PARTS", "add", "entry", "read", "section", "with_section", "write_page"]

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path("ci") / "last_nightly.json"
PAGE = Path("docs") / "gates.md"
BEGIN = "<!-- made by ci/nightly_table.py from ci/last_nightly.json: do not edit -->"
END = "<!-- end of what ci/nightly_table.py made -->"
#: Part -> its tests, in the order of the table.
PARTS = {
    "unit": "`tests/unit`",
    "torch-cpu": "conformance suite, `tests/torch`",
    "mindspore": "conformance suite, `tests/mindspore`",
    "torch-npu": "conformance suite, `tests/torch`, `tests/npu`",
    "torch-cuda": "`tests/fake_cuda` without a GPU",
    "torch-cpu-without-fast": "conformance suite with `HYPER_PARALLEL_FAST=0`",
    "torch-cpu-rows": "rows of `tests/support/data_parallel_table.py`",
    "mindspore-rows": "rows of `tests/support/data_parallel_table.py`",
    "torch-cpu-compiled-rows": "rows of `tests/torch/compiled_rows.py`",
}


def entry(row: Row, rows: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the record of a part.

    Args:
        row: row of the part.
        rows: for a table, its number of rows and the number and seed of random rows; None for tests.
    """
    return {
        "device": row.device,
        "passed": row.passed,
        "failed": row.failed,
        "skipped": row.skipped,
        **(rows or {}),
        "seconds": round(row.seconds),
        "commit": row.commit,
        "date": row.date,
        "problem": row.problem,
        "failed tests": [*row.failed_tests],
    }


def read(root: Path) -> dict[str, dict[str, Any]]:
    """Return part -> its record; empty if nothing was recorded yet."""
    path = root / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def add(root: Path, part: str, record: dict[str, Any]) -> None:
    """Replace the record of ``part``, and rewrite the table of the page."""
    known = {**read(root), part: record}
    order = [*PARTS, *sorted(known.keys() - PARTS.keys())]
    _write(root / RECORD, json.dumps({name: known[name] for name in order if name in known}, indent=2) + "\n")
    write_page(root)


def section(known: dict[str, dict[str, Any]]) -> str:
    """Return the table of the page, without its markers.

    Args:
        known: contents of ``ci/last_nightly.json``.
    """
    lines = [
        "| part | tests | passed | failed | skipped | seconds | last run | |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    names = []
    for part in [*PARTS, *(name for name in known if name not in PARTS)]:
        what = PARTS.get(part, "")
        if run := known.get(part):
            numbers = " | ".join(str(run[key]) for key in ("passed", "failed", "skipped", "seconds"))
            drawn = f", {run['at random']} at random of seed {run['seed']}" if "seed" in run else ""
            verdict = f"**{run['problem']}**" if run["problem"] else "ok"
            device = f" ({run['device']})" if run["device"] else ""
            last = f"{run['date']}, `{run['commit']}`"
            lines.append(f"| `{part}`{device} | {what}{drawn} | {numbers} | {last} | {verdict} |")
            names += [f"- `{part}`: `{test}`" for test in run["failed tests"]]
        else:
            lines.append(f"| `{part}` | {what} | - | - | - | - | not yet | |")
    return "\n".join(lines + (["", "Failed:", "", *names] if names else []))


def with_section(page: str, text: str) -> str:
    """Return ``page`` with ``text`` between its markers.

    Raises:
        SystemExit: unless the page has each marker once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{PAGE} must have these lines once each:\n{BEGIN}\n{END}")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


def write_page(root: Path) -> None:
    """Rewrite the table of the page from the record."""
    page = root / PAGE
    _write(page, with_section(page.read_text(encoding="utf-8"), section(read(root))))


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, because tests of the same run read it."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    parser.add_argument("--check", action="store_true", help="only see whether the page is as it must be")
    arguments = parser.parse_args(argv)
    root = arguments.root
    if not arguments.check:
        write_page(root)
        return 0
    page = (root / PAGE).read_text(encoding="utf-8")
    if with_section(page, section(read(root))) == page:
        return 0
    print(f"{PAGE} was edited between the markers of ci/nightly_table.py: make readme-table", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
