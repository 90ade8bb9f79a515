"""Public reports as programs: the outcomes in docs/wrong_gradients.md, and the remedies."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import hyper_parallel
from hyper_parallel import get_platform
from hyper_parallel.testing.spmd import on_mesh
from tests.support.report_table import PAGE, RECORD, outcomes, with_table
from tests.torch import report_programs as programs
from tests.torch.report_runs import combined, outcome
from tests.torch.reports import REPORTS, Report

REMEDIES = [
    Report("weight", "", lambda t: programs.weight_to_local(t, said=True)),
    Report("experts", "", lambda t: programs.experts(t, said=True)),
]


def test_the_page_is_what_the_generator_makes() -> None:
    page, record = PAGE.read_text(encoding="utf-8"), json.loads(RECORD.read_text(encoding="utf-8"))
    assert with_table(page, record) == page, "write it anew: python -m tests.support.report_table --page"
    years = [thread for report in REPORTS for thread in report.threads.split(", ")]
    assert len(REPORTS) >= 24 and len(years) >= 40
    silent = [kind for kind, text in record["ours"].items() if text.startswith("wrong")]
    assert silent == ["loss times the ranks of a tensor mesh"], "a number of the program's own"


@on_mesh(names=("tp",))
def ours(mesh: Any) -> list[str]:
    return [outcome(report, hyper_parallel, mesh) for report in [*REPORTS, *REMEDIES]]


@pytest.mark.nightly
def test_outcomes(pool: Any) -> None:
    if get_platform().device_type != "cpu":
        pytest.skip("the record is that of CPUs")
    found = list(map(combined, zip(*pool.run(2, ours), strict=True)))
    wanted = json.loads(RECORD.read_text(encoding="utf-8"))["ours"]
    assert {report.kind: text for report, text in zip(REPORTS, found, strict=False)} == wanted
    assert found[len(REPORTS) :] == ["right", "right"]


@pytest.mark.nightly
def test_outcomes_of_torch() -> None:
    """Torch's outcomes are those of the record: a release of torch that mends one changes the page."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if get_platform().device_type != "cpu" or torch.__version__.partition("+")[0] != record["torch"]:
        pytest.skip("the record is that of another torch, and of CPUs")
    assert outcomes("theirs")["outcomes"] == record["theirs"]
