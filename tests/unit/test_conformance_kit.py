"""The conformance kit without a framework: its refusals, its reports, and that the gates run the same checks."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from hyper_parallel.platform import registry
from hyper_parallel.testing import adapters
from hyper_parallel.testing.adapters.protocol import missing_names
from hyper_parallel.testing.conformance import __main__ as kit
from hyper_parallel.testing.conformance.report import Failure, Report

ROOT = Path(__file__).resolve().parents[2]


class Misnamed:
    """The least of a backend that its registration accepts."""

    name = "another-name"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        return None


class Named(Misnamed):
    name = "a-name"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the kit sets is gone after the test; there is one backend, of no framework."""
    for name in (adapters.ENVIRONMENT_VARIABLE, "HYPER_PARALLEL_PLATFORM", "OMP_NUM_THREADS", "GLOG_v"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(registry, "_entry_points_read", True)
    monkeypatch.setattr(registry, "_backends", {"b": registry._Backend("b", Named, None)})
    monkeypatch.setattr(registry, "_aliases", {})


def test_gates_collect_every_file_of_checks() -> None:
    checks = {path.name for path in (ROOT / "hyper_parallel/testing/conformance").glob("test_*.py")}
    assert len(checks) > 10
    for name in sorted(checks):
        module = f"hyper_parallel.testing.conformance.{name.removesuffix('.py')}"
        assert f"from {module} import *" in (ROOT / "tests/conformance" / name).read_text(), name


def test_without_pytest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert kit.main(["torch-cpu"]) == 2
    assert "pytest, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(("framework", "wanted"), [("torch", "gloo"), ("other", "own")])
def test_report_says_what_groups_run_on(framework: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share a GPU run on gloo: the report must not say nccl."""
    backend = types.SimpleNamespace(comm_backend="own", Tensor=type("Tensor", (), {"__module__": framework}))
    monkeypatch.delenv("HYPER_PARALLEL_TORCH_BACKEND", raising=False)
    assert kit.comm_backend_of(backend) == "own"  # type: ignore[arg-type]
    monkeypatch.setenv("HYPER_PARALLEL_TORCH_BACKEND", "Gloo")
    assert kit.comm_backend_of(backend) == wanted  # type: ignore[arg-type]


def test_unknown_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert kit.main(["no-such-backend"]) == 2
    error = capsys.readouterr().err
    assert "unknown platform: 'no-such-backend'" in error
    assert "  b: available" in error


def test_backend_under_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    registry.register_platform("a-name", Misnamed)  # type: ignore[arg-type]
    assert kit.main(["a-name"]) == 2
    assert "'a-name' is Misnamed, whose attribute `name` is 'another-name'" in capsys.readouterr().err


def test_backend_whose_adapter_is_not_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.register_platform("a-name", Named)  # type: ignore[arg-type]
    assert kit.main(["a-name"]) == 2
    assert "the backend 'a-name' has no adapter" in capsys.readouterr().err
    assert kit.main(["a-name", "--adapter", "no_such_module"]) == 2
    assert "the adapter 'no_such_module' cannot be imported" in capsys.readouterr().err
    adapter = types.ModuleType("half_an_adapter")
    for name in missing_names(adapter):
        if name not in ("tensor", "COMBINATIONS"):
            setattr(adapter, name, None)
    monkeypatch.setitem(sys.modules, "half_an_adapter", adapter)
    assert kit.main(["a-name", "--adapter", "half_an_adapter"]) == 2
    assert "the adapter 'half_an_adapter' lacks COMBINATIONS, tensor;" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--world-sizes", "2,x"], ["--world-sizes", "5"], ["--report", "report.txt"]], ids=str
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kit.main(["torch-cpu", *arguments])
    assert repr(arguments[1]) in capsys.readouterr().err


def report_of(*counts: tuple[str, int, int, int]) -> Report:
    report = Report("b", "cpu", "gloo", "some.adapter", {"Python": "3"}, [1, 2, 3, 4], True)
    for name, passed, failed, skipped in counts:
        group = report.group(name)
        group.passed, group.failed, group.skipped = passed, failed, skipped
    return report


def test_verdicts() -> None:
    assert report_of(("styles", 3, 0, 1)).verdict == "b conforms"
    some = report_of(("styles", 3, 0, 0))
    some.complete = False
    assert some.ok and some.verdict == "b passes the checks that were asked for; not all were"
    failed = report_of(("styles", 3, 1, 0), ("ops", 2, 0, 0))
    assert not failed.ok and failed.verdict == "b does not conform: 1 of 6 checks failed"
    for nothing in (report_of(), report_of(("styles", 0, 0, 7))):
        assert not nothing.ok and nothing.verdict == "b was not checked: no check ran"


def test_forms_of_a_report(tmp_path: Path) -> None:
    report = report_of(("styles", 3, 1, 2), ("ops", 2, 0, 0))
    report.failures.append(Failure("test_styles.py::test_mlp[2]", "E  off by 1"))
    report.skip_reasons["4 ranks were not asked for"] = 2
    lines = report.to_text().splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["ops", "2", "0", "0"],
        ["styles", "3", "1", "2"],
        ["total", "5", "1", "2"],
    ]
    for name in ("reports/r.md", "reports/r.json"):
        report.write(tmp_path / name)
    content = json.loads((tmp_path / "reports/r.json").read_text())
    assert content["totals"] == {"passed": 5, "failed": 1, "skipped": 2}
    assert content["groups"][1] == {"name": "styles", "passed": 3, "failed": 1, "skipped": 2}
    assert content["failures"] == [{"check": "test_styles.py::test_mlp[2]", "message": "E  off by 1"}]
    markdown = (tmp_path / "reports/r.md").read_text()
    assert "| styles | 3 | 1 | 2 |\n| total | 5 | 1 | 2 |" in markdown
    assert "## test_styles.py::test_mlp[2]\n\n`````\nE  off by 1\n`````" in markdown
    assert "* 2: 4 ranks were not asked for" in markdown
