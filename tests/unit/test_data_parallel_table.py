"""The table of data parallelism: its rows, and the results of the nightly run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from hyper_parallel.testing.extent import everything
from tests.support.data_parallel_table import CHOICES, full_set, pairs, settle, title
from tests.support.pairs import covering, drawn

RECORD = Path(__file__).resolve().parents[2] / "ci" / "last_nightly.json"


def together(rows: list[dict[str, Any]], count: int) -> set:
    return {group for row in rows for group in itertools.combinations(sorted(row.items(), key=repr), count)}


def test_all_pairs_of_small_choices() -> None:
    choices = {"a": (0, 1, 2), "b": (0, 1), "c": (0, 1)}
    wanted = {
        (x, y) for x, y in itertools.combinations(((k, v) for k in choices for v in choices[k]), 2) if x[0] != y[0]
    }
    rows = covering(choices)
    assert together(rows, 2) == wanted and len(rows) <= 8


def test_choices_without_a_meaning() -> None:
    """``b`` means something with ``a`` alone."""
    choices = {"a": (False, True), "b": (False, True), "c": (0, 1)}
    rows = covering(choices, lambda row: {**row, "b": row["b"] and row["a"]})
    assert {(row["a"], row["b"]) for row in rows} == {(False, False), (True, False), (True, True)}
    assert {(row["b"], row["c"]) for row in rows} == set(itertools.product((False, True), (0, 1)))


def test_every_choice_meets_every_other() -> None:
    met = together(pairs(), 2)
    for a, b in itertools.combinations(sorted(CHOICES), 2):
        for x, y in itertools.product(CHOICES[a], CHOICES[b]):
            row = settle({**{kind: values[0] for kind, values in CHOICES.items()}, a: x, b: y})
            if row[a] == x and row[b] == y:
                assert ((a, x), (b, y)) in met, (a, x, b, y)


def test_the_full_set() -> None:
    rows = full_set(settle, 5, 1)
    assert rows[: len(pairs())] == pairs() and rows[-5:] == drawn(CHOICES, settle, 5, 1)
    assert len(together(rows, 3)) > len(together(pairs(), 3))
    assert all(settle(row) == row for row in rows)
    assert title({kind: values[0] for kind, values in CHOICES.items()}) == "plain"


def test_the_last_run_found_nothing() -> None:
    """Every table has run, whole; a part that failed has to be mended. A nightly run judges itself."""
    known = json.loads(RECORD.read_text())
    assert known.keys() >= {"torch-cpu-rows", "torch-cpu-compiled-rows", "mindspore-rows"}
    for name, run in known.items():
        if "rows" in run:
            least = 18 if "compiled" in name else len(pairs())
            assert run["rows"] >= least and run["rows"] == run["passed"] + run["failed"], run
        assert everything() or not (run["failed"] or run["problem"]), run
