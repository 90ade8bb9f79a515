"""The pictures of the documentation are those that the library draws."""

from __future__ import annotations

import pytest

from tests.torch.pictures import FOLDER, drawn


@pytest.mark.nightly
def test_pictures() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    found = drawn()
    assert sorted(found) == sorted(there)
    differing = [name for name in found if found[name] != there[name]]
    assert not differing, "HYPER_PARALLEL_PLATFORM=torch-cpu python -m tests.torch.pictures draws them anew"
    pages = "".join(path.read_text(encoding="utf-8") for path in FOLDER.parent.rglob("*.md"))
    assert [name for name in found if f"pictures/{name})" not in pages] == []
