"""The programs of docs/rules.md run as they stand, on two processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import ROOT, program_of, run_on_two


@pytest.mark.parametrize(
    ("name", "placed"),
    [("cross.py", "Shard(dim=0)"), pytest.param("bilinear.py", "Partial(sum)", marks=pytest.mark.nightly)],
)
def test_program(tmp_path: Path, name: str, placed: str) -> None:
    script = tmp_path / name
    script.write_text(program_of(ROOT / "docs" / "rules.md", name))
    assert all(f"placed {placed}" in output for output in run_on_two(script))
