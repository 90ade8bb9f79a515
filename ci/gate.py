"""Run the tests of one or more backends, each with the coverage that its folder in `platform/` asks for.

    python ci/gate.py torch-cpu mindspore torch-cuda torch-npu=.venv/torch-npu/bin/python

The unit tests run once, the conformance suite on torch-cpu also without `Platform.fast`. Each backend gets a pytest
process of its own, with ``HYPER_PARALLEL_PLATFORM`` set, for the conformance suite and its own tests; its coverage is
what these and the unit tests reach together, lines and branches.
Several of these parts run at a time, because ranks spend a third of their time waiting for one another; what a part
prints appears when it has ended, and stays in ``build/gate/logs``. With ``--processes`` the files of tests of a part
are shared out over several processes of pytest, which a machine of many cores ends sooner.
``platform/<backend>/coverage.ini`` names the areas that count, each with the least that is accepted. Reports for
browsers stay in ``build/gate/<backend>/html``. Ends with a table, which is also written to
``build/gate/table.{json,md}``, and exits non-zero if any test failed, a part ran no test or an area is under its
threshold, or, where all backends ran, the library raises an error that no test of any came to (``ci/raises.py``).

A backend that cannot live in one environment with the others is given with its interpreter.
A backend whose device is simulated (`SIMULATORS`) runs on the real one where that is set up. One whose device is faked
(`FAKES`) runs everything where the device can be used, and otherwise the tests with fake tensors alone, for which
``coverage-fake.ini`` has the areas. Where neither can run, its row says why; that is a failure when the variable CI is
set.
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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TextIO

import results
from results import Area, Row

COVERAGE = [sys.executable, "-m", "coverage"]
#: backend -> (module that simulates its device, variable that is set where the real one is)
SIMULATORS = {"torch-npu": ("tests.simulated_npu", "ASCEND_HOME_PATH")}
#: backend -> (folder of the tests on a fake device, program that exits with 0 where the real one can be used)
FAKES = {
    "torch-cuda": (
        "fake_cuda",
        "from hyper_parallel.platform.torch.cuda import TorchCudaPlatform as platform\n"
        "raise SystemExit(platform.unavailable_reason())",
    )
}
#: backend -> what the table calls its device: the real one, and what stands in for it
DEVICES = {"torch-cuda": ("GPU", "fake GPU"), "torch-npu": ("NPU", "simulated NPU")}
#: The backend on which the conformance suite runs a second time, without `Platform.fast`.
TWICE = "torch-cpu"
WITHOUT_FAST = f"{TWICE}-without-fast"
#: Half as much again as the longest part took on a slow machine, 54 minutes. Hangs end sooner: tests have limits too.
PART_TIMEOUT = 80 * 60
#: Said below the table.
MISSED = (
    "the library raises errors that no test came to. They are listed above the table, below '== raises': test each in "
    "a table of wrong uses (docs/gates.md), take it out, or say in ci/raises.py why it has to stay"
)
BUILD = Path("build") / "gate"


def launcher(backend: str, python: str) -> list[str]:
    """The command that starts Python for the tests of ``backend``: within a simulator where the device needs one."""
    module, real = SIMULATORS.get(backend, ("", ""))
    simulated = module and not os.environ.get(real)
    return [python, "-m", module, "run", python] if simulated else [python]


def why_not(root: Path, backend: str, python: str) -> str:
    """Why the tests of ``backend`` cannot run here, or nothing."""
    if shutil.which(python) is None:
        return f"its environment could not be made: there is no {python}"
    command = launcher(backend, python)
    if len(command) == 1:
        return ""
    check = [*command[: command.index("run")], "check"]
    done = subprocess.run(check, cwd=root, check=False, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


def is_faked(root: Path, backend: str, python: str, log: TextIO) -> bool:
    """Whether the tests of ``backend`` have to do with a fake device here."""
    if backend not in FAKES:
        return False
    question = subprocess.run([python, "-c", FAKES[backend][1]], cwd=root, check=False, capture_output=True, text=True)
    if question.returncode:
        reason = question.stderr.strip().splitlines()[-1]
        print(f"\n== {backend}: on a fake device, since {reason}", file=log, flush=True)
    return bool(question.returncode)


def device_of(backend: str, command: list[str], faked: bool) -> str:
    """What the table says the tests of ``backend`` run on."""
    if backend == "mindspore":  # MindSpore takes the Ascend wherever CANN is set up
        return "NPU" if os.environ.get("ASCEND_HOME_PATH") else "CPU"
    real, stand_in = DEVICES.get(backend, ("CPU", "CPU"))
    return stand_in if faked or len(command) > 1 else real


class Tests:
    """How the tests of a part are run.

    Args:
        root: the project.
        processes: over how many processes of pytest the files of tests are shared out.
        measured: whether they run under coverage, which takes a quarter of the time.
    """

    def __init__(self, root: Path, processes: int = 1, measured: bool = True) -> None:
        self.root = root
        self.processes = processes
        self.measured = measured

    def run(self, row: Row, folders: list[str], variables: dict[str, str], command: list[str], log: TextIO) -> None:
        """Run pytest on ``folders`` under coverage and count; data and reports go to a folder of this part.

        ``command`` starts Python.
        """
        output = self.root / BUILD / row.backend
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        print(f"\n== {row.name}: {' '.join(folders)}", file=log, flush=True)
        environment = {**os.environ, **variables, "COVERAGE_FILE": str(output / "coverage")}
        started = time.monotonic()
        shares = [folders] if self.processes == 1 else self._shares(folders, environment, command)
        with ThreadPoolExecutor(self.processes) as threads:
            reports = [output / f"junit-{n}.xml" for n in range(len(shares))]
            problems = threads.map(partial(self._pytest, environment, command, log), shares, reports)
        row.problem = next(filter(None, problems), "")
        row.seconds = time.monotonic() - started
        for report in reports:
            if self.processes > 1:
                log.write(report.with_suffix(".txt").read_text(encoding="utf-8", errors="replace"))
            if report.exists():
                self._count(row, report)
            else:
                row.problem = row.problem or "pytest wrote no report"
        if not row.passed:
            row.problem = row.problem or "no test ran"  # skipped ones show nothing

    def _shares(self, folders: list[str], environment: dict[str, str], command: list[str]) -> list[list[str]]:
        """The files of tests below ``folders``, in shares of about as many tests each."""
        collect = [*command, "-m", "pytest", "--collect-only", "-q", *folders]
        found = subprocess.run(collect, cwd=self.root, env=environment, check=False, capture_output=True, text=True)
        files = Counter(line.partition("::")[0] for line in found.stdout.splitlines() if "::" in line)
        shares: list[list[str]] = [[] for _ in range(self.processes)]
        sizes = [0] * self.processes
        for file, size in files.most_common():
            least = sizes.index(min(sizes))
            shares[least].append(file)
            sizes[least] += size
        return [share for share in shares if share] or [folders]

    def _pytest(
        self, environment: dict[str, str], command: list[str], log: TextIO, tests: list[str], report: Path
    ) -> str:
        """Run ``tests`` in one process of pytest. Returns what went wrong."""
        pytest = ["-m", "pytest", "-q", f"--junitxml={report}", *tests]
        # One log at a time, so that what several processes print does not mix.
        own = report.with_suffix(".txt")
        with nullcontext(log) if self.processes == 1 else own.open("w", encoding="utf-8") as output:
            try:
                done = subprocess.run(
                    [*command, *(["-m", "coverage", "run"] if self.measured else []), *pytest],
                    cwd=self.root,
                    env=environment,
                    timeout=PART_TIMEOUT,
                    check=False,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            except subprocess.TimeoutExpired:
                return f"over {PART_TIMEOUT} s"
        if done.returncode:
            return "no test ran" if done.returncode == 5 else f"pytest exit {done.returncode}"
        return ""

    def _count(self, row: Row, report: Path) -> None:
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
            row.failed += count["failures"] + count["errors"]
            row.skipped += count["skipped"]
            row.passed += count["tests"] - count["failures"] - count["errors"] - count["skipped"]


def measure(root: Path, row: Row, config: Path, log: TextIO) -> None:
    """Combine what the unit tests and this backend's tests reached, print it, compare it with the thresholds."""
    thresholds = thresholds_in(config)
    output = root / BUILD / row.backend
    data = output / "combined" / "coverage"
    data.parent.mkdir()
    combine = [
        *COVERAGE,
        "combine",
        "--keep",
        "--quiet",
        f"--data-file={data}",
        str(root / BUILD / "unit"),
        str(output),
    ]
    if subprocess.run(combine, cwd=root, check=False, stdout=log, stderr=subprocess.STDOUT).returncode:
        row.problem = row.problem or "no coverage data"
        return
    options = [f"--data-file={data}", f"--rcfile={config}"]
    print(f"\n== {row.name}: coverage", file=log, flush=True)
    subprocess.run([*COVERAGE, "report", *options, "--skip-covered"], cwd=root, check=False, stdout=log)
    subprocess.run([*COVERAGE, "html", *options, "--quiet", f"--directory={output / 'html'}"], cwd=root, check=False)
    report = output / "coverage.json"
    subprocess.run([*COVERAGE, "json", *options, "--quiet", "-o", report], cwd=root, check=False)
    files = json.loads(report.read_text())["files"] if report.exists() else {}
    row.areas = [Area(path, least, reached(files, path)) for path, least in thresholds.items()]
    if missed := [area.path for area in row.areas if area.missed]:
        row.problem = row.problem or "coverage of " + ", ".join(missed)


def thresholds_in(config: Path) -> dict[str, float]:
    """Areas and the least percentages that a file asks for; none when it leaves out the backend's own code."""
    settings = configparser.ConfigParser()
    settings.read(config)
    areas = {path: float(least) for path, least in settings["areas"].items()} if "areas" in settings else {}
    own = any(results.is_own(path) for path in areas)
    return areas if own and all(least > 0 for least in areas.values()) else {}


def reached(files: dict, path: str) -> float:
    """Percentage of the lines and branches of the file ``path``, or below the folder, or of the files that a pattern
    such as ``folder/*.py`` names, that ran; 0 when nothing there was measured."""

    def within(name: str) -> bool:
        return name == path or name.startswith(path + "/") or ("*" in path and PurePosixPath(name).match(path))

    there = [file["summary"] for name, file in files.items() if within(name)]
    ran = sum(summary["covered_lines"] + summary["covered_branches"] for summary in there)
    there_are = sum(summary["num_statements"] + summary["num_branches"] for summary in there)
    return 100 * ran / there_are if there_are else 0.0


def folders_of(root: Path, backend: str, faked: bool) -> list[str]:
    """The test folders that speak about ``backend``: for torch-npu conformance/, torch/ and npu/."""
    names = [FAKES[backend][0]] if faked else ["conformance", *backend.split("-")]
    return [f"tests/{name}" for name in names if (root / "tests" / name).is_dir()]


def gate(tests: Tests, backend: str, python: str, unit: Callable[[], Row], log: TextIO) -> Row:
    """The row of one backend. ``unit`` waits for the unit tests, whose coverage counts."""
    root = tests.root
    if reason := why_not(root, backend, python):
        stand_in = DEVICES.get(backend, ("", ""))[1]
        return (
            Row(backend, stand_in, problem=reason) if os.environ.get("CI") else Row(backend, stand_in, left_out=reason)
        )
    faked, command = is_faked(root, backend, python, log), launcher(backend, python)
    row = Row(backend, device_of(backend, command, faked))
    config = root / "platform" / backend / ("coverage-fake.ini" if faked else "coverage.ini")
    if not thresholds_in(config):
        row.problem = f"{config.relative_to(root)} asks for no coverage of the backend's own code"
        return row
    folders = folders_of(root, backend, faked)
    if not folders:
        row.problem = "it has no folder of tests"
        return row
    tests.run(row, folders, {"HYPER_PARALLEL_PLATFORM": backend}, command, log)
    unit()
    measure(root, row, config, log)
    return row


def unit_row(tests: Tests, log: TextIO) -> Row:
    """The row of the unit tests."""
    row = Row("unit")
    tests.run(row, ["tests/unit"], {}, [sys.executable], log)
    return row


def without_fast_row(tests: Tests, python: str, log: TextIO) -> Row:
    """The row of the conformance suite on a platform that has no short ways. Nothing counts what it covers."""
    row = Row(WITHOUT_FAST, "CPU")
    environment = {"HYPER_PARALLEL_PLATFORM": TWICE, "HYPER_PARALLEL_FAST": "0"}
    unmeasured = Tests(tests.root, tests.processes, measured=False)
    unmeasured.run(row, ["tests/conformance"], environment, [python], log)
    return row


def run_parts(tests: Tests, backends: dict[str, str], at_once: int) -> list[Row]:
    """The rows of the unit tests and of all backends, ``at_once`` at a time."""
    logs = tests.root / BUILD / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    def logged(name: str, part: Callable[[TextIO], Row]) -> Row:
        print(f"{name}: begins", flush=True)
        path = logs / f"{name}.txt"
        with path.open("w", encoding="utf-8") as log:
            row = part(log)
        # One call, so that the output of two parts does not mix.
        print(path.read_text(encoding="utf-8", errors="replace"), flush=True)
        return row

    with ThreadPoolExecutor(at_once) as pool:
        # The first to begin: the others wait for it, so it must not wait for a place.
        unit: Future[Row] = pool.submit(logged, "unit", partial(unit_row, tests))
        rows = [
            pool.submit(logged, name, partial(gate, tests, name, python, unit.result))
            for name, python in backends.items()
        ]
        if TWICE in backends:
            rows.append(pool.submit(logged, WITHOUT_FAST, partial(without_fast_row, tests, backends[TWICE])))
    return [future.result() for future in (unit, *rows)]


def missed_errors(root: Path, rows: list[Row], whole: bool) -> bool:
    """Whether the tests of all backends together have left out an error that the library raises; prints which.

    Args:
        whole: whether all backends were asked for. Nothing is known where one of them has not run.
    """
    if not whole or not all(row.passed for row in rows) or not (root / "ci" / "raises.py").exists():
        return False
    print("\n== raises", flush=True)
    command = [sys.executable, "-m", "ci.raises", str(root / BUILD)]
    return bool(subprocess.run(command, cwd=root, check=False).returncode)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backends", nargs="+", metavar="BACKEND[=PYTHON]", help="folders in platform/")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="how many parts run at a time")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="over how many processes the tests of a part are shared out",
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the project")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    known = sorted(path.name for path in root.glob("platform/*") if path.is_dir())
    backends = {name: python or sys.executable for name, _, python in (b.partition("=") for b in arguments.backends)}
    if unknown := sorted(set(backends) - set(known)):
        parser.error(f"no such backend: {', '.join(unknown)}; there are {', '.join(known)}")
    rows = run_parts(Tests(root, arguments.processes), backends, arguments.at_once)
    results.stamp(root, rows)
    results.write(root / BUILD / "table.json", rows)
    (root / BUILD / "table.md").write_text(results.markdown(rows), encoding="utf-8")
    missed = missed_errors(root, rows, whole=set(backends) == set(known))
    print("\n" + results.terminal(rows))
    passed, failed, skipped = (sum(getattr(row, key) for row in rows) for key in ("passed", "failed", "skipped"))
    if missed:
        print(f"\nFAIL: {MISSED}{'; what failed may come to them' if failed else ''}")
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if missed or any(row.problem for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
