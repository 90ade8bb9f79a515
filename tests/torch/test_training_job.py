"""The programs of docs/tutorials/training_job.md, which import its gpt_model.py.

A run of train_gpt.py on 2 x 2 ranks goes on with 2. The losses of train_sequence.py are those of one rank.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, program_of

PAGE = ROOT / "docs" / "tutorials" / "training_job.md"


def run_in(folder: str, name: str) -> tuple[list[float], list[Any]]:
    """Run a program in a folder that has the model; return its losses and the ids that it writes."""
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        found = runpy.run_path(name)
    finally:
        os.chdir(before)
        sys.path.remove(folder)
        sys.modules.pop("gpt_model", None)
    return found["losses"], found["ids"].tolist() if "ids" in found else []


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the three programs."""
    for name in ("gpt_model.py", "train_gpt.py", "train_sequence.py"):
        (tmp_path / name).write_text(program_of(PAGE, name))
    return str(tmp_path)


@pytest.mark.nightly
def test_a_job_goes_on_with_fewer_ranks(pool: Any, folder: str) -> None:
    first, second = pool.run(4, run_in, folder, "train_gpt.py"), pool.run(2, run_in, folder, "train_gpt.py")
    assert sorted(path.name for path in Path(folder, "run").glob("step-*")) == ["step-30", "step-40"]
    assert all(ids == first[0][1] for _, ids in first) and all(ids == second[0][1] for _, ids in second)
    losses = [sum(losses) / len(losses) for losses in zip(*[losses for losses, _ in first], strict=True)]
    assert losses[-1] < 0.5 * losses[0]
    assert max(second[0][0]) < 1.3 * losses[-1], "the second run did not go on where the first one ended"
    assert second[0][0][-1] < 0.6 * losses[-1]


def test_a_distributed_batch_has_the_losses_of_one_rank(pool: Any, folder: str) -> None:
    (wanted, _), *_ = pool.run(1, run_in, folder, "train_sequence.py")
    assert wanted[-1] < wanted[0]
    for losses, _ in pool.run(4, run_in, folder, "train_sequence.py"):
        assert losses == pytest.approx(wanted, rel=1e-4)
