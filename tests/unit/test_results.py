"""What is made of the gates' results: the tables, the README's section, the reports of runs on hardware."""

from __future__ import annotations

import importlib
import json
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
    """What is read is what was written; a file that is not there is explained."""
    rows = [row(results), results.Row("torch-npu", "simulated NPU", left_out="no gcc")]
    results.write(tmp_path / "folder" / "table.json", rows)
    assert results.read(tmp_path / "folder" / "table.json") == rows
    with pytest.raises(SystemExit, match="run the gates first"):
        results.read(tmp_path / "nothing.json")


def test_stamp(results: Any, tmp_path: Path) -> None:
    """A folder that is no checkout has no commit; this one has."""
    rows = [results.Row("unit")]
    results.stamp(tmp_path, rows)
    assert rows[0].commit == "unknown" and len(rows[0].date) == len("2026-11-21")


def readme_project(root: Path, results: Any, table: Any, rows: list) -> Path:
    """A project with a README, and gates that have just run."""
    (root / "README.md").write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    results.write(root / "build" / "gate" / "table.json", rows)
    return root


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
    """What was there stays, other rows are taken over, and the command fails."""
    root = readme_project(tmp_path, results, table, [row(results, passed=7)])
    table.main(["--root", str(root)])
    new = [row(results, passed=8, problem="pytest exit 1"), row(results, "mindspore", passed=9)]
    results.write(root / "build" / "gate" / "table.json", new)
    assert table.main(["--root", str(root)]) == 1
    assert "torch-cpu (CPU) is not taken over: FAIL: pytest exit 1" in capsys.readouterr().err
    readme = (root / "README.md").read_text()
    assert "| 7 (1 skipped) |" in readme and "| 9 (1 skipped) |" in readme and "| 8 (1" not in readme


def test_readme_without_markers(table: Any) -> None:
    with pytest.raises(SystemExit, match="these lines once each"):
        table.with_section("no markers", "text")


def test_readme_of_this_project_is_as_it_was_made(table: Any) -> None:
    """Nobody edits it by hand: `make readme-table` writes it."""
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
