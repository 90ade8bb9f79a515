"""Every public function of MindSpore, distributed: none gives another number than one device, and none hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mindspore.operators import UNSTEADY
from tests.support.operator_table.checks import as_good_as_the_page, operator_pool
from tests.support.operator_table.exchange import OperatorPool

__all__ = ["operator_pool"]


def test_operators_are_as_the_page_says(operator_pool: OperatorPool) -> None:
    as_good_as_the_page(operator_pool, at_least=633)


#: Ends its process.
DEADLY = "ops.logit"


def look_at(*names: str) -> subprocess.CompletedProcess:
    """Call functions again and again in a process of their own."""
    command = [sys.executable, "-m", "tests.mindspore.unsteady", *names]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_what_differs_from_call_to_call() -> None:
    """Operators listed as unsteady differ between calls; compare one again when MindSpore is mended."""
    names = [name for name in UNSTEADY if name != DEADLY]
    run = look_at(*names)
    words = {"forward": "result", "backward": "gradient"}
    steady = [name for name in names if f"{name}: {words[UNSTEADY[name]]} differs" not in run.stdout]
    assert run.returncode == 0 and not steady, run.stderr


def test_what_ends_the_process() -> None:
    run = look_at(DEADLY)
    assert run.returncode < 0 or f"{DEADLY}: gradient differs" in run.stdout
