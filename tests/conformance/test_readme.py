"""The README's script, and the tutorial's for MindSpore, run as they stand, on two processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hyper_parallel.testing.extent import in_gate
from tests.support.programs import ROOT, program_of, run_on_two


@pytest.mark.parametrize("address", in_gate(["127.0.0.1", "localhost"], ["127.0.0.1"]))
def test_script(platform_name: str, tmp_path: Path, address: str) -> None:
    script = tmp_path / "script.py"
    torchs, mindspores = ("README.md", "mlp_torch.py"), ("docs/tutorials/mindspore.md", "mlp_mindspore.py")
    page, name = mindspores if platform_name == "mindspore" else torchs
    script.write_text(program_of(ROOT / page, name))
    outputs = run_on_two(script, address, anew=True)  # as a newcomer starts it
    errors = [float(error) for error in re.findall(r"gradient off by (\S+)", outputs[0])]
    assert len(errors) == 4, outputs[0]
    assert max(errors) < 1e-5
