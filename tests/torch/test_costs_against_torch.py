"""Operations send no more than torch's DTensor sends for the same calls, and docs/communication_costs.md says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch.support import of_release
from tests.torch.torch_costs import BEFORE, BEGIN, DIFFERENT, END, PAGE, REDISTRIBUTED, Compared, Sent, page

pytestmark = pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="counted on torch-cpu, once"
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def compared() -> dict[str, list[Compared]]:
    """The costs, measured in a process of its own, which has no process groups yet."""
    command = [sys.executable, "-m", "tests.torch.torch_costs", "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    return {
        what: [
            Compared(c["name"], c["placements"], Sent(**c["ours"]), None if c["torch"] is None else Sent(**c["torch"]))
            for c in found
        ]
        for what, found in rows.items()
    }


@pytest.mark.parametrize("of", REDISTRIBUTED, ids=str)
def test_redistributions(compared: dict[str, list[Compared]], of: tuple) -> None:
    found = compared[str(of)]
    assert [c for c in found if c.is_more] == []
    assert len(found) > 15 and all(c.torch is not None for c in found)
    assert any(c.ours.messages for c in found)


def test_operations(compared: dict[str, list[Compared]]) -> None:
    found = compared["operations"]
    more = {(c.name, c.placements): c for c in found if c.is_more}
    before = of_release(BEFORE)
    assert set(more) - set(before) == set(DIFFERENT)
    assert sum(c.torch is None for c in found) < 5, [c for c in found if c.torch is None]
    softmax = next(c for c in found if (c.name, c.placements) == ("softmax along 1", "S1"))
    # Two reductions of a number a row; torch gathers 8 of 32 columns of each rank.
    assert (softmax.ours.messages, softmax.ours.bytes) == (2, 2 * 2 * 0.75 * 16 * 4)
    assert softmax.torch is not None and softmax.torch.bytes == 3 * 16 * 8 * 4
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    not_there = {}
    for c in found:
        if c.torch is not None and c.ours != c.torch:
            row = f"| `{c.name}` | {c.placements} | {c.ours} | {c.torch} |"
            if not any(line.startswith(row) for line in rows):
                not_there[c.name, c.placements] = (c.torch.messages, c.torch.bytes)
    assert not_there == before


def test_the_page_is_what_the_generator_makes(compared: dict[str, list[Compared]]) -> None:
    """The page is current; if not: python -m tests.torch.torch_costs. The page is of releases before which nothing
    differs."""
    text = PAGE.read_text(encoding="utf-8")
    assert of_release(BEFORE) or text.partition(BEGIN)[2].partition(END)[0] == page(compared)
