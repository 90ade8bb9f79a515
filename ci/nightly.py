"""Run everything: the gate with its nightly tests, and the tables that take too long for the gate.

    python ci/nightly.py torch-cpu mindspore torch-cuda torch-npu=.venv/torch-npu/bin/python [--more 100] [--seed 1]

The parts are those of `ci/gate.py`, with ``HYPER_PARALLEL_NIGHTLY`` set, so that no test is left out. The full
conformance suite runs without `Platform.fast` too. `TABLES` are further parts. Each part that ends, passed or failed,
is recorded in ``ci/last_nightly.json`` at once, and shown on docs/gates.md. So an interrupted run keeps its parts, and
``--parts`` runs the missing ones. Logs and reports are in ``build/nightly``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gate
import nightly_table
import results
from gate import Work
from reporter import Part, Reporter
from results import Row
from suite import Tests

__all__ = ["TABLES", "VARIABLE", "Recorder", "table_row"]

#: Environment variable of `hyper_parallel.testing.extent`.
VARIABLE = "HYPER_PARALLEL_NIGHTLY"
BUILD = Path("build") / "nightly"
#: Time limit in seconds of one pytest process, or of one table.
TIMEOUT = 6 * 60 * 60
#: Part -> its backend, and the options of `ci/long_rows.py`.
TABLES: dict[str, tuple[str, list[str]]] = {
    "torch-cpu-rows": ("torch-cpu", []),
    "mindspore-rows": ("mindspore", []),
    "torch-cpu-compiled-rows": ("torch-cpu", ["--compiled"]),
}


class Recorder:
    """Writer of the record of a run.

    Args:
        tests: settings of the run.
    """

    def __init__(self, tests: Tests) -> None:
        self._tests = tests
        self._lock = threading.Lock()
        # Taken at the start, without the record and the page: this run changes them, and so did an interrupted one.
        written = [path.as_posix() for path in (nightly_table.RECORD, nightly_table.PAGE)]
        self._commit, self._date = results.commit_of(tests.root, but=written), results.today()
        #: Part -> the results of its table.
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, row: Row) -> None:
        """Record a part that has ended. A part that was left out or interrupted keeps the record of its last run."""
        row.commit, row.date = self._commit, self._date
        if not row.left_out and not self._tests.stopped:
            with self._lock:
                record = nightly_table.entry(row, self.rows.get(row.backend))
                nightly_table.add(self._tests.root, row.backend, record)


def table_row(tests: Tests, name: str, python: str, options: list[str], recorder: Recorder, part: Part) -> Row:
    """Run one of `TABLES` and return its row; each row of the table counts as a test."""
    backend = TABLES[name][0]
    row = Row(name, gate.device_of(backend, [python], False))
    output = tests.build / name
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    events, report = output / "rows.events", output / "rows.json"
    command = [python, "-m", "ci.long_rows", backend, *options, "--progress", str(events), "--report", str(report)]
    part.say(f"== {row.name}: {' '.join(command[1:])}")
    part.watch([events])
    started = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=tests.root,
            env=tests.environment({}),
            timeout=tests.timeout,
            check=False,
            stdout=part.log,
            stderr=subprocess.STDOUT,
        )
        row.problem = f"exit {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        row.problem = f"over {tests.timeout} s"
    row.seconds = time.monotonic() - started
    if report.exists():
        found = json.loads(report.read_text(encoding="utf-8"))
        row.failed_tests = dict.fromkeys(found.pop("failed"), "")
        row.failed = len(row.failed_tests)
        row.passed = found["rows"] - row.failed
        recorder.rows[name] = found
    else:
        row.problem = row.problem or "it wrote no report"
    return row


def tables_of(tests: Tests, backends: Mapping[str, str], drawn: list[str], recorder: Recorder) -> dict[str, Work]:
    """Return the parts of `TABLES` for ``backends``; ``drawn`` are options for random rows."""
    return {
        name: partial(table_row, tests, name, backends[backend], options or drawn, recorder)
        for name, (backend, options) in TABLES.items()
        if backend in backends
    }


def main() -> int:
    """Run the command and return the exit status."""
    parser = gate.options(__doc__.splitlines()[0])
    parser.add_argument("--more", type=int, default=100, metavar="N", help="how many rows at random a table has")
    parser.add_argument("--seed", type=int, help="of the rows at random; the day's by default")
    parser.add_argument(
        "--parts", nargs="+", metavar="PART", help=("run these alone, and the parts that their coverage needs")
    )
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    backends, known = gate.backends_of(parser, arguments)
    tests = Tests(root, arguments.processes, build=BUILD, variables={VARIABLE: "yes"}, timeout=TIMEOUT)
    recorder = Recorder(tests)
    drawn = ["--more", str(arguments.more), *(["--seed", str(arguments.seed)] if arguments.seed is not None else [])]
    tables = tables_of(tests, backends, drawn, recorder)
    there = ["unit", *backends, *([gate.WITHOUT_FAST] if gate.TWICE in backends else []), *tables]
    only = arguments.parts
    if only is not None:
        if unknown := sorted(set(only) - set(there)):
            parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(there)}")
        only = {*only, *(["unit"] if set(only) & set(backends) else [])}
    with Reporter() as reporter:
        rows = gate.run_parts(
            tests,
            backends,
            arguments.at_once,
            reporter,
            only=only,
            more=tables,
            ended=recorder.add,
            nightly=True,
        )
        reporter.besides = "looking for errors that no test came to"
        missed = gate.missed_errors(tests, rows, whole=only is None and set(backends) == set(known))
    results.write(tests.build / "table.json", rows)
    return gate.finish(tests, rows, missed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped")
