"""Run the tests of one or more backends, each with the coverage that its folder in `platform/` asks for.

    python ci/gate.py torch-cpu mindspore torch-npu=.venv/torch-npu/bin/python

The unit tests run once. Then each backend gets a pytest process of its own, with ``HYPER_PARALLEL_PLATFORM`` set, for
the conformance suite and its own tests; its coverage is what these and the unit tests reach together, lines and
branches. ``platform/<backend>/coverage.ini`` names the areas that count, each with the least that is accepted. Reports
for browsers stay in ``build/gate/<backend>/html``. Ends with a table, and exits non-zero if any test failed, a part ran
no test or an area is under its threshold.

A backend that cannot live in one environment with the others is given with its interpreter.
A backend whose device is simulated (`SIMULATORS`) runs on the real one where that is set up. Where neither can run, its
row says why; that is a failure when the variable CI is set.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

COVERAGE = [sys.executable, "-m", "coverage"]
#: backend -> (module that simulates its device, variable that is set where the real one is)
SIMULATORS = {"torch-npu": ("tests.simulated_npu", "ASCEND_HOME_PATH")}
PART_TIMEOUT = 20 * 60
BUILD = Path("build") / "gate"


@dataclass
class Area:
    """A folder of the package: how much of it was reached, and the least that is accepted, in percent."""

    path: str
    least: float
    reached: float

    def __str__(self) -> str:
        name = self.path.removeprefix("hyper_parallel/")
        # Rounded down: 99.96 is not 100.
        return f"{name} {int(self.reached * 10) / 10:g}% (at least {self.least:g}%)"


@dataclass
class Part:
    """What one row of the table says."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    areas: list[Area] = field(default_factory=list)
    problem: str = ""
    left_out: str = ""

    @property
    def verdict(self) -> str:
        """What the last column says."""
        return f"FAIL: {self.problem}" if self.problem else f"LEFT OUT: {self.left_out}" if self.left_out else "ok"


def launcher(backend: str, python: str) -> list[str]:
    """The command that starts Python for the tests of ``backend``: within a simulator where the device needs one."""
    module, real = SIMULATORS.get(backend, ("", ""))
    simulated = module and not os.environ.get(real)
    return [python, "-m", module, "run", python] if simulated else [python]


def why_not(root: Path, backend: str, python: str) -> str:
    """Why the simulator of ``backend`` cannot run here, or nothing."""
    command = launcher(backend, python)
    if len(command) == 1:
        return ""
    if shutil.which(python) is None:
        return f"its environment could not be made: there is no {python}"
    check = [*command[: command.index("run")], "check"]
    done = subprocess.run(check, cwd=root, check=False, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def run_tests(
    root: Path, name: str, folders: list[str], environment: dict[str, str], command: list[str] | None = None
) -> Part:
    """Run pytest on ``folders`` under coverage; data and report go to a folder of this part.

    ``command`` starts Python, if not the one of this process.
    """
    part = Part(name)
    output = root / BUILD / name
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    report = output / "junit.xml"
    print(f"\n== {name}: {' '.join(folders)}", flush=True)
    measured = ["-m", "coverage", "run", "-m", "pytest", "-q", f"--junitxml={report}", *folders]
    command = [*(command or [sys.executable]), *measured]
    environment = {**os.environ, **environment, "COVERAGE_FILE": str(output / "coverage")}
    started = time.monotonic()
    try:
        status = subprocess.run(command, cwd=root, env=environment, timeout=PART_TIMEOUT, check=False).returncode
        if status:
            part.problem = "no test ran" if status == 5 else f"pytest exit {status}"
    except subprocess.TimeoutExpired:
        part.problem = f"over {PART_TIMEOUT} s"
    part.seconds = time.monotonic() - started
    if report.exists():
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
            part.failed += count["failures"] + count["errors"]
            part.skipped += count["skipped"]
            part.passed += count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    return part


def measure(root: Path, part: Part) -> None:
    """Combine what the unit tests and this backend's tests reached, print it, compare it with the thresholds."""
    config = root / "platform" / part.name / "coverage.ini"
    output = root / BUILD / part.name
    data = output / "combined" / "coverage"
    data.parent.mkdir()
    combine = [*COVERAGE, "combine", "--keep", "--quiet", f"--data-file={data}", root / BUILD / "unit", output]
    if subprocess.run(combine, cwd=root, check=False).returncode:
        part.problem = part.problem or "no coverage data"
        return
    options = [f"--data-file={data}", f"--rcfile={config}"]
    print(f"\n== {part.name}: coverage", flush=True)
    subprocess.run([*COVERAGE, "report", *options, "--skip-covered"], cwd=root, check=False)
    subprocess.run([*COVERAGE, "html", *options, "--quiet", f"--directory={output / 'html'}"], cwd=root, check=False)
    report = output / "coverage.json"
    subprocess.run([*COVERAGE, "json", *options, "--quiet", "-o", report], cwd=root, check=False)
    settings = configparser.ConfigParser()
    settings.read(config)
    files = json.loads(report.read_text())["files"] if report.exists() else {}
    part.areas = [Area(path, float(least), reached(files, path)) for path, least in settings["areas"].items()]
    missed = [area for area in part.areas if area.reached < area.least]
    if missed:
        part.problem = part.problem or "coverage of " + ", ".join(area.path for area in missed)


def reached(files: dict, path: str) -> float:
    """Percentage of the lines and branches below ``path`` that ran; 0 when nothing there was measured."""
    below = [file["summary"] for name, file in files.items() if name.startswith(path + "/")]
    ran = sum(summary["covered_lines"] + summary["covered_branches"] for summary in below)
    there_are = sum(summary["num_statements"] + summary["num_branches"] for summary in below)
    return 100 * ran / there_are if there_are else 0.0


def folders_of(root: Path, backend: str) -> list[str]:
    """The test folders that speak about ``backend``: for torch-npu conformance/, torch/ and npu/."""
    names = ["conformance", *backend.split("-")]
    folders = [f"tests/{name}" for name in names if (root / "tests" / name).is_dir()]
    if not folders:
        raise SystemExit(f"{backend} has no folder of tests")
    return folders


def print_table(parts: list[Part]) -> None:
    """The table, then one line of totals."""
    row = "{:<12} {:>7} {:>7} {:>8} {:>8}  {}"
    print("\n" + row.format("part", "passed", "failed", "skipped", "seconds", "verdict"))
    for part in parts:
        print(row.format(part.name, part.passed, part.failed, part.skipped, round(part.seconds), part.verdict))
        for area in part.areas:
            print(f"{'':<12}   {area}")
    passed, failed, skipped = (sum(getattr(part, key) for part in parts) for key in ("passed", "failed", "skipped"))
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped", flush=True)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="+", metavar="BACKEND[=PYTHON]", help="folders in platform/")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the project")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    gates = sorted(path.parent.name for path in root.glob("platform/*/coverage.ini"))
    backends = {name: python or sys.executable for name, _, python in (b.partition("=") for b in arguments.backends)}
    if unknown := sorted(set(backends) - set(gates)):
        parser.error(f"no such backend: {', '.join(unknown)}; there are {', '.join(gates)}")
    parts = [run_tests(root, "unit", ["tests/unit"], {})]
    for backend, python in backends.items():
        if reason := why_not(root, backend, python):
            parts.append(Part(backend, **{"problem" if os.environ.get("CI") else "left_out": reason}))
            continue
        environment = {"HYPER_PARALLEL_PLATFORM": backend}
        part = run_tests(root, backend, folders_of(root, backend), environment, launcher(backend, python))
        measure(root, part)
        parts.append(part)
    print_table(parts)
    return 1 if any(part.problem for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
