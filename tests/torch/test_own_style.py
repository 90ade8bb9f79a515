"""The style in docs/styles.md runs as it stands, on two processes, and computes what the single device does."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.test_readme import run_on_two, script_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "styles.md"


def test_script(tmp_path: Path) -> None:
    assert max(run_on_two(script_of("low_rank.py", PAGE), tmp_path / "script.py")) < 1e-5
