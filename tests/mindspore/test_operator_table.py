"""Every public function of MindSpore, distributed: none gives another number than one device, and none hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mindspore.operators import UNSTEADY
from tests.support.operator_table.checks import none_wrong, operator_pool
from tests.support.operator_table.exchange import OperatorPool

__all__ = ["operator_pool"]


def test_no_operator_is_wrong(operator_pool: OperatorPool) -> None:
    none_wrong(operator_pool, at_least=633)


@pytest.mark.parametrize("name", UNSTEADY)
def test_what_differs_from_call_to_call(name: str) -> None:
    """Where MindSpore is mended, the operator is to be compared again."""
    command = [sys.executable, "-m", "tests.mindspore.unsteady", name]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    what = {"forward": "result", "backward": "gradient"}[UNSTEADY[name]]
    assert run.returncode < 0 or (run.returncode == 0 and f"{what} differs" in run.stdout), run.stdout + run.stderr
