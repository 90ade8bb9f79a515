"""Counts that stand for speed, without a clock. A step of the standard models makes so many DTensors and dispatches so
many operations. It calls so many functions, builds so many nodes, and communicates as hand-written code does.

A change may make a number smaller, or be worth a larger one. Then ``python -m tests.torch.costs --write`` puts the new
table here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.torch.costs import Cost, Counted

pytestmark = pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="counted on torch-cpu, once"
)

#: model -> forward and backward: Cost(dtensors, dispatches, calls, nodes, collectives), see `costs.Cost`. The same with
#: torch 2.13, 2.14 and 2.15.
EXPECTED: dict[str, tuple[Cost, Cost]] = {
    "MLP": (
        Cost(0, 0, 14, 12, "1 all_reduce (256 B)"),
        Cost(0, 0, 6, 0, "1 all_reduce (256 B)"),
    ),
    "MLP, DTensors between modules": (
        Cost(4, 1, 42, 12, "1 all_reduce (256 B)"),
        Cost(0, 0, 14, 0, "1 all_reduce (256 B)"),
    ),
    "Llama block": (
        Cost(0, 0, 43, 76, "2 all_reduce (2048 B)"),
        Cost(0, 0, 11, 0, "2 all_reduce (2048 B)"),
    ),
    "Llama block, DTensors between modules": (
        Cost(41, 31, 331, 78, "2 all_reduce (2048 B)"),
        Cost(0, 0, 19, 0, "2 all_reduce (2048 B)"),
    ),
    "Llama block, sequence parallel": (
        Cost(4, 0, 99, 85, "2 all_gather (512 B), 2 reduce_scatter (2048 B)"),
        Cost(0, 0, 50, 0, "2 all_gather (512 B), 1 all_reduce (128 B), 2 reduce_scatter (2048 B)"),
    ),
    "Llama block, sequence parallel, DTensors between modules": (
        Cost(43, 29, 363, 87, "2 all_gather (512 B), 2 reduce_scatter (2048 B)"),
        Cost(0, 0, 58, 0, "2 all_gather (512 B), 1 all_reduce (128 B), 2 reduce_scatter (2048 B)"),
    ),
}


@pytest.fixture(scope="module")
def counted() -> dict[str, Counted]:
    """Counted in a process of its own, because a process has one default group."""
    done = subprocess.run([sys.executable, "-m", "tests.torch.costs", "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    return {
        title: Counted(Cost(*forward), Cost(*backward), (hand_written[0], hand_written[1]))
        for title, (forward, backward, hand_written) in table.items()
    }


@pytest.mark.parametrize("title", EXPECTED)
def test_cost(counted: dict[str, Counted], title: str) -> None:
    got = counted[title]
    assert (got.forward, got.backward) == EXPECTED[title], (
        f"the row is now\n    {title!r}: (\n        {got.forward},\n        {got.backward},\n    ),\n"
        "python -m tests.torch.costs --write puts all rows there"
    )


@pytest.mark.parametrize("title", EXPECTED)
def test_collectives_are_those_of_hand_written_code(counted: dict[str, Counted], title: str) -> None:
    got = counted[title]
    assert (got.forward.collectives, got.backward.collectives) == got.hand_written


def test_table_is_complete(counted: dict[str, Counted]) -> None:
    assert list(counted) == list(EXPECTED)
