"""Which tests reach which line: made from a whole run of a backend's tests, kept outside git.

`record` runs the tests under coverage with `ci.mutants.recording`, once per backend, and later those files of tests
that changed. The map keeps the sources it was made from: a line is looked up where it stood then, so that a map stays
of use while other lines change.
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
from pathlib import Path

from ci.mutants.mutations import AREAS, Mutation, function_at

BUILD = Path("build") / "mutants"
#: backend -> the folders of its tests; unit tests count for one of them, since they run without a framework.
FOLDERS = {
    "torch-cpu": ("tests/unit", "tests/conformance", "tests/torch"),
    "mindspore": ("tests/conformance", "tests/mindspore"),
}
#: What the map depends on.
WATCHED = (*AREAS, "hyper_parallel/testing", "tests")
#: Seconds that one test costs beside its own, so that a few tests are preferred to many.
EACH = 0.02


class Reach:
    """The map of one backend; see the module.

    Attributes:
        seconds: test -> how long it took. Tests that failed then are left out.
        lines: file -> line -> the tests, by index into ``tests``.
        sources: file -> its text when the map was made.
    """

    def __init__(self, tests: list[str], seconds: list[float], lines: dict, sources: dict[str, str], digest: str):
        self.tests = tests
        self.seconds = dict(zip(tests, seconds, strict=True))
        self.lines: dict[str, dict[int, list[int]]] = lines
        self.sources = sources
        self.digest = digest
        #: test -> how many lines it reaches: the fewer, the closer it looks at each.
        self.breadth: dict[str, int] = dict.fromkeys(tests, 0)
        for by_line in lines.values():
            for indices in by_line.values():
                for i in indices:
                    self.breadth[tests[i]] += 1

    def of_lines(self, path: str, source: str, lines: Iterable[int]) -> set[str]:
        """The tests that reach any of these lines of a file, whose text is ``source`` now."""
        then = self._then(path, source)
        by_line = self.lines.get(path, {})
        return {self.tests[i] for line in lines for i in by_line.get(then.get(line, 0), ())}

    def rounds(self, mutation: Mutation, source: str) -> list[list[str]]:
        """The tests for a mutation, the closest and quickest first: those that reach its line, then those that reach
        its function, then those that reach its file. Each test once."""
        around = function_at(source, mutation.line)
        everything = range(1, source.count("\n") + 2)
        # Code on the level of a module runs when it is imported, for whichever test comes first: its line says nothing.
        near = [range(around[1], around[2] + 1)] if around else []
        sets = [self.of_lines(mutation.path, source, [mutation.line])] if around else []
        sets += [self.of_lines(mutation.path, source, lines) for lines in [*near, everything]]
        words = set(re.findall(r"[a-z]{3,}", (mutation.text + (around[0] if around else "")).lower()))
        seen: set[str] = set()
        rounds = []
        for tests in sets:
            rounds.append(self._closest_first(tests - seen, words | set(Path(mutation.path).stem.split("_"))))
            seen |= tests
        return rounds

    def _closest_first(self, tests: set[str], words: set[str]) -> list[str]:
        """In turn one test of each test function: the cases of one function are much alike."""
        functions: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda test: (-_shared(words, test), self.seconds[test])):
            functions.setdefault(test.partition("[")[0], []).append(test)

        def distance(cases: list[str]) -> float:
            narrow = min(self.breadth[test] for test in cases) / 1000
            return (narrow + self.seconds[cases[0]]) / (1 + _shared(words, cases[0]))

        ordered = sorted(functions.values(), key=distance)
        longest = max(map(len, ordered), default=0)
        return [cases[i] for i in range(longest) for cases in ordered if i < len(cases)]

    def _then(self, path: str, source: str) -> dict[int, int]:
        """Line now -> the same line when the map was made."""
        before = self.sources.get(path, "")
        if before == source:
            return {line: line for line in range(1, source.count("\n") + 2)}
        match = difflib.SequenceMatcher(None, before.split("\n"), source.split("\n"), autojunk=False)
        return {b + i + 1: a + i + 1 for a, b, size in match.get_matching_blocks() for i in range(size)}


def _shared(words: set[str], test: str) -> int:
    return len(words & set(re.findall(r"[a-z]{3,}", test.partition("::")[2].lower())))


def digest_of(root: Path) -> str:
    """What tells whether a map is stale."""
    total = hashlib.sha256()
    for area in WATCHED:
        for file in sorted((root / area).rglob("*.py")):
            total.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()


def environment(root: Path, backend: str) -> dict[str, str]:
    """The variables with which the tests of a backend run."""
    return {**os.environ, "HYPER_PARALLEL_PLATFORM": backend, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def record(root: Path, backend: str, python: str = sys.executable) -> None:
    """Run all tests of a backend and keep which line each reaches."""
    folder = root / BUILD / backend
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [python, "-m", "coverage", "run", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "ci.mutants.recording", f"--record={folder}", *FOLDERS[backend]]
    # The tracer of newer Pythons sees each line once only, for the first test that comes there.
    variables = {"COVERAGE_FILE": str(folder / "coverage"), "COVERAGE_CORE": "ctrace"}
    with (folder / "log.txt").open("w") as log:
        subprocess.run(
            command, cwd=root, env=environment(root, backend) | variables, check=False, stdout=log, stderr=log
        )
    take(root, backend)


def take(root: Path, backend: str) -> None:
    """Make the map of what `record` left."""
    import coverage

    folder = root / BUILD / backend
    combined = folder / "combined" / "coverage"
    combined.parent.mkdir(exist_ok=True)
    combine = [sys.executable, "-m", "coverage", "combine", "--keep", "--quiet", f"--data-file={combined}", str(folder)]
    subprocess.run(combine, cwd=root, check=True)
    ran = [json.loads(line) for line in (folder / "tests.jsonl").read_text().splitlines()]
    passed = {entry["test"]: entry["seconds"] + EACH for entry in ran if entry["passed"]}
    tests = list(passed)
    index = {test: i for i, test in enumerate(tests)}
    data = coverage.CoverageData(str(combined))
    data.read()
    lines, sources = {}, {}
    for file in data.measured_files():
        path = Path(file).resolve().relative_to(root).as_posix() if Path(file).is_absolute() else file
        if path.startswith(AREAS):
            by_line = data.contexts_by_lineno(file)
            lines[path] = {line: sorted(index[t] for t in by_line[line] if t in index) for line in sorted(by_line)}
            sources[path] = (root / path).read_text(encoding="utf-8")
    found = {"digest": digest_of(root), "tests": tests, "seconds": list(passed.values()), "lines": lines}
    (folder / "map.json").write_text(json.dumps({**found, "sources": sources}))


def load(root: Path, backend: str) -> Reach | None:
    """The map of a backend, or None when there is none."""
    path = root / BUILD / backend / "map.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    lines = {file: {int(n): tests for n, tests in by_line.items()} for file, by_line in found["lines"].items()}
    return Reach(found["tests"], found["seconds"], lines, found["sources"], found["digest"])
