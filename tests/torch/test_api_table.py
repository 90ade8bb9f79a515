"""Every public name of torch's distributed tensors is here, or it is said why not; the page is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hyper_parallel.testing import api_notes, api_table

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_torch.md"
#: The page is made with this release; with others names may come and go.
MADE_WITH = "2.15"


def test_nothing_is_missing_without_an_explanation() -> None:
    if not torch.__version__.startswith(MADE_WITH):
        pytest.skip(f"the notes are about torch {MADE_WITH}")
    assert api_table.unexplained(api_table.rows()) == []


def test_the_page_shows_the_table() -> None:
    """If not: python -m hyper_parallel.testing.api_table --write docs/coming_from_torch.md."""
    if not torch.__version__.startswith(MADE_WITH):
        pytest.skip(f"the page is about torch {MADE_WITH}")
    text = PAGE.read_text(encoding="utf-8")
    assert api_table.with_table(text, api_table.rows()) == text


def test_notes_are_about_names_that_there_are() -> None:
    if not torch.__version__.startswith(MADE_WITH):
        pytest.skip(f"the notes are about torch {MADE_WITH}")
    found = {row.theirs[1]: row for row in api_table.rows()}
    for notes in (api_notes.NOT_HERE, api_notes.DIFFERENT, api_notes.MORE):
        assert set(notes) <= set(found)
    assert all(found[name].state == "not here" for name in api_notes.NOT_HERE)
    assert all(found[name].state == "differs" for name in api_notes.DIFFERENT)
    assert not set(api_notes.DIFFERENT) & set(api_notes.MORE)


def test_what_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A name, and a keyword."""
    monkeypatch.setattr(api_notes, "NOT_HERE", {})
    monkeypatch.setattr(api_table, "NOT_HERE", {})
    monkeypatch.setattr(api_table, "DIFFERENT", {})
    wrong = api_table.unexplained(api_table.rows())
    assert "torch.distributed.tensor.experimental.context_parallel is not here" in wrong
    assert "torch.distributed.tensor.experimental.local_map takes spmd_types" in wrong
    assert api_table.main([]) == 1 and "unexplained: " in capsys.readouterr().out


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{api_table.BEGIN}\nold\n{api_table.END}\nafter\n", encoding="utf-8")
    assert api_table.main(["--write", str(page)]) == 0 or not torch.__version__.startswith(MADE_WITH)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "| `DTensor` |" in text and "old" not in text
