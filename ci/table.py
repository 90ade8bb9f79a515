"""Write the README's table of features by backend from the results of the gates.

    make test && make readme-table        # or: ci/torch-cpu && python3 ci/table.py

Copies the rows of ``build/gate/table.json`` to ``ci/last_results.json``, where each backend keeps the result of its
last run. Then writes the section between the two markers in README.md, from that file and from the reports in
``ci/hardware/``. Both are committed. Some rows are refused: of gates that failed or were left out, of runs of only some
tests, and of a ``hyper_parallel/`` that differs from the committed one. The command then ends with an error that names
them. It also does so if an older row that stays is of other code than the commit. Rows of real devices come only from
their reports, which name the device. Rows of ``make test TORCH=``, with another release of torch than the pinned one,
make a table in docs/gates.md. ``--check`` changes nothing, and ends with an error if one of the pages is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import results
from results import Row

__all__ = ["BEGIN", "END", "merge", "refusal", "releases", "section", "with_section"]

ROOT = Path(__file__).resolve().parent.parent
LAST = Path("ci") / "last_results.json"
BEGIN = "<!-- made by ci/table.py from ci/last_results.json and ci/hardware/: do not edit -->"
END = "<!-- end of what ci/table.py made -->"
#: The page with the table of releases, and its markers.
GATES = Path("docs") / "gates.md"
BEGIN_RELEASES = "<!-- made by ci/table.py from ci/last_results.json: do not edit -->"
END_RELEASES = "<!-- end of releases -->"
OTHER_CODE = "the hyper_parallel/ that ran is not that of HEAD"
#: Message after rows of other code.
REMEDY = (
    "The README's table has to be of the committed hyper_parallel/. Commit its changes, or undo them, and run the "
    "gates again: make test && make readme-table"
)
#: Rows of the table, in this order: (backend, device) -> how its tests run.
SHOWN = {
    ("torch-cpu", "CPU"): "gloo; conformance suite on 1 to 4 ranks, `tests/torch`",
    ("mindspore", "CPU"): "mccl; conformance suite on 1 to 4 ranks, `tests/mindspore`",
    ("torch-npu", "simulated NPU"): (
        "the real torch_npu 2.14.0 on a [simulated CANN runtime](docs/simulated_npu.md); conformance suite on 1 to 4 "
        "ranks, `tests/torch`, `tests/npu`"
    ),
    ("torch-cuda", "fake GPU"): (
        "[fake tensors](docs/gates.md#torch-cuda-without-a-gpu) of device `cuda`, no data, no nccl: devices, shapes, "
        "dtypes, placements, collectives; `tests/fake_cuda`"
    ),
}
#: Rows that need hardware: (backend, device) -> how their tests would run.
ON_HARDWARE = {
    ("torch-cuda", "GPU"): "nccl, and gloo where ranks share a GPU; conformance suite, `tests/torch`, `tests/cuda`",
    ("torch-npu", "NPU"): "hccl; conformance suite, `tests/torch`, `tests/npu`",
    ("mindspore", "NPU"): "hccl; conformance suite, `tests/mindspore`",
}


def merge(last: list[Row], new: list[Row]) -> list[Row]:
    """Return the rows of ``last``, updated with those of ``new``. Only rows in `SHOWN` stay, in that order. Rows of
    other releases of torch come after them, the newest release first."""
    found = {(row.backend, row.device, row.torch): row for row in [*last, *new]}
    others = [row for row in found.values() if row.torch and (row.backend, row.device) in SHOWN]
    others.sort(key=lambda row: [int(number) for number in row.torch.split(".")], reverse=True)
    pinned = [found.get((backend, device, "")) for backend, device in SHOWN]
    return [row for row in pinned if row] + others


def refusal(row: Row, committed: str) -> str:
    """Return why the README cannot show a row of the last run, or an empty string.

    Args:
        row: row of the last run.
        committed: git's id of the committed ``hyper_parallel/``.
    """
    if row.verdict != "ok":
        return row.verdict
    if row.partial:
        return "only some of its tests were asked for"
    return f"{OTHER_CODE} ({row.commit})" if is_of_other_code(row, committed) else ""


def is_of_other_code(row: Row, committed: str) -> bool:
    """Return whether a row is of other code than the committed ``hyper_parallel/``, or of unknown code."""
    return not committed or row.tree != committed


def section(rows: list[Row], hardware: list[dict]) -> str:
    """Return the section of the README, without its markers.

    Args:
        rows: rows of ``ci/last_results.json``.
        hardware: reports in ``ci/hardware/``.
    """
    ran = {(row.backend, row.device): row for row in rows if not row.torch}
    lines = [
        "| backend | tests passed | coverage of core | tensor_parallel | its own code | last run |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for (backend, device), how in SHOWN.items():
        row = ran.get((backend, device))
        lines.append(_line(row, device, how) if row else _missing(backend, device, how, "not yet"))
    hardware = sorted(hardware, key=lambda report: report["row"]["date"])  # later ones replace earlier ones
    reports = {(report["backend"], report["device"]): report for report in hardware}
    for (backend, device), how in ON_HARDWARE.items():
        report = reports.get((backend, device))
        if report:
            row = results.from_dict(report["row"])
            lines.append(_line(row, f"{device}: {report['facts']['device name']}", how))
        else:
            lines.append(_missing(backend, device, how, "**no green run on hardware yet**"))
    return "\n".join(lines)


def _line(row: Row, device: str, how: str) -> str:
    skipped = f" ({row.skipped} skipped)" if row.skipped else ""
    areas = " | ".join(row.coverage(column).replace("%", " %") for column in results.AREAS)
    what = f"`{row.backend}` on {device}: {how}"
    return f"| {what} | {row.passed}{skipped} | {areas} | {row.date}, `{row.commit}` |"


def _missing(backend: str, device: str, how: str, word: str) -> str:
    return f"| `{backend}` on {device}: {how} | - | - | - | - | {word} |"


def releases(root: Path, rows: list[Row]) -> str:
    """Return the table of torch releases, without its markers: the pinned releases, and those of ``make test TORCH=``.

    Args:
        root: the project, for its pins.
        rows: rows of ``ci/last_results.json``.
    """
    lines = ["| backend | torch | passed | failed | skipped | run |", "|---|---|---:|---:|---:|---|"]
    tried = {row.backend for row in rows if row.torch}
    for row in sorted(rows, key=lambda row: row.backend):
        if row.backend in tried:
            torch = row.torch or _pinned(root, row.backend)
            command = f"make test PLATFORM={row.backend} TORCH={torch}" if row.torch else "make test"
            numbers = f"{row.passed} | {row.failed} | {row.skipped}"
            lines.append(f"| `{row.backend}` | {torch} | {numbers} | {row.date}, `{row.commit}`, `{command}` |")
    return "\n".join(lines)


def _pinned(root: Path, backend: str) -> str:
    """Return the release of torch that is pinned for the gate of a backend."""
    pins = (root / "platform" / backend / "requirements.txt").read_text(encoding="utf-8")
    return re.findall(r"^torch==([\d.]+)", pins, re.MULTILINE)[0]


def with_section(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """Return ``page`` with ``text`` between its markers.

    Raises:
        SystemExit: unless the page has each marker once.
    """
    if page.count(begin) != 1 or page.count(end) != 1:
        raise SystemExit(f"the page must have these lines once each:\n{begin}\n{end}")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def hardware_reports(root: Path) -> list[dict]:
    """Return the reports in ``ci/hardware/``."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((root / "ci" / "hardware").glob("*.json"))]


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    parser.add_argument("--check", action="store_true", help="only see whether the pages are as they must be")
    arguments = parser.parse_args(argv)
    root = arguments.root
    rows = results.read(root / LAST) if (root / LAST).exists() else []
    complaints: list[str] = []
    if not arguments.check:
        rows, complaints = _renewed(root, rows)
        results.write(root / LAST, rows)
    for path, text in _pages(root, rows).items():
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif text != path.read_text(encoding="utf-8"):
            complaints.append(f"{path.name} was edited between the markers of ci/table.py: make readme-table")
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return int(bool(complaints))


def _pages(root: Path, rows: list[Row]) -> dict[Path, str]:
    """Return the pages with tables of ``rows`` -> their new text."""
    readme, gates = root / "README.md", root / GATES
    pages = {readme: with_section(readme.read_text(encoding="utf-8"), section(rows, hardware_reports(root)))}
    if gates.exists():
        before = gates.read_text(encoding="utf-8")
        pages[gates] = with_section(before, releases(root, rows), BEGIN_RELEASES, END_RELEASES)
    return pages


def _renewed(root: Path, last: list[Row]) -> tuple[list[Row], list[str]]:
    """Return the rows of ``last`` updated with the last run of the gates, and the problems of that run."""
    committed = results.committed_tree(root)
    new = results.read(root / "build" / "gate" / "table.json")
    refused = {row.name: reason for row in new if (reason := refusal(row, committed))}
    rows = merge(last, [row for row in new if row.name not in refused])
    complaints = [f"{name} is not taken over: {reason}" for name, reason in refused.items()]
    others = [row for row in rows if not row.torch and is_of_other_code(row, committed)]
    complaints += [f"{row.name} stays in the table as it was: {OTHER_CODE} ({row.commit})" for row in others]
    if any(OTHER_CODE in complaint for complaint in complaints):
        complaints.append(REMEDY)
    return rows, complaints


if __name__ == "__main__":
    sys.exit(main())
