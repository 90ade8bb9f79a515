"""`ci/mutants`: the mutations there are, the tests that are run for each, the memory and the report."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from ci.mutants import mutations, reach, report, trial
from ci.mutants.__main__ import Trials
from ci.mutants.mutations import Mutation

ROOT = Path(__file__).parents[2]


def changes(source: str) -> set[tuple[str, str]]:
    return {(m.before, m.after) for m in mutations.mutations_of("a.py", textwrap.dedent(source))}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("y = a < b", {("a < b", "(a <= b)")}),
        ("y = a is not b", {("a is not b", "(a is b)")}),
        ("y = a == b == c", set()),
        ("y = 3", {("3", "4"), ("3", "2")}),
        ("y = False", {("False", "True")}),
        ("y = not a", {("not a", "a")}),
        ("y = -a", {("-a", "a")}),
        ("y = a and b", {("a and b", "(a or b)"), ("a and b", "a"), ("a and b", "b")}),
        ("y = a if c else b", {("a if c else b", "a"), ("a if c else b", "b")}),
        ("y = a // b", {("a // b", "(a * b)")}),
        ("y = f(a, b, *c)", {("f(a, b, *c)", "f(b, a, *c)")}),
        ("y = f(*a, b)", set()),
        ("y = f('a', b)", set()),
        ("y = isinstance(a, b)", set()),
        ("y = f(a, key=b)", {("f(a, key=b)", "f(a)")}),
        ("y = a[b:c]", {("b:c", ":c")}),
        ("y.x = a", {("y.x = a", "pass")}),
        ("y += a", {("y += a", "pass")}),
        ("f(a)", {("f(a)", "pass")}),
        ("raise ValueError('a' + b)", {("raise ValueError('a' + b)", "pass")}),
        ("return f(a)", {("f(a)", "a")}),
        ("return a + b", {("a + b", "(a - b)"), ("a + b", "a"), ("a + b", "b")}),
        ("if a: pass", {("a", "not (a)")}),
        ("y: int | None = a", set()),
        ("'''Adds 1 + 1.'''", set()),
        ("y = f'{a + 1}'", set()),
        ("__all__ = [f(a, b)]", set()),
        ("if TYPE_CHECKING: f(a)", set()),
        ("import a", set()),
    ],
)
def test_mutations(line: str, wanted: set[tuple[str, str]]) -> None:
    assert changes(f"def g(a, b, c, y):\n    {line}\n") == wanted


def test_only_what_stands_in_one_line() -> None:
    assert changes("y = f(\n    a < b,\n    c=1,\n)\n") == {("a < b", "(a <= b)"), ("1", "2"), ("1", "0")}


def test_apply() -> None:
    """Places are bytes: the text before them may be longer in UTF-8 than in characters."""
    source = "x = 'größer', a < b  # <\n"
    (mutation,) = mutations.mutations_of("a.py", source)
    assert mutation.apply(source) == "x = 'größer', (a <= b)  # <\n"
    with pytest.raises(ValueError, match=r"a\.py:1 has changed since the mutation was made"):
        mutation.apply("x = 'grosser', a < b\n")


@pytest.mark.nightly
def test_sample() -> None:
    """The sample is the same for a seed, with at most one mutation of a line. All areas are in it, and all mutations
    are valid Python that differs."""
    first = mutations.sample(ROOT, 120, 7)
    one = ("hyper_parallel/core/tensor_parallel",)
    assert mutations.sample(ROOT, 9, 7, one) == mutations.sample(ROOT, 9, 7, one) != mutations.sample(ROOT, 9, 8, one)
    assert len({(m.path, m.line) for m in first}) == len({m.key for m in first}) == 120
    for area in mutations.AREAS:
        assert any(m.path.startswith(area) for m in first)
    assert not mutations.LEFT_OUT & {m.path for m in first}
    assert all((ROOT / path).exists() for path in mutations.LEFT_OUT)
    assert len({m.kind for m in first}) > 8
    for m in first:
        source = (ROOT / m.path).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(m.apply(source))) != ast.dump(ast.parse(source)), m


def test_sample_stays_when_other_lines_change(tmp_path: Path) -> None:
    path = tmp_path / "hyper_parallel" / "core" / "a.py"
    path.parent.mkdir(parents=True)
    lines = [f"x{i} = {i} < y" for i in range(40)]
    path.write_text("\n".join(lines))
    before = {m.key for m in mutations.sample(tmp_path, 10, 1)}
    lines.insert(5, "import os")
    lines[20] = "x20 = y == 3"
    path.write_text("\n".join(lines))
    after = {m.key for m in mutations.sample(tmp_path, 10, 1)}
    assert len(before & after) >= 9


def test_function_at() -> None:
    source = "x = 1\ndef f(a=2):\n    b = 3\n    def g():\n        return 4\n    return g\nclass C:\n    d = 5\n"
    found = {line: mutations.function_at(source, line) for line in range(1, 9)}
    assert {line for line, function in found.items() if function is None} == {1, 2, 7, 8}
    assert found[3] == found[6] == ("f", 3, 6)
    assert found[5] == ("g", 5, 5)


# ---------------------------------------------------------------------- which tests
BEFORE = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x\n"


def recording(seconds: dict[str, float], lines: dict[int, list[int]], source: str = BEFORE) -> reach.Recording:
    return reach.Recording(seconds, {"a.py": lines}, {"a.py": source}, {})


def test_lines_are_looked_up_where_they_stood() -> None:
    found = recording({"t::one": 1.0, "t::two": 1.0}, {2: [0], 6: [1]})
    now = "import os\n" + BEFORE.replace("x + 1", "x + 2")
    assert found.of_lines("a.py", BEFORE, [2]) == {"t::one"}
    assert found.of_lines("a.py", now, [7]) == {"t::two"}
    assert found.of_lines("a.py", now, [3]) == set()  # a new line, which nothing has reached
    assert found.of_lines("b.py", BEFORE, [2]) == set()


def test_later_recordings_count() -> None:
    first = recording({"t.py::one": 1.0, "u.py::two": 1.0}, {2: [0, 1]})
    later = recording({"t.py::one": 2.0, "t.py::new": 3.0}, {2: [1], 6: [0]})
    both = reach.Reach([first, later])
    assert both.of_lines("a.py", BEFORE, [2]) == {"u.py::two", "t.py::new"}
    assert both.seconds == {"t.py::one": 2.0, "u.py::two": 1.0, "t.py::new": 3.0}
    assert both.breadth == {"t.py::one": 1, "u.py::two": 1, "t.py::new": 1}


def test_rounds() -> None:
    """Tests of the line, then of the function, then of the file. The quick ones come first, in turn of each
    function."""
    seconds = {"t::slow": 9.0, "t::quick[1]": 0.1, "t::quick[2]": 0.2, "t::other": 0.3, "t::far": 0.1, "t::near": 5.0}
    source = "def f(x):\n    y = x\n    return y + 1\n\n\ndef g(x):\n    return x\n"
    found = reach.Reach([recording(seconds, {2: [5], 3: [0, 1, 2, 3], 7: [4, 0]}, source)])
    (mutation, *_) = [m for m in mutations.mutations_of("a.py", source) if m.line == 3]
    assert found.rounds(mutation, source) == [
        ["t::quick[1]", "t::other", "t::slow", "t::quick[2]"],
        ["t::near"],
        ["t::far"],
    ]


def test_tests_with_the_words_of_the_line_come_first() -> None:
    source = "def f(x):\n    return softmax(x, -1)\n"
    found = reach.Reach([recording({"t::relu": 0.1, "t::test_op[softmax]": 0.15}, {2: [0, 1]}, source)])
    mutation = mutations.mutations_of("a.py", source)[0]
    assert found.rounds(mutation, source)[0] == ["t::test_op[softmax]", "t::relu"]


def test_on_the_level_of_a_module_the_file_counts() -> None:
    source = "X = 1\ndef f(x):\n    return x\n"
    found = reach.Reach([recording({"t::one": 1.0, "t::first_to_import": 1.0}, {1: [1], 3: [0]}, source)])
    mutation = mutations.mutations_of("a.py", source)[0]
    assert [sorted(tests) for tests in found.rounds(mutation, source)] == [["t::first_to_import", "t::one"]]


def test_which_tests_are_nightly(tmp_path: Path) -> None:
    """The latest recording counts; recordings older than nightly tests have none."""
    first, later = (recording({"t.py::one": 1.0, "t.py::two": 1.0}, {}) for _ in range(2))
    first.nightly, later.nightly = ["t.py::one"], ["t.py::two"]
    assert reach.Reach([first]).nightly == {"t.py::one"}
    assert reach.Reach([first, later]).nightly == {"t.py::two"}
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"seconds": {"t.py::one": 1.0}, "lines": {}, "sources": {}, "files": {}}))
    old = reach._read(path)
    assert old is not None and reach.Reach([old]).nightly == set()


class Passing:
    """A place in which all tests pass."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def mutate(self, mutation: Mutation | None, undo: Mutation | None = None) -> None:
        pass

    def run(self, tests: list[str], *args: Any) -> trial.Outcome:
        self.ran += tests
        return trial.Outcome("passed", "", tests)


@pytest.mark.parametrize(
    ("night", "ran"),
    [
        (False, ["t::near", "t::far", "tests/torch/test_costs.py::gate"]),
        (True, ["t::late", "t::near", "t::far", "tests/torch/test_costs.py::late"]),
    ],
)
def test_nightly_tests_are_left_out_of_the_gate_and_come_first_at_night(
    tmp_path: Path, night: bool, ran: list[str]
) -> None:
    (tmp_path / "a.py").write_text(BEFORE)
    costs = [f"tests/torch/test_costs.py::{name}" for name in ("gate", "late")]
    # The slow ones wait for the last round.
    seconds = {"t::near": 1.0, "t::late": 2.0, "t::far": 3.0, **dict.fromkeys(costs, 100.0)}
    found = recording(seconds, {2: [0, 1], 6: [2]})
    found.nightly = ["t::late", costs[1]]
    place = Passing()
    results = report.Results(tmp_path / "results.jsonl")
    trials = Trials(tmp_path, "torch-cpu", reach.Reach([found]), results, night=night)
    mutation = next(m for m in mutations.mutations_of("a.py", BEFORE) if m.line == 2)
    assert trials.attempt(place, mutation) == ("survived", "", len(ran))  # type: ignore[arg-type]
    assert place.ran == ran


# ---------------------------------------------------------------------- memory
def some_mutations() -> list[Mutation]:
    return mutations.mutations_of("a.py", "x = 1\ny = a < b\nz = a and b\n")


def test_results_go_on(tmp_path: Path) -> None:
    first, second, third, *_ = some_mutations()
    results = report.Results(tmp_path / "results.jsonl")
    assert results.verdict(first) == "not tried"
    assert results.is_open(first, "torch-cpu", False)
    results.add(first, "torch-cpu", "failed", "t::one", 3, 1.0)
    results.add(second, "torch-cpu", "survived", "", 9, 1.0)
    results.add(third, "torch-cpu", "doubted", "", 0, 0.0)
    again = report.Results(tmp_path / "results.jsonl")
    assert (again.verdict(first), again.verdict(second), again.verdict(third)) == ("failed", "survived", "not tried")
    assert not again.is_open(first, "mindspore", True)  # noticed is noticed
    assert again.is_open(second, "mindspore", False)
    assert not again.is_open(second, "torch-cpu", False)
    assert again.is_open(second, "torch-cpu", True)
    assert again.is_open(third, "torch-cpu", False)
    assert (again.test_of(first, "torch-cpu"), again.test_of(second, "torch-cpu")) == ("t::one", "")


def test_results_of_nights(tmp_path: Path) -> None:
    """Gates of other backends still try a mutant that a nightly run noticed; no other nightly run does."""
    first, second, *_ = some_mutations()
    results = report.Results(tmp_path / "results.jsonl")
    results.add(first, "torch-cpu", "survived", "", 3, 1.0)
    assert not results.is_open(first, "torch-cpu", False)
    assert results.is_open(first, "torch-cpu", False, night=True)
    results.add(first, "torch-cpu", "failed", "t::late", 9, 1.0, night=True)
    results.add(second, "torch-cpu", "failed", "t::one", 3, 1.0)
    results = report.Results(tmp_path / "results.jsonl")
    assert (results.verdict(first), results.verdict(second)) == ("noticed at night", "failed")
    assert results.is_open(first, "mindspore", False) and not results.is_open(first, "mindspore", True, night=True)
    assert not results.is_open(second, "torch-cpu", True, night=True)
    assert (results.test_of(first, "torch-cpu"), results.test_of(first, "torch-cpu", True)) == ("", "t::late")
    results.add(first, "mindspore", "hung", "t::two", 3, 1.0)
    assert results.verdict(first) == "hung"


def test_results_of_before_there_were_nights(tmp_path: Path) -> None:
    """Entries without a word of nights are the gate's."""
    first, *_ = some_mutations()
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"key": first.key, "backend": "torch-cpu", "verdict": "failed", "test": "t::one"}))
    assert report.Results(path).verdict(first) == "failed"


def test_report_of_nights(tmp_path: Path) -> None:
    first, second, third, *_ = some_mutations()
    results = report.Results(tmp_path / "results.jsonl")
    results.add(first, "torch-cpu", "survived", "", 3, 1.0)
    results.add(second, "torch-cpu", "failed", "t::one", 3, 1.0)
    results.add(third, "torch-cpu", "survived", "", 3, 1.0)
    found = report.summary(results, [first, second, third], 5)
    assert (found["noticed by the gate"], found["not tried at night"], found["at night alone"]) == (1, 2, [])
    assert "not tried at night: 2" in report.text(found)
    results.add(first, "torch-cpu", "failed", "t::late", 3, 1.0, night=True)
    results.add(third, "torch-cpu", "survived", "", 3, 1.0, night=True)
    found = report.summary(results, [first, second, third], 5)
    assert (found["noticed by the gate"], found["not tried at night"]) == (1, 0)
    assert found["verdicts"] | {"failed": 1, "noticed at night": 1, "survived": 1} == found["verdicts"]
    assert [(m["key"], m["verdict"], m["test"]) for m in found["at night alone"]] == [(first.key, "failed", "t::late")]
    assert [s["key"] for s in found["survivors"]] == [third.key]
    text = report.text(found)
    assert "1 noticed by the gate: 1 failed, 1 noticed at night, 1 survived" in text
    assert "at night failed" in text and "t::late" in text


def test_report(tmp_path: Path) -> None:
    """Reasons that were written by hand stay."""
    first, second, third, *_ = some_mutations()
    results = report.Results(tmp_path / "results.jsonl")
    results.add(first, "torch-cpu", "failed", "t::one", 3, 1.0)
    results.add(second, "torch-cpu", "survived", "", 9, 1.0)
    results.add(third, "mindspore", "not reached", "", 0, 1.0)
    (tmp_path / "ci").mkdir()
    path = tmp_path / "ci" / "last_mutants.json"
    for why in ("", "it only says how"):
        found = report.summary(results, [first, second, third], 5)
        report.write(tmp_path, found)
        kept = json.loads(path.read_text())
        assert kept["verdicts"] | {"failed": 1, "survived": 1, "not reached": 1} == kept["verdicts"]
        assert [s["key"] for s in kept["survivors"]] == [second.key, third.key]
        assert [s["why"] for s in kept["survivors"]] == [why, ""]
        kept["survivors"][0]["why"] = "it only says how"
        path.write_text(json.dumps(kept))
    assert "it only says how" in report.text(found)
    assert "1 failed, 1 survived, 1 not reached" in report.text(found)


# ---------------------------------------------------------------------- a small project
@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with four lines: the gate tests one, two are tested at night, by a test and by an amount. One is not
    tested."""
    pytest.importorskip("torch")
    root = tmp_path / "project"
    shutil.copytree(ROOT / "ci" / "mutants", root / "ci" / "mutants", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "hyper_parallel" / "testing", root / "hyper_parallel" / "testing")
    files = {
        "hyper_parallel/__init__.py": "",
        "hyper_parallel/core/__init__.py": "",
        "hyper_parallel/core/small.py": """\
            def tested(x):
                return x + 1


            def untested(x):
                return x - 1


            def late(x):
                return x + 2


            def much(x):
                return x + 3
            """,
        "tests/unit/test_small.py": """
            import pytest
            from hyper_parallel.core.small import late, much, tested
            from hyper_parallel.testing.extent import everything
            def test_small():
                assert [tested(0), tested(5)] == [1, 6]
            @pytest.mark.nightly
            def test_late():
                assert [late(0), late(5)] == [2, 7]
            def test_amount():
                assert not everything() or [much(0), much(5)] == [3, 8]
            """,
        "tests/unit/hanging.py": """
            from hyper_parallel.core.small import tested, untested
            def test_fine():
                assert untested(1) == 0
            def test_endless():
                while tested(0) != 1:
                    pass
            """,
        "pyproject.toml": """
            [tool.pytest.ini_options]
            pythonpath = ["."]
            markers = ["nightly"]
            [tool.coverage.run]
            branch = true
            parallel = true
            relative_files = true
            source_pkgs = ["hyper_parallel"]
            """,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    return root


@pytest.mark.nightly
def test_command(project: Path) -> None:
    """One mutant of each line. The mutant of the untested line survives, and a second run tries nothing again."""

    def run(*options: str) -> tuple[str, dict[str, Any]]:
        command = [sys.executable, "-m", "ci.mutants", "--backend=torch-cpu", "--at-once=1", *options]
        done = subprocess.run(command, cwd=project, check=False, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr, json.loads((project / "ci" / "last_mutants.json").read_text())

    output, found = run("--gate-only")
    assert "torch-cpu: 4 mutants" in output and "torch-cpu at night" not in output
    assert found["verdicts"] | {"failed": 1, "survived": 3} == found["verdicts"], output
    for tried in (3, 0):
        output, found = run()
        assert "torch-cpu: 0 mutants" in output and f"torch-cpu at night: {tried} mutants" in output
        assert found["verdicts"] | {"failed": 1, "noticed at night": 2, "survived": 1} == found["verdicts"], output
        late = {m["text"]: m["test"].rpartition("::")[2] for m in found["at night alone"]}
        assert late == {"return x + 2": "test_late", "return x + 3": "test_amount"}
        ((where, text),) = [(s["where"], s["text"]) for s in found["survivors"]]
        assert (where, text) == ("hyper_parallel/core/small.py", "return x - 1")
    assert "return x + 1" in (project / "hyper_parallel" / "core" / "small.py").read_text()
    assert not (project / "build" / "mutants" / "places" / "torch-cpu-0").exists()


@pytest.mark.nightly
def test_trial(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failing and hanging tests, in a copy; the mutation is taken back."""
    monkeypatch.setattr(trial, "HANG_SECONDS", 1.0)
    monkeypatch.setattr(trial, "_load", lambda: 1.0)
    path = "hyper_parallel/core/small.py"
    source = (project / path).read_text()
    mutation = Mutation(path, 2, 11, "x + 1", "x + 2", "constant", "return x + 1")
    small = "tests/unit/test_small.py::test_small"
    fine, endless = (f"tests/unit/hanging.py::test_{name}" for name in ("fine", "endless"))
    known = reach.Reach([recording({small: 0.1, fine: 0.1, endless: 0.1}, {})])

    def run(place: trial.Place, *tests: str, **options: Any) -> tuple[str, str, list[str]]:
        outcome = place.run([*tests], known, time.monotonic() + 300, **options)
        return outcome.verdict, outcome.test, outcome.passed

    with trial.Place(project, "torch-cpu", 0) as place:
        assert run(place, small, endless) == ("passed", "", [small, endless])
        place.mutate(mutation)
        assert "x + 2" in (place.folder / path).read_text()
        assert run(place, small, endless) == ("failed", small, [])
        assert run(place, fine, small, failures=2) == ("failed", small, [fine])
        assert run(place, fine, endless) == ("hung", endless, [fine])
        place.mutate(None, undo=mutation)
        assert (place.folder / path).read_text() == source
        assert run(place, endless) == ("passed", "", [endless])
    assert (project / path).read_text() == source
    assert not place.folder.exists()


# ---------------------------------------------------------------------- the last run
def test_last_run() -> None:
    """The last run: at most 5 % of the mutants survived, except equivalent ones, each with a reason."""
    last = json.loads((ROOT / report.LAST).read_text(encoding="utf-8"))
    survivors = last["survivors"]
    assert all(survivor["why"] for survivor in survivors), [s["key"] for s in survivors if not s["why"]]
    assert last["mutants"] >= 200 and not last["verdicts"]["not tried"] and not last["verdicts"]["not reached"]
    changing = [s for s in survivors if not s["why"].startswith("equivalent: ")]
    assert len(changing) <= 0.05 * last["mutants"], [s["key"] for s in changing]
