"""The nightly run: everything runs, each part is recorded when it ends, and docs/gates.md shows the record."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.testing import extent
from tests.unit.test_gate import PASSES, project

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nightly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ci/nightly.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "ci")
    return importlib.import_module("nightly")


@pytest.fixture
def table(nightly: Any) -> Any:
    """`ci/nightly_table.py` as a module."""
    return importlib.import_module("nightly_table")


def with_page(root: Path, table: Any) -> Path:
    """A project with a page that has the markers."""
    (root / "docs").mkdir(parents=True)
    (root / "ci").mkdir(exist_ok=True)
    (root / table.PAGE).write_text(f"before\n{table.BEGIN}\n{table.END}\nafter\n")
    return root


RUN = {
    "device": "CPU",
    "passed": 3,
    "failed": 0,
    "skipped": 1,
    "seconds": 7,
    "commit": "abc",
    "date": "2026-11-21",
    "problem": "",
    "failed tests": [],
}


def test_the_page_of_this_project_is_as_it_was_made(table: Any) -> None:
    """`make nightly` and `make readme-table` write the table: edits by hand would be lost."""
    assert table.main(["--check"]) == 0


def test_the_table(table: Any, tmp_path: Path) -> None:
    """Parts that have not run are named, failed tests are listed, and the rest of the page stays."""
    root = with_page(tmp_path, table)
    table.add(root, "torch-cpu", RUN)
    table.add(root, "unit", {**RUN, "device": "", "failed": 1, "problem": "pytest exit 1", "failed tests": ["t::a"]})
    table.add(root, "mindspore-rows", {**RUN, "rows": 3, "at random": 2, "seed": 5})
    assert list(table.read(root)) == ["unit", "torch-cpu", "mindspore-rows"]
    page = (root / table.PAGE).read_text()
    assert page.startswith(f"before\n{table.BEGIN}\n\n| part |") and page.endswith(f"\n\n{table.END}\nafter\n")
    assert "| `unit` | `tests/unit` | 3 | 1 | 1 | 7 | 2026-11-21, `abc` | **pytest exit 1** |\n" in page
    assert "| `torch-cpu` (CPU) | conformance suite, `tests/torch` | 3 | 0 | 1 | 7 | 2026-11-21, `abc` | ok |" in page
    assert ", 2 at random of seed 5 | 3 |" in page and page.count("| not yet | |") == len(table.PARTS) - 3
    assert "\nFailed:\n\n- `unit`: `t::a`\n" in page
    assert table.main(["--root", str(root), "--check"]) == 0
    (root / table.PAGE).write_text(page.replace("t::a", "t::b"))
    assert table.main(["--root", str(root), "--check"]) == 1
    assert table.main(["--root", str(root)]) == 0 and (root / table.PAGE).read_text() == page
    with pytest.raises(SystemExit, match="these lines once each"):
        table.with_section("no markers", "text")


def test_names(nightly: Any, table: Any) -> None:
    """Every part of `make nightly` is in the table of the page, and each table of rows knows its backend."""
    long_rows = importlib.import_module("ci.long_rows")
    assert nightly.VARIABLE == extent.VARIABLE
    backends = {path.parent.name for path in ROOT.glob("platform/*/requirements.txt")}
    assert {"unit", *backends, nightly.gate.WITHOUT_FAST, *nightly.TABLES} == set(table.PARTS)
    plain = {backend for backend, options in nightly.TABLES.values() if not options}
    compiled = {backend for backend, options in nightly.TABLES.values() if options == ["--compiled"]}
    assert plain == set(long_rows.ROWS) and compiled == set(long_rows.COMPILED)


FAILS_AT_NIGHT = PASSES.replace(
    "    assert", "    import os\n\n    assert os.environ.get('HYPER_PARALLEL_NIGHTLY') != 'yes'\n    assert"
)


def run_nightly(root: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "ci" / "nightly.py"), "--root", str(root), *words]
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", extent.VARIABLE)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=kept)
    return done.returncode, done.stdout + done.stderr


def test_every_part_is_recorded(table: Any, tmp_path: Path) -> None:
    """Failed parts are recorded too, with the names of their tests; a part alone leaves the record of the others."""
    root = with_page(project(tmp_path, 10, FAILS_AT_NIGHT), table)
    found, output = run_nightly(root, "demo")
    assert found == 1 and "2 passed" not in output and "1 passed, 1 failed, 0 skipped" in output, output
    known = table.read(root)
    assert list(known) == ["unit", "demo"]
    changed = {"device": "", "passed": 1, "skipped": 0, "commit": "unknown"}
    assert {**known["unit"], "seconds": 7, "date": RUN["date"]} == {**RUN, **changed}
    assert known["demo"]["failed tests"] == ["tests/conformance/test_sign.py::test_sign"]
    assert known["demo"]["problem"] == "pytest exit 1"
    assert "- `demo`: `tests/conformance/test_sign.py::test_sign`" in (root / table.PAGE).read_text()
    assert not (root / "build" / "gate").exists() and (root / "build" / "nightly" / "table.json").exists()
    found, output = run_nightly(root, "demo", "--parts", "unit")
    assert found == 0 and "1 passed, 0 failed" in output and list(table.read(root)) == ["unit", "demo"], output
    found, output = run_nightly(root, "demo", "--parts", "other")
    assert found == 2 and "no such part: other; there are unit, demo" in output


def test_what_is_not_recorded(nightly: Any, table: Any, tmp_path: Path) -> None:
    """Parts that were left out or interrupted keep the record of their last run."""
    tests = nightly.Tests(with_page(tmp_path, table))
    recorder = nightly.Recorder(tests)
    recorder.add(nightly.Row("torch-npu", left_out="no gcc"))
    tests.stopped = True
    recorder.add(nightly.Row("torch-cpu", passed=3))
    assert table.read(tmp_path) == {}
    tests.stopped = False
    recorder.add(nightly.Row("torch-cpu", passed=3))
    assert table.read(tmp_path)["torch-cpu"]["passed"] == 3


LONG_ROWS = """
import json
import sys

from ci.progress import Events

backend, more, number, _, progress, _, report = sys.argv[1:]
assert (backend, more, number) == ("torch-cpu", "--more", "7")
events = Events(progress)
events.add(collected=2)
events.add(failed="b", text="why b failed")
events.add(finished="b", outcome="failed")
with open(report, "w") as file:
    json.dump({"rows": 2, "at random": 7, "seed": 4, "failed": ["b"]}, file)
sys.exit(1)
"""


def test_tables(nightly: Any, table: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each row counts as a test; a table that breaks down has failed."""
    root = with_page(project(tmp_path, 10, PASSES), table)
    tests = nightly.Tests(root, build=nightly.BUILD)
    recorder = nightly.Recorder(tests)
    work = nightly.tables_of(tests, {"torch-cpu": sys.executable}, ["--more", "7"], recorder)
    assert list(work) == ["torch-cpu-rows", "torch-cpu-compiled-rows"]
    program = root / "ci" / "long_rows.py"
    program.write_text(LONG_ROWS)
    with (tmp_path / "log").open("w") as log:
        part = nightly.Part("torch-cpu-rows", log)
        row = work["torch-cpu-rows"](part)
        part.look()
    assert part.progress == "torch-cpu-rows 1 of 2, 1 failed" and "why b failed" in capsys.readouterr().out
    assert (row.passed, row.failed, row.failed_tests, row.problem) == (1, 1, {"b": ""}, "exit 1")
    recorder.add(row)
    wanted = {"rows": 2, "at random": 7, "seed": 4, "failed tests": ["b"]}
    assert json.loads((root / table.RECORD).read_text())["torch-cpu-rows"].items() >= wanted.items()
    program.write_text("")
    with (tmp_path / "log").open("w") as log:
        row = work["torch-cpu-rows"](nightly.Part("torch-cpu-rows", log))
    assert row.problem == "it wrote no report"
