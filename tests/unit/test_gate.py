"""The gate itself. It fails when a test fails, when none runs or the report is missing. It also fails when an area is
under its threshold, and when there is no threshold."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.testing.extent import in_gate

ROOT = Path(__file__).parents[2]
GATE = ROOT / "ci" / "gate.py"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ci/gate.py` as a module."""
    monkeypatch.syspath_prepend(GATE.parent)
    return importlib.import_module("gate")


def part_of(gate: Any) -> Any:
    """A part of the gate with its output stream, here all of it to the terminal."""
    return gate.Part("demo", sys.stdout)


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
    (root / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "progress.py", root / "ci")  # pytest loads it as a plugin
    return root


def run_gate(root: Path, *backends: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, str(GATE), "--root", str(root), *backends]
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ASCEND_HOME_PATH")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env={**kept, **variables})
    return done.returncode, done.stdout + done.stderr


def row_of(name: str, output: str) -> str:
    """The row of the table, its cells divided by one space, with a word for the seconds."""
    line = next(line for line in output.splitlines() if line.startswith(name + " "))
    numbers, verdict = re.fullmatch(r"(.*?)  \d+  (ok|FAIL.*|LEFT OUT.*)", line[len(name) :]).groups()  # type: ignore[union-attr]
    return " ".join(f"{numbers} SECONDS {verdict}".split())


PASSES = """
from hyper_parallel.core.sign import sign


def test_sign():
    assert sign(2) == 1
"""


@pytest.mark.parametrize(("least", "status"), [pytest.param(60, 0, marks=pytest.mark.nightly), (70, 1)])
def test_thresholds(tmp_path: Path, least: int, status: int) -> None:
    """The tests do not reach one of four lines and one of two branches: 66.6 %."""
    found, output = run_gate(project(tmp_path, least, PASSES), "demo")
    assert found == status, output
    verdict = "FAIL: coverage of hyper_parallel/core" if status else "ok"
    assert row_of("demo (CPU)", output) == f"1 0 0 66.6% - 100% {least}% / - / 100% SECONDS {verdict}"
    assert "2 passed, 0 failed, 0 skipped" in output
    build = tmp_path / "build" / "gate"
    assert (build / "demo" / "html" / "index.html").exists() == bool(status)
    log = (build / "logs" / "demo.txt").read_text()
    report = re.search(r"== demo \(CPU\): coverage\n.*\nTOTAL .*$", log, re.DOTALL | re.MULTILINE)
    assert (report is not None and report[0] in output) == bool(status), output
    assert "1 passed in" in log and "1 passed in" not in output
    rows = {row["backend"]: row for row in json.loads((build / "table.json").read_text())["rows"]}
    assert rows["demo"]["areas"][0] == {"path": "hyper_parallel/core", "least": least, "reached": 200 / 3}
    assert bool(rows["demo"]["problem"]) == bool(status) and rows["demo"]["date"]
    assert f"| demo (CPU) | 1 | 0 | 0 | 66.6% | - | 100% | {least}% / - / 100% |" in (build / "table.md").read_text()


def asks(root: Path, status: int) -> None:
    """Give a project a `ci/raises.py` that ends with ``status``, and wants to be asked after the tests."""
    asked = "import pathlib, sys\nassert pathlib.Path(sys.argv[1], 'demo', 'combined').is_dir()\n"
    (root / "ci" / "raises.py").write_text(f"{asked}print('asked')\nsys.exit({status})\n")


@pytest.mark.parametrize("status", in_gate([0, 1], [1]))
def test_errors_that_no_test_came_to(tmp_path: Path, status: int) -> None:
    """The gate asks `ci/raises.py` after all backends, and fails as it does; after some of them it does not ask."""
    root = project(tmp_path, 60, PASSES)
    asks(root, status)
    found, output = run_gate(root, "demo")
    assert found == status and "asked" in output, output
    said = "\nFAIL: the library raises errors that no test came to. They are listed above the table"
    assert (said in output) == bool(status) and "the failed tests may reach them" not in output
    (root / "platform" / "other").mkdir()
    found, output = run_gate(root, "demo")
    assert found == 0 and "asked" not in output and said not in output, output


@pytest.mark.nightly
def test_errors_that_tests_which_fail_do_not_come_to(tmp_path: Path) -> None:
    root = project(tmp_path, 60, PASSES + "    assert sign(-2) == 1\n")
    root.joinpath("tests", "conformance", "test_other.py").write_text("def test_other():\n    pass\n")
    asks(root, 1)
    found, output = run_gate(root, "demo")
    assert found == 1 and "say in ci/raises.py why it has to stay; the failed tests may reach them" in output, output


def test_errors_after_a_backend_without_tests(gate: Any, tmp_path: Path) -> None:
    """The errors of a backend that did not run are unknown, for whatever reason it did not run."""
    root = project(tmp_path, 60, PASSES)
    asks(root, 1)
    row = gate.Row
    for other in (row("other", left_out="no device"), row("other", problem="no environment", failed=1)):
        assert not gate.missed_errors(gate.Tests(root), [row("demo", passed=2), other], whole=True)


@pytest.mark.parametrize(
    "areas",
    [
        None,
        "",
        "[areas]",
        "[areas]\nhyper_parallel/core = 95",
        "[areas]\nhyper_parallel/core = 95\nhyper_parallel/platform/*.py = 95",
        "[areas]\nhyper_parallel/core = 95\nhyper_parallel/platform = 0",
    ],
    ids=["no file", "no areas", "empty areas", "none of its own", "only areas that all share", "no threshold"],
)
def test_no_threshold(gate: Any, tmp_path: Path, areas: str | None) -> None:
    """A backend whose own code has no threshold fails, rather than pass unmeasured."""
    root = project(tmp_path, 10, PASSES)
    config = root / "platform" / "demo" / "coverage.ini"
    if areas is None:
        config.unlink()
    else:
        config.write_text(config.read_text().split("[areas]")[0] + areas)
    row = gate.gate(gate.Tests(root), "demo", sys.executable, None, part_of(gate))
    assert row.verdict == "FAIL: platform/demo/coverage.ini asks for no coverage of the backend's own code"


def test_reached(gate: Any) -> None:
    """An area is a folder or a file; another whose name begins the same is none of it. Nothing measured is nothing."""

    def file(covered: int, statements: int) -> dict:
        counts = {"covered_lines": covered, "num_statements": statements, "covered_branches": 1, "num_branches": 2}
        return {"summary": counts}

    files = {"p/torch/cuda.py": file(8, 8), "p/torch/cuda_other.py": file(0, 8), "p/torch_other/cpu.py": file(0, 5)}
    assert gate.areas.reached(files, "p/torch/cuda.py") == 90
    assert gate.areas.reached(files, "p/torch") == 50
    assert gate.areas.reached(files, "p/torch/*.py") == 50
    assert gate.areas.reached({**files, "p/base.py": file(8, 8)}, "p/*.py") == 90
    assert gate.areas.reached(files, "p/moved") == gate.areas.reached({}, "p/torch") == 0


@pytest.mark.nightly
def test_the_conformance_suite_without_short_ways(gate: Any, tmp_path: Path) -> None:
    """A row of its own runs some files with the environment variable set; the nightly run has all files there."""
    conformance = "import os\n\n\ndef test_short_ways():\n    assert os.environ.get('HYPER_PARALLEL_FAST') != '0'\n"
    root = project(tmp_path, 60, conformance)
    for name in gate.WITHOUT_FAST_FILES:
        assert (ROOT / "tests" / "conformance" / name).exists()
        (root / "tests" / "conformance" / name).touch()
    (root / "tests" / "conformance" / gate.WITHOUT_FAST_FILES[-1]).write_text(conformance)
    assert gate.without_fast_places(nightly=True) == ["tests/conformance"]
    (root / "platform" / "demo").rename(root / "platform" / gate.TWICE)
    (root / "hyper_parallel" / "platform" / "demo.py").rename(root / "hyper_parallel" / "platform" / "torch.py")
    found, output = run_gate(root, gate.TWICE)
    assert found == 1, output
    assert row_of(f"{gate.WITHOUT_FAST} (CPU)", output) == "0 1 0 - - - - SECONDS FAIL: pytest exit 1"


def test_failing_test(tmp_path: Path) -> None:
    found, output = run_gate(project(tmp_path, 10, PASSES.replace("== 1", "== 2")), "demo")
    assert found == 1
    assert "FAIL: pytest exit 1" in output
    assert "1 passed, 1 failed, 0 skipped" in output


@pytest.mark.nightly
def test_several_processes(tmp_path: Path) -> None:
    """The files are shared out, and the coverage and failures of all of them count together."""
    root = project(tmp_path, 60, PASSES)
    for name, line in (("negative", "    assert sign(-2) == -1\n"), ("wrong", "    assert sign(2) == 2\n")):
        text = PASSES.replace("def test_sign", f"def test_{name}") + line
        (root / "tests" / "conformance" / f"test_{name}.py").write_text(text)
    found, output = run_gate(root, "--processes=2", "demo")
    assert found == 1 and "assert sign(2) == 2" in output, output
    assert row_of("demo (CPU)", output) == "2 1 0 100% - 100% 60% / - / 100% SECONDS FAIL: pytest exit 1"
    assert len(list((root / "build" / "gate" / "demo").glob("junit-*.xml"))) == 2


@pytest.mark.parametrize(
    ("cores", "processes"), [(1, 1), (2, 1), (3, 1), (4, 1), (6, 2), (8, 3), (16, 6), (24, 8), (192, 8)]
)
def test_processes_by_cores(gate: Any, cores: int, processes: int) -> None:
    assert gate.processes_for(cores) == processes


def test_shares(gate: Any) -> None:
    """Shares go by the last seconds of files, and by numbers of tests where those are unknown."""
    shares_of = importlib.import_module("suite").shares_of
    tests = {"a": 1, "b": 4, "c": 2, "d": 3}
    assert shares_of(tests, {}, 2) == [["b", "a"], ["d", "c"]]
    assert shares_of(tests, {"a": 60.0, "b": 20.0, "old": 9.0}, 2) == [["a", "b"], ["d", "c"]]
    assert shares_of({"a": 1}, {}, 6) == [["a"]] and shares_of({}, {}, 6) == []


FAILS_FIRST = """
import pathlib
import time


def test_early():
    print("a printed line")
    assert 1 == 2, "seen early"


def test_late():
    deadline = time.monotonic() + 120
    while not pathlib.Path("seen").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pathlib.Path("seen").exists()
"""


@pytest.mark.parametrize("processes", in_gate([1, 2], [2]))
def test_failures_are_shown_at_once(tmp_path: Path, processes: int) -> None:
    """The text of a failure comes while the next test is running: that waits for a file which is made when it came."""
    root = project(tmp_path, 10, FAILS_FIRST)
    command = [sys.executable, str(GATE), "--root", str(root), f"--processes={processes}", "demo"]
    lines = []
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            lines.append(line)
            if line == "a printed line\n":
                assert any("AssertionError: seen early" in before for before in lines)
                (root / "seen").touch()
    output = "".join(lines)
    assert row_of("demo (CPU)", output).startswith("1 1 0 ") and run.returncode == 1
    # The line and the error of one traceback, and the error at the end: no log is printed again.
    assert output.count("seen early") == 3
    ends = output[output.index("== the slowest 2 files") :]
    assert re.search(r"^ +\d+\.\d s  demo  tests/conformance/test_sign.py$", ends, re.MULTILINE)
    test = "tests/conformance/test_sign.py::test_early"
    assert f"== failed\ndemo: {test}: AssertionError: seen early ... assert 1 == 2\n" in ends
    assert ends.endswith("\n\n2 passed, 1 failed, 0 skipped\n")


@pytest.mark.nightly
def test_a_part_that_breaks_down(tmp_path: Path) -> None:
    """The end of the log is shown if no test has failed: it has the reason."""
    root = project(tmp_path, 10, PASSES)
    (root / "tests" / "conformance" / "conftest.py").write_text("raise ValueError('broken set-up')\n")
    found, output = run_gate(root, "demo")
    assert found == 1 and "its log ends:\n" in output and "broken set-up" in output, output


@pytest.mark.nightly
def test_some_files(tmp_path: Path) -> None:
    """Given files run in their own parts; nothing is measured, and no table is written for the README."""
    root = project(tmp_path, 100, PASSES)
    asks(root, 1)
    tests = "def test_a():\n    pass\n\n\ndef test_b():\n    pass\n"
    (root / "tests" / "conformance" / "test_other.py").write_text(tests)
    found, output = run_gate(root, "demo", "--files", "./tests/conformance/test_other.py")
    assert found == 0 and row_of("demo (CPU)", output) == "2 0 0 - - - - SECONDS ok", output
    assert output.endswith("\n\n2 passed, 0 failed, 0 skipped\n") and "\nunit " not in output
    found, output = run_gate(
        root, "demo", "--files", "tests/unit/test_unit.py", f"{root}/tests/conformance/test_other.py::test_b"
    )
    assert found == 0 and output.endswith("\n\n2 passed, 0 failed, 0 skipped\n"), output
    assert not (root / "build" / "gate").exists() and not list((root / "build").rglob("table.*"))


LEAVES_OUT = """
import os


def left_out():
    return {"torch/test_cpu.py"} if os.environ["HYPER_PARALLEL_PLATFORM"] == "torch-npu" else set()
"""


@pytest.mark.nightly
def test_files_that_a_backend_leaves_out(tmp_path: Path) -> None:
    """`tests/conftest.py` says which; where no part runs a file that was asked for, that is a failure."""
    root = project_with_simulator(tmp_path, 0)
    (root / "tests" / "conftest.py").write_text(LEAVES_OUT)
    (root / "tests" / "torch").mkdir()
    for name in ("cpu", "all"):
        (root / "tests" / "torch" / f"test_{name}.py").write_text(f"def test_{name}():\n    pass\n")
    files = [f"tests/torch/test_{name}.py" for name in ("all", "cpu")]
    found, output = run_gate(root, "torch-npu", "--files", files[0])
    assert found == 0 and row_of("torch-npu (simulated NPU)", output) == "1 0 0 - - - - SECONDS ok", output
    found, output = run_gate(root, "torch-npu", "--files", files[1])
    assert row_of("torch-npu (simulated NPU)", output).endswith("LEFT OUT: it runs none of FILES here")
    wanted = f"FAIL: no part has run {files[1]}: see the table, leave PLATFORM out or choose another"
    assert found == 1 and wanted in output, output


@pytest.mark.parametrize(
    ("files", "backends", "sentence"),
    [
        (["tests/conformance/test_stiles.py"], ["mindspore"], "there is no .*; did you mean .*/test_styles.py"),
        (["docs/gates.md"], ["mindspore"], "no part runs docs/gates.md: name files of tests in tests/conf"),
        (["tests/torch/test_calls.py"], ["mindspore"], "is for torch-cpu, torch-cuda, torch-npu, not for unit, mind"),
        (["tests/npu"], ["torch-cpu", "mindspore"], "npu is for torch-npu, not .*: leave PLATFORM out, or choose"),
    ],
)
def test_files_that_are_refused(gate: Any, files: list[str], backends: list[str], sentence: str) -> None:
    known = ["mindspore", "torch-cpu", "torch-cuda", "torch-npu"]
    with pytest.raises(ValueError, match=sentence):
        gate.chosen(ROOT, files, dict.fromkeys(backends, sys.executable), known)


def test_where_files_run(gate: Any) -> None:
    known = ["mindspore", "torch-cpu", "torch-cuda", "torch-npu"]

    def parts(*files: str) -> set[str]:
        return set(gate.chosen(ROOT, list(files), dict.fromkeys(known, sys.executable), known))

    assert parts("tests/unit/test_gate.py") == {"unit"}
    assert parts("tests/conformance/test_styles.py") == {*known, gate.WITHOUT_FAST}
    assert parts("tests/conformance/test_fuzz.py") == {*known}
    assert parts("tests/mindspore/test_calls.py", "tests/npu") == {"mindspore", "torch-npu"}
    assert parts("tests/fake_cuda/test_tensors.py") == parts("tests/cuda/test_cuda.py") == {"torch-cuda"}


def run_conformance(gate: Any, root: Path) -> Any:
    """The row after the one file of tests has run, without the unit tests and without coverage."""
    row = gate.Row("demo", "CPU")
    gate.Tests(root).run(row, ["tests/conformance"], {}, [sys.executable], part_of(gate))
    return row


@pytest.mark.nightly
def test_no_test(gate: Any, tmp_path: Path) -> None:
    assert run_conformance(gate, project(tmp_path, 10, "# nothing")).verdict == "FAIL: no test ran"


@pytest.mark.nightly
def test_only_skipped_tests(gate: Any, tmp_path: Path) -> None:
    skipped = PASSES.replace("def test", "import pytest\n\n\n@pytest.mark.skip\ndef test")
    row = run_conformance(gate, project(tmp_path, 10, skipped))
    assert (row.passed, row.skipped, row.verdict) == (0, 1, "FAIL: no test ran")


@pytest.mark.nightly
def test_missing_report(gate: Any, tmp_path: Path) -> None:
    """Tests that end the process with success leave no report, and have shown nothing."""
    row = run_conformance(gate, project(tmp_path, 10, "import os\n\nos._exit(0)\n"))
    assert row.verdict == "FAIL: pytest wrote no report"


@pytest.mark.nightly
def test_no_coverage_data(gate: Any, tmp_path: Path) -> None:
    """Missing data of coverage leave nothing to compare."""
    root = project(tmp_path, 10, PASSES)
    (root / "build" / "gate" / "demo").mkdir(parents=True)
    row = gate.Row("demo", "CPU")
    gate.areas.measure(gate.Tests(root), row, root / "platform" / "demo" / "coverage.ini", part_of(gate))
    assert row.verdict == "FAIL: no coverage data"


@pytest.mark.nightly
def test_no_folder_of_tests(gate: Any, tmp_path: Path) -> None:
    root = project(tmp_path, 10, PASSES)
    (root / "tests" / "conformance").rename(root / "tests" / "elsewhere")
    row = gate.gate(gate.Tests(root), "demo", sys.executable, None, part_of(gate))
    assert row.verdict == "FAIL: it has no folder of tests"


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
    (root / "tests" / "__init__.py").touch()  # no other folder on the path stands in for it
    (root / "tests" / "simulated_npu.py").write_text(SIMULATOR.format(check=check))
    (root / "tests" / "npu").mkdir()
    (root / "tests" / "npu" / "test_simulated.py").write_text(ON_SIMULATOR)
    return root


@pytest.mark.nightly
def test_simulated_device(tmp_path: Path) -> None:
    """Tests of a backend with a simulator run below it, with the interpreter that was given."""
    found, output = run_gate(project_with_simulator(tmp_path, 0), f"torch-npu={sys.executable}", CI="yes")
    assert found == 0, output
    assert "3 passed, 0 failed, 0 skipped" in output


@pytest.mark.nightly
@pytest.mark.parametrize("variables", [{}, {"CI": "yes"}])
def test_simulator_that_cannot_run(tmp_path: Path, variables: dict[str, str]) -> None:
    """The table says why; in CI that is a failure."""
    found, output = run_gate(project_with_simulator(tmp_path, "gcc not found"), "torch-npu", **variables)
    assert found == (1 if variables else 0), output
    assert ("FAIL: gcc not found" if variables else "LEFT OUT: gcc not found") in output


def test_environment_that_is_not_there(gate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    wanted = "its environment could not be made: there is no /nowhere/python"
    assert gate.why_not(tmp_path, "torch-npu", "/nowhere/python") == wanted
    assert gate.why_not(tmp_path, "torch-cpu", sys.executable) == ""


PLATFORM_CLASS = """
class TorchCudaPlatform:
    @classmethod
    def unavailable_reason(cls):
        return {reason!r}
"""


def project_with_fake(root: Path, reason: str | None) -> Path:
    """The backend is called torch-cuda, which cannot run for ``reason``."""
    project(root, 10, PASSES)
    folder = root / "platform" / "demo"
    folder.rename(folder.with_name("torch-cuda"))
    config = root / "platform" / "torch-cuda" / "coverage-fake.ini"
    config.write_text(
        "[run]\nrelative_files = true\n[report]\ninclude =\n    hyper_parallel/platform/demo.py\n"
        "[areas]\nhyper_parallel/platform/demo.py = 95\n"
    )
    module = root / "hyper_parallel" / "platform" / "torch" / "cuda.py"
    module.parent.mkdir()
    (module.parent / "__init__.py").write_text("")
    module.write_text(PLATFORM_CLASS.format(reason=reason))
    (root / "pyproject.toml").write_text(
        (root / "pyproject.toml").read_text() + '[tool.coverage.report]\nomit = ["hyper_parallel/platform/torch/*"]\n'
    )
    for name in ("fake_cuda", "cuda"):
        (root / "tests" / name).mkdir()
        (root / "tests" / name / f"test_{name}.py").write_text(f"def test_{name}():\n    pass\n")
    return root


def test_fake_device(tmp_path: Path) -> None:
    """Tests with a fake device run alone where the device cannot be used, with thresholds of their own."""
    found, output = run_gate(project_with_fake(tmp_path, "no GPU here"), "torch-cuda")
    assert found == 0, output
    assert "torch-cuda: on a fake device, since no GPU here" in output
    assert "== torch-cuda (fake GPU): tests/fake_cuda\n" in output
    assert row_of("torch-cuda (fake GPU)", output) == "1 0 0 - - 100% - / - / 95% SECONDS ok"


def test_real_device(gate: Any, tmp_path: Path) -> None:
    """Everything runs where the device can be used, with the thresholds of every other backend."""
    root = project_with_fake(tmp_path, None)
    assert not gate.is_faked(root, "torch-cuda", sys.executable, part_of(gate))
    assert gate.folders_of(root, "torch-cuda", False) == ["tests/conformance", "tests/cuda"]
    assert gate.device_of("torch-cuda", [sys.executable], False) == "GPU"


def test_thresholds_of_this_project() -> None:
    """The thresholds of the project: 95 % of core, of a backend's own code and of the code around it. It is all of
    tensor_parallel, and 90 % of the code that all backends share."""
    backends = sorted(path.parent.name for path in ROOT.glob("platform/*/requirements.txt"))
    assert backends == ["mindspore", "torch-cpu", "torch-cuda", "torch-npu"]
    for backend in backends:
        settings = configparser.ConfigParser()
        settings.read(ROOT / "platform" / backend / "coverage.ini")
        least = {path: float(value) for path, value in settings["areas"].items()}
        framework = backend.split("-")[0]
        assert least["hyper_parallel/core"] >= 95
        assert least["hyper_parallel/core/tensor_parallel"] == 100
        assert least[f"hyper_parallel/platform/{framework}"] >= 95
        assert least["hyper_parallel/platform/*.py"] >= 90
        assert least["hyper_parallel/debug"] >= 95
        if backend == "torch-cpu":
            assert least["hyper_parallel/integrations"] >= 95
        assert os.access(ROOT / "ci" / backend, os.X_OK)
        assert backend in (ROOT / "ci" / "all").read_text()
    settings = configparser.ConfigParser()
    settings.read(ROOT / "platform" / "torch-cuda" / "coverage-fake.ini")
    assert dict(settings["areas"]) == {"hyper_parallel/platform/torch/cuda.py": "95"}
