"""Products of the gates' results: the tables, the README's section, the reports of runs on hardware."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ci/results.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "ci")
    return importlib.import_module("results")


@pytest.fixture
def table(results: Any) -> Any:
    """`ci/table.py` as a module."""
    return importlib.import_module("table")


@pytest.fixture
def report(results: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ci/hardware/report.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "ci" / "hardware")
    return importlib.import_module("report")


def row(results: Any, backend: str = "torch-cpu", device: str = "CPU", **more: Any) -> Any:
    areas = [
        results.Area("hyper_parallel/core", 95, 99.96),
        results.Area("hyper_parallel/core/tensor_parallel", 100, 100),
        results.Area("hyper_parallel/platform/torch", 95, 97.25),
        results.Area("hyper_parallel/platform/*.py", 90, 90.5),
        results.Area("hyper_parallel/debug", 95, 95),
    ]
    more = {"passed": 12, "skipped": 1, "seconds": 61.4, "areas": areas, "commit": "abc", "date": "2026-11-21", **more}
    return results.Row(backend, device, **more)


TERMINAL = """\
backend          passed  failed  skipped   core  tensor parallel  own folder          at least  seconds  verdict
torch-cpu (CPU)      12       0        1  99.9%             100%       97.2%  95% / 100% / 95%       61  ok
unit                  5       0        0      -                -           -                 -        0  ok
mindspore (CPU)      12       0        1  99.9%             100%       97.2%  95% / 100% / 95%       61  FAIL: slow"""


def test_what_is_a_backends_own(results: Any) -> None:
    assert results.is_own("hyper_parallel/platform/torch")
    for shared in ("hyper_parallel/platform/contract", "hyper_parallel/platform/*.py", "hyper_parallel/core"):
        assert not results.is_own(shared)


def test_terminal(results: Any) -> None:
    rows = [row(results), results.Row("unit", passed=5), row(results, "mindspore", problem="slow")]
    assert results.terminal(rows) == TERMINAL


def test_markdown(results: Any) -> None:
    lines = results.markdown([row(results)]).splitlines()
    assert lines[0].startswith("| backend | passed | failed | skipped | core | tensor parallel | own folder |")
    assert lines[2] == "| torch-cpu (CPU) | 12 | 0 | 1 | 99.9% | 100% | 97.2% | 95% / 100% / 95% | 61 | ok |"


def test_json(results: Any, tmp_path: Path) -> None:
    """Reading returns the written rows; a missing file is explained."""
    rows = [row(results), results.Row("torch-npu", "simulated NPU", left_out="no gcc")]
    results.write(tmp_path / "folder" / "table.json", rows)
    assert results.read(tmp_path / "folder" / "table.json") == rows
    with pytest.raises(SystemExit, match="run the gates first"):
        results.read(tmp_path / "nothing.json")


def git(root: Path, *command: str) -> None:
    author = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, *command], cwd=root, check=True, capture_output=True)


def checkout(root: Path) -> Path:
    """A small repository with a package, committed."""
    (root / "hyper_parallel").mkdir()
    (root / "hyper_parallel" / "a.py").write_text("one = 1\n")
    (root / ".gitignore").write_text("build/\n*.tmp\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "begin")
    return root


def test_stamp(results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is no checkout has no commit; one that is has, and its package has an id."""
    monkeypatch.delenv("TORCH", raising=False)
    rows = [results.Row("unit"), results.Row("torch-cpu", "CPU"), results.Row("mindspore", "CPU")]
    results.stamp(tmp_path, rows)
    assert rows[0].commit == "unknown" and len(rows[0].date) == len("2026-11-21") and rows[0].tree == ""
    checkout(tmp_path)
    results.stamp(tmp_path, rows)
    assert len(rows[0].commit) == 10 and rows[0].tree == results.committed_tree(tmp_path) != ""
    assert [row.torch for row in rows] == ["", "", ""]
    results.stamp(tmp_path, rows, begun=rows[0].tree)
    assert rows[0].tree == results.committed_tree(tmp_path)
    results.stamp(tmp_path, rows, begun="f00")  # the code has changed while it ran
    assert rows[0].tree == ""
    monkeypatch.setenv("TORCH", "2.14.1")  # by make
    results.stamp(tmp_path, rows)
    assert [row.torch for row in rows] == ["", "2.14.1", ""]


def test_the_id_of_the_code(results: Any, tmp_path: Path) -> None:
    """The id is that of the files of the package in the folder, whether git has seen them or not."""
    root = checkout(tmp_path)
    package, committed = root / "hyper_parallel", results.committed_tree(root)
    (root / "README.md").write_text("outside of the package\n")
    (package / "ignored.tmp").write_text("")
    assert results.tree(root) == committed
    (package / "b.py").write_text("")  # new, and not added
    assert results.tree(root) not in (committed, "")
    (package / "b.py").unlink()
    (package / "a.py").write_text("one = 2\n")
    changed = results.tree(root)
    assert changed not in (committed, "") and results.committed_tree(root) == committed
    assert not subprocess.run(["git", "diff", "--cached", "--name-only"], cwd=root, check=True, stdout=-1).stdout
    git(root, "commit", "--quiet", "-a", "-m", "two")
    assert results.tree(root) == results.committed_tree(root) == changed


def readme_project(root: Path, results: Any, table: Any, rows: list) -> Path:
    """A repository with a README, and gates that have just run."""
    (checkout(root) / "README.md").write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    has_run(root, results, rows)
    return root


def has_run(root: Path, results: Any, rows: list) -> None:
    """The gates have given ``rows``, of the code that lies there unless they say which."""
    for row in rows:
        row.tree = row.tree or results.tree(root)
    results.write(root / "build" / "gate" / "table.json", rows)


def test_readme_section(results: Any, table: Any, tmp_path: Path) -> None:
    rows = [results.Row("unit", passed=3), row(results), row(results, "torch-cuda", "GPU")]
    root = readme_project(tmp_path, results, table, rows)
    assert table.main(["--root", str(root)]) == 0
    readme = (root / "README.md").read_text()
    assert readme.startswith(f"before\n{table.BEGIN}\n\n| backend |") and readme.endswith(f"\n\n{table.END}\nafter\n")
    assert "| 12 (1 skipped) | 99.9 % | 100 % | 97.2 % | 2026-11-21, `abc` |" in readme
    assert readme.count("not yet |") == 3 and readme.count("**no green run on hardware yet**") == 3
    assert "unit" not in readme
    assert table.main(["--root", str(root), "--check"]) == 0
    (root / "README.md").write_text(readme.replace("| 12 (1", "| 13 (1"))
    assert table.main(["--root", str(root), "--check"]) == 1


def test_failed_gates_stay_out_of_the_readme(
    results: Any, table: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The old row stays, other rows are taken over, and the command fails."""
    root = readme_project(tmp_path, results, table, [row(results, passed=7)])
    table.main(["--root", str(root)])
    has_run(root, results, [row(results, passed=8, problem="pytest exit 1"), row(results, "mindspore", passed=9)])
    assert table.main(["--root", str(root)]) == 1
    assert "torch-cpu (CPU) is not taken over: FAIL: pytest exit 1" in capsys.readouterr().err
    readme = (root / "README.md").read_text()
    assert "| 7 (1 skipped) |" in readme and "| 9 (1 skipped) |" in readme and "| 8 (1" not in readme


def test_rows_of_other_code_stay_out_of_the_readme(
    results: Any, table: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The committed package counts, not the name of the commit."""
    root = readme_project(tmp_path, results, table, [row(results, passed=7)])
    package = root / "hyper_parallel" / "a.py"
    package.write_text("one = 2\n")
    has_run(root, results, [row(results, passed=8, commit="abc+changes")])
    assert table.main(["--root", str(root)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "torch-cpu (CPU) is not taken over: the hyper_parallel/ that ran is not that of HEAD (abc+changes)"
    )
    assert said[1] == table.REMEDY and len(said) == 2
    assert "| 8 (1" not in (root / "README.md").read_text()
    # A run before the commit serves once it is committed.
    git(root, "commit", "--quiet", "-a", "-m", "two")
    assert table.main(["--root", str(root)]) == 0
    assert "| 8 (1 skipped) |" in (root / "README.md").read_text()
    # Going on, one backend runs again: the row of the other stays, and is named.
    package.write_text("one = 3\n")
    git(root, "commit", "--quiet", "-a", "-m", "three")
    has_run(root, results, [row(results, "mindspore", passed=9)])
    capsys.readouterr()
    assert table.main(["--root", str(root)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("torch-cpu (CPU) stays in the table as it was: the hyper_parallel/ that ran is not")
    assert said[1:] == [table.REMEDY]
    readme = (root / "README.md").read_text()
    assert "| 8 (1 skipped) |" in readme and "| 9 (1 skipped) |" in readme
    assert table.main(["--root", str(root), "--check"]) == 0
    has_run(root, results, [row(results, passed=10), row(results, "mindspore", passed=10)])
    assert table.main(["--root", str(root)]) == 0


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"partial": True}, "only some of its tests were asked for"),
        ({"partial": True, "torch": "2.14.1"}, "only some of its tests were asked for"),
        ({"left_out": "no gcc"}, "LEFT OUT: no gcc"),
        ({"tree": "f00"}, r"the hyper_parallel/ that ran is not that of HEAD \(abc\)"),
    ],
)
def test_rows_that_say_little(
    results: Any, table: Any, tmp_path: Path, capsys: pytest.CaptureFixture, more: dict, reason: str
) -> None:
    root = readme_project(tmp_path, results, table, [row(results, **more)])
    assert table.main(["--root", str(root)]) == 1
    assert re.match(rf"torch-cpu \(CPU\) is not taken over: {reason}\n", capsys.readouterr().err)
    assert results.read(root / "ci" / "last_results.json") == []


def test_other_releases_of_torch(results: Any, table: Any, tmp_path: Path) -> None:
    """Other releases have a table of their own, keep their places there, and do not come into the README."""
    root = readme_project(tmp_path, results, table, [row(results, passed=7)])
    for folder in ("docs", "platform/torch-cpu"):
        (root / folder).mkdir(parents=True)
    (root / "platform" / "torch-cpu" / "requirements.txt").write_text("# torch==1\ntorch==2.15.0\nnumpy\n")
    page = root / "docs" / "gates.md"
    page.write_text(f"{table.BEGIN_RELEASES}\n{table.END_RELEASES}\n")
    assert table.main(["--root", str(root)]) == 0
    for torch, passed in (("2.9.1", 8), ("2.14.1", 8), ("2.9.1", 9)):
        has_run(root, results, [results.Row("unit", passed=1), row(results, torch=torch, passed=passed)])
        assert table.main(["--root", str(root)]) == 0
    lines = [line for line in page.read_text().splitlines() if "torch-cpu" in line]
    assert lines == [
        "| `torch-cpu` | 2.15.0 | 7 | 0 | 1 | 2026-11-21, `abc`, `make test` |",
        "| `torch-cpu` | 2.14.1 | 8 | 0 | 1 | 2026-11-21, `abc`, `make test PLATFORM=torch-cpu TORCH=2.14.1` |",
        "| `torch-cpu` | 2.9.1 | 9 | 0 | 1 | 2026-11-21, `abc`, `make test PLATFORM=torch-cpu TORCH=2.9.1` |",
    ]
    assert "| 7 (1 skipped) |" in (root / "README.md").read_text()
    page.write_text(page.read_text().replace("| 9 |", "| 10 |"))
    assert table.main(["--root", str(root), "--check"]) == 1


def test_rows_without_git(results: Any, table: Any) -> None:
    """Rows are of other code where git does not know the code."""
    assert table.is_of_other_code(row(results), "") and table.is_of_other_code(row(results), "f00")
    assert not table.is_of_other_code(row(results, tree="f00"), "f00")


def test_readme_without_markers(table: Any) -> None:
    with pytest.raises(SystemExit, match="these lines once each"):
        table.with_section("no markers", "text")


def test_readme_of_this_project_is_as_it_was_made(table: Any) -> None:
    """docs/gates.md too: `make readme-table` writes both."""
    assert table.main(["--check"]) == 0


FACTS = {"device name": "NVIDIA H200 (made up)", "number of devices": 1, "driver": "1.2", "torch": "9", "nccl": "8.7"}


def test_hardware_report(results: Any, table: Any, report: Any, tmp_path: Path) -> None:
    """A made-up run on a GPU gives two files, and the README shows it."""
    root = readme_project(tmp_path, results, table, [row(results, "torch-cuda", "GPU", passed=345)])
    (root / "facts.json").write_text(json.dumps(FACTS))
    assert report.main(["torch-cuda", "--root", str(root), "--facts", str(root / "facts.json")]) == 0
    files = sorted(path.name for path in (root / "ci" / "hardware").iterdir())
    assert files == ["torch-cuda-nvidia-h200-made-up.json", "torch-cuda-nvidia-h200-made-up.md"]
    text = (root / "ci" / "hardware" / files[1]).read_text()
    for line in ("# torch-cuda on NVIDIA H200 (made up)", "* driver: 1.2", "* nccl: 8.7", "* commit: abc"):
        assert line in text.splitlines()
    assert f"* python: {sys.version.split()[0]}" in text and "| torch-cuda (GPU) | 345 | 0 | 1 | 99.9% |" in text
    table.main(["--root", str(root)])
    readme = (root / "README.md").read_text()
    assert "`torch-cuda` on GPU: NVIDIA H200 (made up): nccl" in readme
    assert readme.count("**no green run on hardware yet**") == 2


@pytest.mark.parametrize(
    ("device", "more", "facts", "message"),
    [
        ("fake GPU", {}, FACTS, r"torch-cuda \(fake GPU\) is no run on hardware"),
        ("GPU", {"partial": True}, FACTS, "only some of its tests were asked for"),
        ("GPU", {"problem": "pytest exit 1"}, FACTS, "did not pass, so it is not reported: FAIL: pytest exit 1"),
        ("GPU", {}, {"device name": "x"}, "facts are missing: number of devices, driver"),
    ],
)
def test_what_is_not_reported(
    results: Any, report: Any, device: str, more: dict, facts: dict, message: str, tmp_path: Path
) -> None:
    results.write(tmp_path / "build" / "gate" / "table.json", [row(results, "torch-cuda", device, **more)])
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    arguments = ["--root", str(tmp_path), "--facts", str(tmp_path / "facts.json")]
    with pytest.raises(SystemExit, match=message):
        report.main(["torch-cuda", *arguments])
    with pytest.raises(SystemExit, match="has no torch-npu: run ci/torch-npu first"):
        report.main(["torch-npu", *arguments])
    assert not (tmp_path / "ci").exists()


def test_asking_the_machine(results: Any, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts come from a process with the framework, and the driver from the vendor's tool, if there is one."""
    monkeypatch.setitem(report.PROBES, "torch-cuda", """print('noise'); print('{"device name": "made up"}')""")
    monkeypatch.setitem(
        report.DRIVERS, "GPU", ([sys.executable, "-c", "print('npu-smi 25.2.3 Version')"], r"smi (\S+)")
    )
    gpu = row(results, "torch-cuda", "GPU")
    assert report.ask(gpu) == {"driver": "25.2.3", "device name": "made up"}
    monkeypatch.setitem(report.DRIVERS, "GPU", (["no-such-tool"], r"(\S+)"))
    assert report.ask(gpu)["driver"] == "unknown: no-such-tool did not say"
    monkeypatch.setitem(report.PROBES, "torch-cuda", "raise SystemExit('no GPU')")
    with pytest.raises(SystemExit, match="cannot tell about the device of torch-cuda:\nno GPU"):
        report.ask(gpu)


def test_every_backend_has_a_probe(table: Any, report: Any) -> None:
    """A program for each backend that hardware is claimed for, and it is Python."""
    assert {backend for backend, _ in table.ON_HARDWARE} == set(report.PROBES)
    assert {device for _, device in table.ON_HARDWARE} == set(report.DRIVERS) == set(report.REAL)
    for backend, program in report.PROBES.items():
        compile(program, backend, "exec")
