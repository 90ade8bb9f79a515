"""Run the tests of one or more backends, each with the coverage that its folder in `platform/` asks for.

    python ci/gate.py torch-cpu mindspore

The unit tests run once. Then each backend gets a pytest process of its own, with ``HYPER_PARALLEL_PLATFORM`` set, for
the conformance suite and its own tests; its coverage is what these and the unit tests reach together. Ends with a
table, and exits non-zero if any test failed, a part ran no test or a backend is under its threshold.
"""

from __future__ import annotations

import argparse
import configparser
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gate"
COVERAGE = [sys.executable, "-m", "coverage"]
PART_TIMEOUT = 20 * 60


@dataclass
class Part:
    """What one row of the table says."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    coverage: str = ""
    problem: str = ""


def run_tests(name: str, folders: list[str], environment: dict[str, str]) -> Part:
    """Run pytest on ``folders`` under coverage; data and report go to a folder of this part."""
    part = Part(name)
    output = BUILD / name
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    report = output / "junit.xml"
    print(f"\n== {name}: {' '.join(folders)}", flush=True)
    command = [*COVERAGE, "run", "-m", "pytest", "-q", f"--junitxml={report}", *folders]
    environment = {**os.environ, **environment, "COVERAGE_FILE": str(output / "coverage")}
    started = time.monotonic()
    try:
        status = subprocess.run(command, cwd=ROOT, env=environment, timeout=PART_TIMEOUT, check=False).returncode
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


def measure(part: Part) -> None:
    """Combine what the unit tests and this backend's tests reached, print it, compare it with the threshold."""
    config = ROOT / "platform" / part.name / "coverage.ini"
    data = BUILD / part.name / "combined" / "coverage"
    data.parent.mkdir()
    combine = [*COVERAGE, "combine", "--keep", "--quiet", f"--data-file={data}", BUILD / "unit", BUILD / part.name]
    if subprocess.run(combine, cwd=ROOT, check=False).returncode:
        part.problem = part.problem or "no coverage data"
        return
    report = [*COVERAGE, "report", f"--data-file={data}", f"--rcfile={config}"]
    print(f"\n== {part.name}: coverage", flush=True)
    under = subprocess.run([*report, "--skip-covered"], cwd=ROOT, check=False).returncode
    ask_total = [*report, "--format=total", "--fail-under=0"]
    total = subprocess.run(ask_total, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    settings = configparser.ConfigParser()
    settings.read(config)
    reached = f"{total.strip()}%" if total.strip().isdigit() else "nothing measured"
    part.coverage = f"{reached} (at least {settings['report']['fail_under']}%)"
    if under:
        part.problem = part.problem or "coverage"


def folders_of(backend: str) -> list[str]:
    """The test folders that speak about ``backend``: for torch-npu conformance/, torch/ and npu/."""
    names = ["conformance", *backend.split("-")]
    folders = [f"tests/{name}" for name in names if (ROOT / "tests" / name).is_dir()]
    if not folders:
        raise SystemExit(f"{backend} has no folder of tests")
    return folders


def print_table(parts: list[Part]) -> None:
    """The table, then one line of totals."""
    row = "{:<12} {:>7} {:>7} {:>8} {:>8}  {:<24} {}"
    print("\n" + row.format("part", "passed", "failed", "skipped", "seconds", "coverage", "verdict"))
    for part in parts:
        verdict = f"FAIL: {part.problem}" if part.problem else "ok"
        counts = (part.passed, part.failed, part.skipped, round(part.seconds))
        print(row.format(part.name, *counts, part.coverage, verdict))
    passed, failed, skipped = (sum(getattr(part, key) for part in parts) for key in ("passed", "failed", "skipped"))
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped", flush=True)


def main() -> int:
    """Entry point; returns the exit status."""
    gates = sorted(path.parent.name for path in ROOT.glob("platform/*/coverage.ini"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="+", choices=gates, metavar="BACKEND", help=", ".join(gates))
    backends = parser.parse_args().backends
    parts = [run_tests("unit", ["tests/unit"], {})]
    for backend in backends:
        part = run_tests(backend, folders_of(backend), {"HYPER_PARALLEL_PLATFORM": backend})
        measure(part)
        parts.append(part)
    print_table(parts)
    return 1 if any(part.problem for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
