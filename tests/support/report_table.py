"""The table of public reports in docs/wrong_gradients.md, made from runs.

    python -m tests.support.report_table

runs each program of `tests.torch.reports` on two ranks: with `torch.distributed.tensor`, in processes that do not
import HyperParallel, and with HyperParallel. It writes the outcomes into ``ci/last_reports.json`` and into the page.
``--page`` writes the page from the record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.torch.reports import REPORTS

__all__ = ["PAGE", "RECORD", "main", "outcomes", "with_table"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "wrong_gradients.md"
RECORD = ROOT / "ci" / "last_reports.json"
BEGIN = "<!-- made by python -m tests.support.report_table: do not edit -->\n"
END = "<!-- end of the table -->"
RANKS = 2
_LONGEST = 90


def outcomes(library: str) -> dict[str, Any]:
    """Run all programs with a library, ``"ours"`` or ``"theirs"``, and return what `report_runs` writes."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += ["-m", "tests.torch.report_runs", library, str(output)]
        environment = {"HYPER_PARALLEL_PLATFORM": "torch-cpu", "OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        return json.loads(output.read_text(encoding="utf-8"))


def _cell(outcome: str, error: str) -> str:
    """An outcome in a few words. Errors are called ``error``."""
    kind, _, text = outcome.partition(": ")
    if kind == "wrong":
        names = text.split(", ")
        gradients = [name for name in names if name.startswith("gradient of")]
        if len(gradients) > 1:
            names = [*(name for name in names if name not in gradients), f"{len(gradients)} gradients"]
        return f"wrong: {', '.join(names)}"
    if kind != "error":
        return kind
    text = text.partition(": ")[2].split(". ", maxsplit=1)[0].replace("|", "\\|").replace("<", "&lt;")
    return f"{error}: {text if len(text) <= _LONGEST else text[:_LONGEST].rpartition(' ')[0] + ' ...'}"


def _table(record: dict[str, Any]) -> str:
    lines = [
        f"| kind | public reports | torch {record['torch']} | here | remedy here |",
        "|---|---|---|---|---|",
    ]
    for report in REPORTS:
        theirs, ours = _cell(record["theirs"][report.kind], "error"), _cell(record["ours"][report.kind], "refused")
        lines.append(f"| {report.kind} | {report.threads} | {theirs} | {ours} | {report.remedy} |")
    count = sum(text.startswith("wrong") for text in record["theirs"].values())
    said = f"{len(REPORTS)} programs on {RANKS} ranks, of which {count} are wrong with torch without an error"
    lines += ["", f"{said} ({record['date']}, `{record['commit']}`)."]
    return "\n".join(lines)


def with_table(page: str, record: dict[str, Any]) -> str:
    """``page`` with the table of ``record`` between its markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{_table(record)}\n\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.report_table")
    parser.add_argument("--page", action="store_true", help="write the page from the record, and run nothing")
    arguments = parser.parse_args()
    if not arguments.page:
        sys.path.insert(0, str(ROOT / "ci"))
        import results

        written = [path.relative_to(ROOT).as_posix() for path in (RECORD, PAGE)]
        record: dict[str, Any] = {"date": results.today(), "commit": results.commit_of(ROOT, but=written)}
        for library in ("theirs", "ours"):
            found = outcomes(library)
            record["torch"], record[library] = found["torch"], found["outcomes"]
        RECORD.write_text(f"{json.dumps(record, indent=1, sort_keys=True)}\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    print(_table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
