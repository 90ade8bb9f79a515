"""A map from lines to the tests that reach them: made from a whole run of a backend's tests, kept outside git.

`record` runs tests under coverage with `ci.mutants.recording`, all of a backend once, and later those files of tests
that changed. Nightly tests run too, unless only the gate is asked. A recording keeps the sources it was made with: a
line is looked up where it stood then, so that it stays of use while other lines change.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from ci.mutants.mutations import AREAS, Mutation, function_at
from hyper_parallel.testing.extent import VARIABLE

BUILD = Path("build") / "mutants"
#: backend -> the folders of its tests; unit tests count for one of them, since they run without a framework.
FOLDERS = {
    "torch-cpu": ("tests/unit", "tests/conformance", "tests/torch"),
    "mindspore": ("tests/conformance", "tests/mindspore"),
}
#: The checks that the files of tests/conformance collect, under the same names.
CHECKS = Path("hyper_parallel") / "testing" / "conformance"
#: Seconds that one test costs in addition to its own time, so that a few tests are preferred to many.
EACH = 0.02


@dataclass
class Recording:
    """The lines that each test of one run reached.

    Attributes:
        seconds: test -> how long it took. Tests that failed are left out.
        lines: file -> line -> the tests, by their position in ``seconds``.
        sources: file -> its text then.
        files: file of tests -> its digest then, see `files_of`.
        nightly: the tests that the gate leaves out.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[int]]]
    sources: dict[str, str]
    files: dict[str, str]
    nightly: list[str] = field(default_factory=list)

    @cached_property
    def tests(self) -> list[str]:
        return [*self.seconds]

    def of_lines(self, path: str, source: str, lines: Iterable[int]) -> set[str]:
        """The tests that reach any of these lines of a file, whose text is ``source`` now."""
        then, by_line = self._then(path, source), self.lines.get(path, {})
        return {self.tests[i] for line in lines for i in by_line.get(then.get(line, 0), ())}

    def _then(self, path: str, source: str) -> dict[int, int]:
        """Line now -> the same line then."""
        before = self.sources.get(path, "")
        if before == source:
            return {line: line for line in range(1, source.count("\n") + 2)}
        match = difflib.SequenceMatcher(None, before.split("\n"), source.split("\n"), autojunk=False)
        return {b + i + 1: a + i + 1 for a, b, size in match.get_matching_blocks() for i in range(size)}


class Reach:
    """All that is recorded of one backend. A later recording takes the place of an earlier one for its files of tests.

    Attributes:
        seconds: test -> how long it took.
        breadth: test -> how many lines it reaches: the fewer, the closer it looks at each.
        nightly: the tests that the gate leaves out.
    """

    def __init__(self, recordings: list[Recording]) -> None:
        self.recordings = recordings
        self.seconds: dict[str, float] = {}
        self.breadth: dict[str, int] = {}
        self.nightly: set[str] = set()
        self._last: dict[str, Recording] = {}
        for recording in recordings:
            files = {test.partition("::")[0] for test in recording.tests}
            self._last = {test: r for test, r in self._last.items() if test.partition("::")[0] not in files}
            self._last.update(dict.fromkeys(recording.tests, recording))
            self.seconds.update(recording.seconds)
            self.nightly = self.nightly.difference(recording.tests).union(recording.nightly)
            self.breadth.update(dict.fromkeys(recording.tests, 0))
            for by_line in recording.lines.values():
                for indices in by_line.values():
                    for i in indices:
                        self.breadth[recording.tests[i]] += 1

    def of_lines(self, path: str, source: str, lines: Iterable[int]) -> set[str]:
        """The tests that reach any of these lines of a file, whose text is ``source`` now."""
        lines = [*lines]
        return {
            test
            for recording in self.recordings
            for test in recording.of_lines(path, source, lines)
            if self._last.get(test) is recording
        }

    def rounds(self, mutation: Mutation, source: str) -> list[list[str]]:
        """The tests for a mutation, the closest and quickest first: those that reach its line, then those that reach
        its function, then those that reach its file. Each test once."""
        around = function_at(source, mutation.line)
        wanted = [range(1, source.count("\n") + 2)]
        if around is not None:
            # Code on the level of a module runs when it is imported, for whichever test comes first: only a line within
            # a function says something.
            wanted = [range(mutation.line, mutation.line + 1), range(around[1], around[2] + 1), *wanted]
        text = mutation.text + (around[0] if around else "") + Path(mutation.path).stem
        words = set(re.findall(r"[a-z]{3,}", text.lower()))
        seen: set[str] = set()
        rounds = []
        for lines in wanted:
            tests = self.of_lines(mutation.path, source, lines) - seen
            rounds.append(self._closest_first(tests, words))
            seen |= tests
        return rounds

    def _closest_first(self, tests: set[str], words: set[str]) -> list[str]:
        """One test of each test function in turn: the cases of one function are very similar."""
        functions: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda test: (-_shared(words, test), self.seconds[test], test)):
            functions.setdefault(test.partition("[")[0], []).append(test)

        def distance(cases: list[str]) -> float:
            narrow = min(self.breadth[test] for test in cases) / 1000
            return (narrow + self.seconds[cases[0]]) / (1 + _shared(words, cases[0]))

        ordered = sorted(functions.values(), key=distance)
        longest = max(map(len, ordered), default=0)
        return [cases[i] for i in range(longest) for cases in ordered if i < len(cases)]


def _shared(words: set[str], test: str) -> int:
    return len(words & set(re.findall(r"[a-z]{3,}", test.partition("::")[2].lower())))


def files_of(root: Path, backend: str) -> dict[str, str]:
    """The files of a backend's tests, each with a digest of it and of the checks that it collects."""
    found = {}
    for folder in FOLDERS[backend]:
        for file in sorted((root / folder).glob("test_*.py")):
            parts = [file, root / CHECKS / file.name] if folder == "tests/conformance" else [file]
            text = b"".join(part.read_bytes() for part in parts if part.exists())
            found[file.relative_to(root).as_posix()] = hashlib.sha256(text).hexdigest()
    return found


def environment(root: Path, backend: str, night: bool) -> dict[str, str]:
    """The variables with which the tests of a backend run, in the gate or at night."""
    extent = {VARIABLE: "yes" if night else ""}
    return {**os.environ, "HYPER_PARALLEL_PLATFORM": backend, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **extent}


def up_to_date(root: Path, backend: str, old_sources: bool = False, night: bool = True) -> Reach:
    """Return the recording after running the tests that it lacks.

    These are all tests when a source changed (unless ``old_sources``), else the files of tests that changed or are
    new. With ``night=False`` a recording of the tests of the gate alone is enough, which takes a fraction of the time.
    """
    folder = root / BUILD / backend
    whole, later = ("all", "changed") if night or (folder / "all.json").exists() else ("gate", "gate-changed")
    found = [_read(folder / f"{name}.json") for name in (whole, later)]
    recordings = [recording for recording in found if recording is not None]
    if not recordings or (not old_sources and any(_is_stale(root, recording) for recording in recordings)):
        (folder / f"{later}.json").unlink(missing_ok=True)
        print(f"{backend}: running all tests, to know which lines each reaches", flush=True)
        folders = [folder for folder in FOLDERS[backend] if (root / folder).is_dir()]
        return Reach([record(root, backend, whole, folders, night=whole == "all")])
    now = files_of(root, backend)
    known = {file: digest for recording in recordings for file, digest in recording.files.items()}
    if any(known.get(file) != digest for file, digest in now.items()):
        changed = [file for file, digest in now.items() if recordings[0].files.get(file) != digest]
        print(f"{backend}: running {', '.join(changed)}, to know which lines they reach", flush=True)
        recordings[1:] = [record(root, backend, later, changed, night=whole == "all")]
    return Reach(recordings)


def _is_stale(root: Path, recording: Recording) -> bool:
    paths = {path: root / path for path in recording.sources}
    return any(
        not path.exists() or path.read_text(encoding="utf-8") != recording.sources[name] for name, path in paths.items()
    )


def record(
    root: Path, backend: str, name: str, tests: Iterable[str], python: str = sys.executable, night: bool = True
) -> Recording:
    """Run tests of a backend, keep which lines each reaches under ``name``, and return it."""
    run = root / BUILD / backend / name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    command = [python, "-m", "coverage", "run", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "ci.mutants.recording", f"--record={run}", *tests]
    # The tracer of newer Pythons sees each line once only, for the first test that comes there.
    variables = environment(root, backend, night)
    variables |= {"COVERAGE_FILE": str(run / "coverage"), "COVERAGE_CORE": "ctrace"}
    with (run / "log.txt").open("w") as log:
        subprocess.run(command, cwd=root, env=variables, check=False, stdout=log, stderr=log)
    recording = take(root, backend, run)
    path = run.with_suffix(".json")
    path.write_text(json.dumps(asdict(recording)), encoding="utf-8")
    shutil.rmtree(run)
    return recording


def take(root: Path, backend: str, run: Path) -> Recording:
    """Make a recording from a run of tests under coverage that left its files in the folder ``run``."""
    import coverage

    combined = run / "combined" / "coverage"
    combined.parent.mkdir(exist_ok=True)
    combine = [sys.executable, "-m", "coverage", "combine", "--keep", "--quiet", f"--data-file={combined}", str(run)]
    subprocess.run(combine, cwd=root, check=True)
    ran = [json.loads(line) for line in (run / "tests.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = {entry["test"]: entry["seconds"] + EACH for entry in ran if entry["passed"]}
    index = {test: i for i, test in enumerate(seconds)}
    data = coverage.CoverageData(str(combined))
    data.read()
    lines, sources = {}, {}
    for file in data.measured_files():
        found = (root / file).resolve()
        # An installed copy of the library, in whose name a plugin was loaded, is not under test.
        path = found.relative_to(root).as_posix() if found.is_relative_to(root) else ""
        if path.startswith(AREAS):
            by_line = data.contexts_by_lineno(file)
            lines[path] = {line: sorted(index[t] for t in by_line[line] if t in index) for line in sorted(by_line)}
            sources[path] = (root / path).read_text(encoding="utf-8")
    nightly = [entry["test"] for entry in ran if entry["nightly"]]
    return Recording(seconds, lines, sources, files_of(root, backend), nightly)


def _read(path: Path) -> Recording | None:
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    found["lines"] = {file: {int(n): tests for n, tests in by_line.items()} for file, by_line in found["lines"].items()}
    return Recording(**found)
