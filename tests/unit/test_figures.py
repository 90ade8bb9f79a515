"""`ci/figures.py`: which figures of the pages have a commit, how old it is, and which have none."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ci import figure_tables, figures

ROOT = Path(__file__).resolve().parents[2]
PAGE = """\
# What it costs

A step took 3 s on 2026-11-20 (`{old}`), on two cores.

| | to hand-written |
|---|---|
| MLP | 0.70 (0.68 to 0.72), 0.86 | 1.00 |

## A run of a benchmark

<!-- 2026-11-25, `{new}` -->

It took 4 s.

It took 5 s of that.

## What has no commit

It takes 6 s.

The time-out is 7 s.
"""


def git(root: Path, *command: str) -> str:
    author = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *author, *command], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(root: Path) -> str:
    git(root, "commit", "--quiet", "--allow-empty", "-m", "more")
    return git(root, "rev-parse", "--short=8", "HEAD")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one page, one figure of which is three commits old and one is two."""
    git(tmp_path, "init", "--quiet")
    old, new = commit(tmp_path), commit(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(PAGE.format(old=old, new=new))
    (tmp_path / "CHANGELOG.md").write_text("It took 9 s.\n")
    (tmp_path / "README.md").write_text("No figure.\n")
    git(tmp_path, "add", ".")
    commit(tmp_path)
    commit(tmp_path)
    return tmp_path


def test_list(project: Path, capsys: pytest.CaptureFixture) -> None:
    assert figures.main(["--root", str(project)]) == 0
    old, new, sums, empty, head, bare = capsys.readouterr().out.splitlines()
    assert old.startswith("docs/page.md:3 ") and old.endswith("2026-11-20     3 commits")
    assert new.startswith("docs/page.md:11 ") and new.endswith("2026-11-25     2 commits")
    assert sums == "2 with a commit, 0 of them older than 200 commits or of an unknown one" and empty == ""
    assert (head, bare) == ("1 without a commit:", "docs/page.md:19: It takes 6 s.")


def test_old_and_unknown_ones(project: Path, capsys: pytest.CaptureFixture) -> None:
    """Marks for both, and with ``--strict`` an error, as where a figure has no commit."""
    page = project / "docs" / "page.md"
    page.write_text(page.read_text().partition("## What has no commit")[0])
    strict = ["--root", str(project), "--strict"]
    assert figures.main([*strict, "--older", "3"]) == 0
    assert figures.main([*strict, "--older", "2"]) == 1
    assert "3 commits  OLD\n" in capsys.readouterr().out
    page.write_text(page.read_text() + "Since 2026-11-26, `0123456789`, it is 2.\n")
    assert figures.main(strict) == 1
    assert "docs/page.md:17  0123456789  2026-11-26                UNKNOWN\n" in capsys.readouterr().out
    page.write_text("It takes 6 s.\n")
    assert figures.main(strict) == 1
    assert figures.main(strict[:2]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "An operation costs 3 us.",
        "An operation: 3 µs",
        "The gate took 9 minutes on\na slow machine.",
        "Half of it, 0.50 (0.49 to 0.51) of the time.",
        "| a | 0.50 (0.4) | 1.25 |",
        "All passed on 2026-11-20.",
        "On 2026-11-20 (`b2500a27`) it took 3 s.\n\nIt took 2 s before.",
        "It took 3 s (2026-11-20, `b2500a27`).\n\n## More\n\n- It takes 2 s.",
    ],
)
def test_what_needs_a_commit(text: str) -> None:
    assert len(figures.unstamped("a.md", text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "The time-out is 3 s.",
        "| torch | 2.15.0 | 2005 | 0.5 |",
        "See [the run](#h200-2026-11-26).",
        "```text\nIt took 3 s.\n```",
        "<!-- made by x -->\n\nIt took 3 s.\n\n<!-- end -->",
        "On 2026-11-20 (`b2500a27`) it took 3 s.\n\n- In all, 0.5 times as long.\n\n| a | 0.50 | 1.25 |",
        "Since then (2026-11-20,\n`b2500a27`) it takes 3 s.",
    ],
)
def test_what_needs_none(text: str) -> None:
    assert figures.unstamped("a.md", text) == []


def test_commits_with_changes() -> None:
    (figure,) = figures.stamps("a.md", "x\n| 2026-11-24, `f28929e748+changes` |")
    assert (figure.place, figure.commit) == ("a.md:2", "f28929e748")


def test_every_measured_figure_of_this_project_has_a_commit() -> None:
    """Every figure has a stamp, see CONTRIBUTING.md, or is named with its kind in `NO_FIGURE`."""
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in figures.pages(ROOT)}
    assert [line for name, text in texts.items() for line in figures.unstamped(name, text)] == []
    assert len([stamp for name, text in texts.items() for stamp in figures.stamps(name, text)]) > 30


def test_what_is_no_figure_is_on_its_page() -> None:
    for page, words in figures.NO_FIGURE:
        assert words in (ROOT / page).read_text(encoding="utf-8"), (page, words)


def test_sections_are_what_programs_make_of_the_committed_results() -> None:
    """The sections are current; if not: python -m ci.figures --write."""
    assert [path.name for path in figure_tables.renewed(ROOT)] == []


def test_sections_of_other_results(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Other results make other pages, which ``--write`` writes, and nothing else."""
    data = {"ci/last_fuzz.json", "ci/last_mutants.json", figure_tables.BENCHMARKS}
    for name in {page for page, _ in figure_tables.SECTIONS.values()} | data:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert figures.main(["--root", str(tmp_path), "--write"]) == 0 and capsys.readouterr().out == ""
    record = tmp_path / "ci" / "last_fuzz.json"
    known = json.loads(record.read_text())
    record.write_text(json.dumps({**known, "mindspore": {**known["mindspore"], "programs": 12345}}))
    before = (tmp_path / "docs" / "fuzzing.md").read_text(encoding="utf-8")
    assert figures.main(["--root", str(tmp_path), "--write"]) == 0
    assert capsys.readouterr().out == "docs/fuzzing.md is written\n"
    after = (tmp_path / "docs" / "fuzzing.md").read_text(encoding="utf-8")
    (line,) = set(after.splitlines()) - set(before.splitlines())
    assert line.startswith("| `mindspore` | 12,345 | ")
    survivors = tmp_path / "ci" / "last_mutants.json"
    survivors.write_text(survivors.read_text().replace("lru_cache(maxsize=4096)", "a | b"))
    assert "`a \\| b -> lru_cache()` in `@a \\| b` |" in figure_tables.mutants(tmp_path)


def test_mutants_that_the_nightly_run_alone_notices(tmp_path: Path) -> None:
    (tmp_path / "ci").mkdir()
    record = tmp_path / "ci" / "last_mutants.json"
    known = json.loads((ROOT / "ci" / "last_mutants.json").read_text(encoding="utf-8"))
    mutant = {"where": "hyper_parallel/core/a.py", "change": "1 -> 2", "text": "x = 1", "verdict": "failed"}
    late = [{**mutant, "test": "t.py::test_a[b|c]"}, {**mutant, "verdict": "broken", "test": ""}]
    record.write_text(json.dumps({**known, "at night alone": late, "not tried at night": 3}))
    first, _, after = figure_tables.mutants(tmp_path).partition("The nightly run alone notices:")
    assert " by the gate and 2 by the nightly run alone (" in first.replace("\n", " ")
    assert "and 3 were not tried at night:" in first.replace("\n", " ")
    assert after.splitlines()[-2:] == [
        "| `core/a.py` | `1 -> 2` in `x = 1` | `t.py::test_a[b\\|c]` |",
        "| `core/a.py` | `1 -> 2` in `x = 1` | `broken` |",
    ]
