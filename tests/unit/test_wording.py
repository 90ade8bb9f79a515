"""`ci/wording.py` finds its offences, and refuses a rise, a new file with offences and a fall without a record."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

MODULE = '''"""Modes of a run."""

def first(x):  # what is given
    """That of a caller. It gives what it got."""
    raise ValueError(f"nobody wants {x}, what the caller knows")

def second(x):
    """Return one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen,
    sixteen, seventeen, eighteen, nineteen, twenty.

    Args:
        x: an argument, which may have a sentence of as many words as it likes to have, since nobody counts the words
            of arguments here.
    """
    what_is = x

def third(x):
    """Whether it is known."""
'''


@pytest.fixture
def wording(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ci/wording.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "ci")
    return importlib.import_module("wording")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one module and one page."""
    for folder in ("ci", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "ci" / "module.py").write_text(MODULE)
    (tmp_path / "docs" / "page.md").write_text("It says what is there.\n\nWhat it does is beside the point.\n")
    return tmp_path


def test_what_is_found(wording: Any, project: Path) -> None:
    assert wording.count(project) == {
        "openings": {"ci/module.py": 2},
        "clauses": {"ci/module.py": 3, "docs/page.md": 2},
        "words": {"ci/module.py": 2, "docs/page.md": 1},
        "sentences": {"ci/module.py": 1},
    }
    found = list(wording.offences(project / "ci" / "module.py"))
    assert ("openings", 4, "That of a caller. It gives what it got.") in found
    assert ("openings", 18, "Whether it is known.") in found
    assert [line for rule, line, _ in found if rule == "clauses"] == [3, 4, 5]


def test_what_is_refused(wording: Any, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--root", str(project)]
    assert wording.main([*run, "--write"]) == 0
    assert wording.main(run) == 0
    page = project / "docs" / "page.md"
    words = page.read_text()
    capsys.readouterr()
    for text, says in (
        (f"{words}\nAnd what is not.\n", "docs/page.md: 3 of 'clauses', 2 on record: a relative clause has its noun"),
        ("Nothing.\n", "docs/page.md: 0 of 'clauses', 2 on record: record it with --write"),
    ):
        page.write_text(text)
        assert wording.main(run) == 1
        assert says in capsys.readouterr().out
    page.write_text(words)
    (project / "ci" / "new.py").write_text('"""Of new things."""\n')
    assert wording.main(run) == 1
    assert capsys.readouterr().out.startswith("ci/new.py: 1 of 'openings', 0 on record: a docstring begins with")


def test_places(wording: Any, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wording.main(["--root", str(project), "--list", "words"]) == 0
    assert "docs/page.md:3: What it does is beside the point." in capsys.readouterr().out


def test_the_record_is_of_these_rules(wording: Any) -> None:
    assert set(json.loads((ROOT / wording.RECORD).read_text())) == set(wording.RULES)


@pytest.mark.nightly
def test_a_sample_is_drawn_with_a_seed(wording: Any, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = []
    for seed in ("5", "5", "6"):
        assert wording.main(["--sample", seed]) == 0
        drawn.append(capsys.readouterr().out.splitlines())
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 80 and all(line.startswith("hyper_parallel/") for line in drawn[0][:40])
