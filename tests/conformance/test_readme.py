"""The README's script for the framework under test runs as it stands, on two processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs import ROOT, program_of, run_on_two


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_script(platform_name: str, tmp_path: Path, address: str) -> None:
    script = tmp_path / "script.py"
    name = "mlp_mindspore.py" if platform_name == "mindspore" else "mlp_torch.py"
    script.write_text(program_of(ROOT / "README.md", name))
    outputs = run_on_two(script, address)
    errors = [float(error) for error in re.findall(r"gradient off by (\S+)", outputs[0])]
    assert len(errors) == 4, outputs[0]
    assert max(errors) < 1e-5
