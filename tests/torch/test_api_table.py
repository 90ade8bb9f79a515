"""Every public name of torch's distributed tensors is here, or the page says why not. The page is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.testing import api_notes, api_table
from tests.torch.support import of_release

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_torch.md"
#: Torch since -> names on the page, which is made with the newest, that are not there yet.
NOT_YET: dict[str, set[str]] = {
    "2.13": {"linspace", "logspace", "DeviceMesh.abort"},
    "2.14": {"DeviceMesh.abort"},
    "2.15": set(),
}
#: Torch since -> names, and a keyword of the page's release that they do not take yet.
TAKES_NOT_YET = {"2.13": {"DeviceMesh": "preserve_rank_order"}, "2.15": {}}
#: Torch since -> the lines that there would be without notes.
WITHOUT_NOTES = {
    "2.13": [],
    "2.14": [
        "torch.distributed.tensor.experimental.local_map takes spmd_types",
    ],
    "2.15": [
        "torch.distributed.device_mesh.DeviceMesh.abort is not here",
        "torch.distributed.tensor.experimental.local_map takes spmd_types",
    ],
}


def test_nothing_is_missing_without_an_explanation() -> None:
    assert api_table.unexplained(api_table.rows()) == []


def page_of_this_release() -> str:
    """Take the page as this release of torch would make it."""
    lines = PAGE.read_text(encoding="utf-8").splitlines(keepends=True)
    gone, further = of_release(NOT_YET), of_release(TAKES_NOT_YET)
    kept = [line for line in lines if not line.startswith(tuple(f"| `{name}` |" for name in gone))]
    for i, line in enumerate(kept):
        for name, keyword in further.items():
            if line.startswith(f"| `{name}` |"):
                kept[i] = line.replace(" |\n", f"; also `{keyword}` |\n")
    return "".join(kept)


def test_the_page_shows_the_table() -> None:
    """The page is current; if not, with the newest torch: python -m hyper_parallel.testing.api_table --write
    docs/coming_from_torch.md."""
    text = page_of_this_release()
    assert api_table.with_table(text, api_table.rows()) == text


def test_notes_are_about_names_that_there_are() -> None:
    found = {row.theirs[1]: row for row in api_table.rows()}
    for notes in (api_notes.NOT_HERE, api_notes.DIFFERENT, api_notes.MORE):
        assert set(notes) - set(found) <= of_release(NOT_YET)
    assert all(found[name].state == "not here" for name in api_notes.NOT_HERE if name in found)
    assert all(found[name].state == "differs" for name in api_notes.DIFFERENT if name in found)
    assert not set(api_notes.DIFFERENT) & set(api_notes.MORE)


def test_what_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A name, and a keyword."""
    monkeypatch.setattr(api_notes, "NOT_HERE", {})
    monkeypatch.setattr(api_table, "NOT_HERE", {})
    monkeypatch.setattr(api_table, "DIFFERENT", {})
    assert api_table.unexplained(api_table.rows()) == of_release(WITHOUT_NOTES)
    assert api_table.main([]) == 1 and "unexplained: " in capsys.readouterr().out


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{api_table.BEGIN}\nold\n{api_table.END}\nafter\n", encoding="utf-8")
    assert api_table.main(["--write", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "| `DTensor` |" in text and "old" not in text
