"""Run the tests of one or more backends, each with the coverage that its folder in `platform/` asks for.

    python ci/gate.py torch-cpu mindspore torch-cuda torch-npu=.venv/torch-npu/bin/python
    python ci/gate.py torch-cpu mindspore --files tests/conformance/test_styles.py tests/unit/test_gate.py

The unit tests run once, `WITHOUT_FAST_FILES` on torch-cpu also without `Platform.fast`. Each backend gets its own
pytest process, with ``HYPER_PARALLEL_PLATFORM`` set, for the conformance suite and the backend's tests. Its coverage,
of lines and branches, counts these tests and the unit tests. Several of these parts run at a time, because ranks spend
a third of their time waiting for one another. A line every ten seconds shows the progress of each (`ci/reporter.py`),
and a failure is printed at once. The other output of a part goes to ``build/gate/logs``. On many cores the test files
of a part are split over several pytest processes. ``platform/<backend>/coverage.ini`` has the measured areas, each with
its required minimum. Where less was reached, an HTML report is in ``build/gate/<backend>/html``.
The run ends with the slowest files and a table, also in ``build/gate/table.{json,md}``. The exit status is not zero if
a test failed, a part ran no test, or an area is below its threshold. If all backends ran, it also is not zero if the
library raises an error that no test of any backend reaches (``ci/raises.py``).

With ``--files`` only these tests run, each in the parts that it belongs to. Nothing is measured then, and the table is
only printed: it is no evidence about a backend.

A backend that cannot share an environment with the others is given with its interpreter.
A backend whose device is simulated (`ci/devices.py`) runs on the real device where that is set up. A backend whose
device is faked runs all tests where the device can be used. Elsewhere it runs only the tests with fake tensors, with
the areas of ``coverage-fake.ini``. If neither can run, the backend's row has the reason; this is a failure if the
variable CI is set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import areas
import choice
import junit
import results
from devices import DEVICES, device_of, folders_of, is_faked, launcher, places_of, why_not
from reporter import Part, Reporter
from results import Row
from suite import Tests, cores, processes_for

#: The backend on which a part of the conformance suite runs a second time, without `Platform.fast`.
TWICE = "torch-cpu"
WITHOUT_FAST = f"{TWICE}-without-fast"
#: Their test files in tests/conformance, which call everything in `Platform.fast`. The nightly run takes all files.
WITHOUT_FAST_FILES = (
    "test_dtensor.py",
    "test_fully_shard.py",
    "test_local_forward.py",
    "test_overlap.py",
    "test_redistribute.py",
    "test_replicate.py",
    "test_styles.py",
)
#: Message below the table.
MISSED = (
    "the library raises errors that no test came to. They are listed above the table, below '== raises': test each in "
    "a table of wrong uses (docs/gates.md), take it out, or say in ci/raises.py why it has to stay"
)
BUILD = Path("build") / "gate"
#: Folder for logs and reports of a run of some files, so that the reports of a full run stay.
BUILD_OF_FILES = Path("build") / "gate-files"
#: Number of slowest test files that are listed.
SLOWEST = 20
#: Number of last lines of a log that are shown for a part that failed without a failing test.
END_OF_LOG = 40

Work = Callable[[Part], Row]


def gate(tests: Tests, backend: str, python: str, unit: Callable[[], Row], part: Part) -> Row:
    """Run one backend and return its row. ``unit`` waits for the unit tests, whose coverage counts."""
    root = tests.root
    part.doing("looking whether it can run")
    if reason := why_not(root, backend, python):
        stand_in = DEVICES.get(backend, ("", ""))[1]
        return (
            Row(backend, stand_in, problem=reason) if os.environ.get("CI") else Row(backend, stand_in, left_out=reason)
        )
    faked, command = is_faked(root, backend, python, part), launcher(backend, python)
    row = Row(backend, device_of(backend, command, faked))
    config = root / "platform" / backend / ("coverage-fake.ini" if faked else "coverage.ini")
    if not areas.thresholds_in(config):
        row.problem = f"{config.relative_to(root)} asks for no coverage of the backend's own code"
        return row
    folders = folders_of(root, backend, faked)
    if not folders:
        row.problem = "it has no folder of tests"
        return row
    variables = {"HYPER_PARALLEL_PLATFORM": backend}
    if tests.files is not None:
        none = choice.left_out(root, command, tests.environment(variables))
        folders = [file for file in choice.within(tests.files, folders) if file.partition("::")[0] not in none]
        if not folders:
            row.left_out = "it runs none of FILES here"
            return row
    tests.run(row, folders, variables, command, part)
    if tests.measured and not tests.stopped:
        part.doing("waiting for the unit tests, whose coverage counts")
        unit()
        areas.measure(tests, row, config, part)
    return row


def unit_row(tests: Tests, part: Part) -> Row:
    """Run the unit tests and return their row."""
    row = Row("unit")
    places = ["tests/unit"] if tests.files is None else choice.within(tests.files, ["tests/unit"])
    tests.run(row, places, {}, [sys.executable], part)
    return row


def without_fast_places(nightly: bool = False) -> list[str]:
    """Return the folder or files of the tests that run without `Platform.fast`."""
    return ["tests/conformance"] if nightly else [f"tests/conformance/{name}" for name in WITHOUT_FAST_FILES]


def without_fast_row(tests: Tests, python: str, nightly: bool, part: Part) -> Row:
    """Run the conformance suite without `Platform.fast` and return its row. Its coverage does not count."""
    row = Row(WITHOUT_FAST, "CPU")
    environment = {"HYPER_PARALLEL_PLATFORM": TWICE, "HYPER_PARALLEL_FAST": "0"}
    places = without_fast_places(nightly)
    places = places if tests.files is None else choice.within(tests.files, places)
    tests.unmeasured().run(row, places, environment, [python], part)
    return row


def chosen(root: Path, files: list[str] | None, backends: Mapping[str, str], known: list[str]) -> dict[str, list[str]]:
    """Return part -> its folders and files of tests. With ``files``, only parts that can run some of them are included.

    Raises:
        ValueError: for a file that does not exist, or that no part of ``backends`` can run.
    """

    def places(names: list[str]) -> dict[str, list[str]]:
        every = {"unit": ["tests/unit"], **{name: places_of(root, name) for name in names}}
        return every | ({WITHOUT_FAST: without_fast_places()} if TWICE in names else {})

    asked = places(list(backends))
    if files is None:
        return asked
    files[:] = choice.checked(root, files, places(known), asked)
    return {part: where for part, where in asked.items() if choice.within(files, where)}


def run_parts(
    tests: Tests,
    backends: Mapping[str, str],
    at_once: int,
    reporter: Reporter,
    *,
    only: Collection[str] | None = None,
    more: Mapping[str, Work] | None = None,
    ended: Callable[[Row], None] | None = None,
    nightly: bool = False,
) -> list[Row]:
    """Run the unit tests and all backends, ``at_once`` at a time, and return their rows.

    Args:
        tests: settings for the tests.
        backends: name -> interpreter.
        at_once: number of parts that run at a time.
        reporter: printer of progress.
        only: names of the parts that run; None for all.
        more: further parts, by name.
        ended: called with each row when its part ends.
        nightly: whether nightly tests run too.
    """
    logs = tests.build / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    futures: dict[str, Future[Row]] = {}

    def logged(name: str, work: Work) -> Row:
        path = logs / f"{name}.txt"
        with reporter.part(name, path) as part:
            row = work(part)
        part.show(summary(row, path.relative_to(tests.root)))
        shown = row.failed or row.problem.startswith(areas.COVERAGE_OF) or tests.stopped
        if row.problem and not shown:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-END_OF_LOG:]
            part.show("\n".join(["its log ends:", *lines, ""]))
        if ended:
            ended(row)
        return row

    # The unit tests start first: other parts wait for them, so they must not wait for a thread.
    parts: dict[str, Work] = {"unit": partial(unit_row, tests)}
    for name, python in backends.items():
        parts[name] = partial(gate, tests, name, python, lambda: futures["unit"].result())
    if TWICE in backends:
        parts[WITHOUT_FAST] = partial(without_fast_row, tests, backends[TWICE], nightly)
    parts.update(more or {})
    with ThreadPoolExecutor(at_once) as pool:
        for name, work in parts.items():
            if only is None or name in only:
                reporter.expect()
                futures[name] = pool.submit(logged, name, work)
        try:
            return [future.result() for future in futures.values()]
        except KeyboardInterrupt:
            tests.stopped = True
            pool.shutdown(cancel_futures=True)
            raise


def summary(row: Row, log: Path) -> str:
    """Return a line about a part that has ended."""
    counts = f"{row.passed} passed, {row.failed} failed, {row.skipped} skipped in {row.seconds:.0f} s"
    return f"{row.name}: {row.verdict}; {counts}; its log is {log}"


def missed_errors(tests: Tests, rows: list[Row], whole: bool) -> bool:
    """Return whether the library raises errors that the tests of all backends do not reach, and print them.

    Args:
        tests: settings of the run.
        rows: rows of all parts.
        whole: whether all backends were requested. The result is False if one of them has not run.
    """
    root = tests.root
    if not whole or not all(row.passed for row in rows) or not (root / "ci" / "raises.py").exists():
        return False
    print("\n== raises", flush=True)
    command = [sys.executable, "-m", "ci.raises", str(tests.build)]
    return bool(subprocess.run(command, cwd=root, check=False).returncode)


def finish(tests: Tests, rows: list[Row], missed: bool) -> int:
    """Print the results of the run, the table last, and return the exit status.

    Args:
        tests: settings of the run.
        rows: rows of all parts.
        missed: whether there are errors that no test reached.
    """
    slow = junit.slowest(tests.root, {row.backend: tests.build / row.backend for row in rows}, SLOWEST)
    print("\n".join(["", f"== the slowest {len(slow)} files", *slow]))
    failed_tests = [
        f"{row.backend}: {test}{f': {error}' if error else ''}"
        for row in rows
        for test, error in row.failed_tests.items()
    ]
    if failed_tests:
        print("\n".join(["", "== failed", *failed_tests]))
    print("\n" + results.terminal(rows))
    passed, failed, skipped = (sum(getattr(row, key) for row in rows) for key in ("passed", "failed", "skipped"))
    if missed:
        print(f"\nFAIL: {MISSED}{'; the failed tests may reach them' if failed else ''}")
    nowhere = sorted(set(tests.files or ()) - tests.ran)
    if nowhere:
        print(f"\nFAIL: no part has run {', '.join(nowhere)}: see the table, leave PLATFORM out or choose another")
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if missed or nowhere or any(row.problem for row in rows) else 0


def options(description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that the gate and the nightly run share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("backends", nargs="+", metavar="BACKEND[=PYTHON]", help="folders in platform/")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="how many parts run at a time")
    parser.add_argument(
        "--processes",
        type=int,
        default=processes_for(cores()),
        metavar="N",
        help="over how many processes the tests of a part are shared out; by the number of cores",
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the project")
    return parser


def backends_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the requested backends with their interpreters, and the names of all backends."""
    known = sorted(path.name for path in arguments.root.glob("platform/*") if path.is_dir())
    backends = {name: python or sys.executable for name, _, python in (b.partition("=") for b in arguments.backends)}
    if unknown := sorted(set(backends) - set(known)):
        parser.error(f"no such backend: {', '.join(unknown)}; there are {', '.join(known)}")
    return backends, known


def main() -> int:
    """Run the command and return the exit status."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--files", nargs="+", metavar="FILE", help="run these tests alone")
    arguments = parser.parse_args()
    root, files = arguments.root.resolve(), arguments.files
    backends, known = backends_of(parser, arguments)
    try:
        only = chosen(root, files, backends, known)
    except ValueError as error:
        parser.error(str(error))
    build = BUILD if files is None else BUILD_OF_FILES
    tests = Tests(root, arguments.processes, measured=files is None, build=build, files=files)
    begun = results.tree(root)
    with Reporter() as reporter:
        rows = run_parts(tests, backends, arguments.at_once, reporter, only=only)
        reporter.besides = "looking for errors that no test came to"
        missed = files is None and missed_errors(tests, rows, whole=set(backends) == set(known))
    if files is None:
        results.stamp(root, rows, begun)
        results.write(tests.build / "table.json", rows)
        (tests.build / "table.md").write_text(results.markdown(rows), encoding="utf-8")
    return finish(tests, rows, missed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped")
