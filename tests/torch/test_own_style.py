"""The style in docs/styles.md runs as it stands, on two processes, and computes the result of the single device."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.programs import ROOT, program_of, run_on_two


def test_script(tmp_path: Path) -> None:
    script = tmp_path / "low_rank.py"
    script.write_text(program_of(ROOT / "docs" / "styles.md", script.name))
    errors = [float(error) for error in re.findall(r" off by (\S+)", run_on_two(script)[0])]
    assert len(errors) == 4 and max(errors) < 1e-5
