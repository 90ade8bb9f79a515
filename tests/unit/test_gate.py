"""The gate itself: it fails when a test fails, when no test runs, and when an area is under its threshold."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

GATE = Path(__file__).parents[2] / "ci" / "gate.py"


def project(root: Path, least: int, conformance: str) -> Path:
    """A project of two areas with a backend called ``demo``; half of one area is reached by its tests."""
    files = {
        "pyproject.toml": """
            [tool.pytest.ini_options]
            pythonpath = ["."]
            [tool.coverage.run]
            branch = true
            parallel = true
            relative_files = true
            source_pkgs = ["hyper_parallel"]
            """,
        "hyper_parallel/__init__.py": "",
        "hyper_parallel/core/__init__.py": "",
        "hyper_parallel/core/sign.py": "def sign(x):\n    if x < 0:\n        return -1\n    return 1\n",
        "hyper_parallel/platform/__init__.py": "",
        "hyper_parallel/platform/demo.py": "NAME = 'demo'\n",
        "platform/demo/coverage.ini": f"""
            [run]
            relative_files = true
            [report]
            include =
                hyper_parallel/core/*
                hyper_parallel/platform/*
            [areas]
            hyper_parallel/core = {least}
            hyper_parallel/platform = 100
            """,
        "tests/unit/test_unit.py": "def test_unit():\n    import hyper_parallel.platform.demo\n",
        "tests/conformance/test_sign.py": conformance,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def run_gate(root: Path, *backends: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, str(GATE), "--root", str(root), *backends]
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ASCEND_HOME_PATH")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env={**kept, **variables})
    return done.returncode, done.stdout + done.stderr


PASSES = """
from hyper_parallel.core.sign import sign


def test_sign():
    assert sign(2) == 1
"""


@pytest.mark.parametrize(("least", "status"), [(60, 0), (70, 1)])
def test_thresholds(tmp_path: Path, least: int, status: int) -> None:
    """Of four lines and two branches, one each is not reached: 66.6 %."""
    found, output = run_gate(project(tmp_path, least, PASSES), "demo")
    assert found == status, output
    assert f"core 66.6% (at least {least}%)" in output
    assert "platform 100% (at least 100%)" in output
    assert ("FAIL: coverage of hyper_parallel/core" in output) == bool(status)
    assert "2 passed, 0 failed, 0 skipped" in output
    assert (tmp_path / "build" / "gate" / "demo" / "html" / "index.html").exists()


def test_failing_test(tmp_path: Path) -> None:
    found, output = run_gate(project(tmp_path, 10, PASSES.replace("== 1", "== 2")), "demo")
    assert found == 1
    assert "FAIL: pytest exit 1" in output
    assert "1 passed, 1 failed, 0 skipped" in output


def test_no_test(tmp_path: Path) -> None:
    found, output = run_gate(project(tmp_path, 10, "# nothing"), "demo")
    assert found == 1
    assert "FAIL: no test ran" in output


def test_unknown_backend(tmp_path: Path) -> None:
    found, output = run_gate(project(tmp_path, 10, PASSES), "other")
    assert found == 2
    assert "no such backend: other; there are demo" in output


SIMULATOR = """
import subprocess, sys

if sys.argv[1] == "check":
    sys.exit({check!r})
sys.exit(subprocess.run(sys.argv[2:], env=dict(__import__("os").environ, SIMULATED="yes")).returncode)
"""
ON_SIMULATOR = """
import os


def test_simulated():
    assert os.environ["SIMULATED"] == "yes"
"""


def project_with_simulator(root: Path, check: int | str) -> Path:
    """The backend is called torch-npu; its simulator answers ``check`` when it is asked whether it can run."""
    project(root, 10, PASSES)
    (root / "platform" / "demo").rename(root / "platform" / "torch-npu")
    (root / "tests" / "simulated_npu.py").write_text(SIMULATOR.format(check=check))
    (root / "tests" / "npu").mkdir()
    (root / "tests" / "npu" / "test_simulated.py").write_text(ON_SIMULATOR)
    return root


def test_simulated_device(tmp_path: Path) -> None:
    """Tests of a backend with a simulator run below it, with the interpreter that was given."""
    found, output = run_gate(project_with_simulator(tmp_path, 0), f"torch-npu={sys.executable}", CI="yes")
    assert found == 0, output
    assert "3 passed, 0 failed, 0 skipped" in output


@pytest.mark.parametrize("variables", [{}, {"CI": "yes"}])
def test_simulator_that_cannot_run(tmp_path: Path, variables: dict[str, str]) -> None:
    """The table says why; in CI that is a failure."""
    found, output = run_gate(project_with_simulator(tmp_path, "gcc not found"), "torch-npu", **variables)
    assert found == (1 if variables else 0), output
    assert ("FAIL: gcc not found" if variables else "LEFT OUT: gcc not found") in output


def test_environment_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("gate", GATE)
    assert spec is not None and spec.loader is not None
    gate = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    spec.loader.exec_module(gate)
    wanted = "its environment could not be made: there is no /nowhere/python"
    assert gate.why_not(tmp_path, "torch-npu", "/nowhere/python") == wanted
    assert gate.why_not(tmp_path, "torch-cpu", "/nowhere/python") == ""
