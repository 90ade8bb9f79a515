"""Random programs as data: one seed makes one program, with everything in them that they should have, and made
smaller."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel import PackedShard, Partial, Replicate, Shard, StridedShard
from hyper_parallel.testing.fuzz import campaign
from hyper_parallel.testing.fuzz.campaign import REPEATS, Outcome, put_together, run_seeds
from hyper_parallel.testing.fuzz.compare import _differs
from hyper_parallel.testing.fuzz.program import Leaf, Limits, Program, Step, generate, values_of
from hyper_parallel.testing.fuzz.record import add_run
from hyper_parallel.testing.fuzz.shrink import smallest
from hyper_parallel.testing.fuzz.words import WORDS

PROGRAMS = [generate(seed, Limits()) for seed in range(600)]


def test_a_seed_makes_one_program() -> None:
    assert [generate(seed, Limits()) for seed in range(50)] == PROGRAMS[:50]
    assert len(set(map(str, PROGRAMS[:50]))) == 50


def test_all_words_and_kinds_occur() -> None:
    words = {step.word for program in PROGRAMS for step in program.steps}
    assert words == {*WORDS, "redistribute"}
    leaves = [leaf for program in PROGRAMS for leaf in program.leaves]
    assert {leaf.dtype for leaf in leaves} == {"float16", "float32", "float64", "int64", "bool"}
    placements = [p for leaf in leaves for p in leaf.placements]
    assert {type(p) for p in placements} == {Replicate, Shard, PackedShard, StridedShard, Partial}
    nested = [leaf.placements for leaf in leaves if [p.is_shard() for p in leaf.placements] == [True, True]]
    assert {(type(p), type(q)) for p, q in nested if p.dim == q.dim} == {
        (Shard, Shard),
        (StridedShard, Shard),
        (PackedShard, Shard),
        (StridedShard, PackedShard),
    }
    assert {p.reduce_op for p in placements if isinstance(p, Partial)} == {"sum", "avg", "max", "min"}
    assert any(
        len(set(leaf.placements)) == 1 < len(leaf.placements) and leaf.placements[0].is_shard() for leaf in leaves
    )
    assert {program.mesh for program in PROGRAMS} == {(4,), (2,), (3,), (2, 2)}
    assert any(leaf.shape == () for leaf in leaves) and any(0 in leaf.shape for leaf in leaves)
    assert any(leaf.has_nan for leaf in leaves)
    assert any(program.second_order for program in PROGRAMS)
    assert any(program.writes for program in PROGRAMS)


def test_writes_reach_other_values() -> None:
    """Programs write through views: a value that is no result of the write changes."""
    changed = 0
    for program in PROGRAMS:
        for at, step in enumerate(program.steps):
            if step.word in WORDS and WORDS[step.word].writes:
                before = values_of(replace(program, steps=program.steps[:at]))
                after = values_of(replace(program, steps=program.steps[: at + 1]))
                changed += any(
                    i not in step.inputs and not np.array_equal(a, after[i], equal_nan=a.dtype.kind == "f")
                    for i, a in enumerate(before)
                )
    assert changed > 20


def test_limits() -> None:
    limits = Limits(writes_with_gradients=False, nan=False, second_order=False, dtypes=("float32", "int64", "bool"))
    programs = [generate(seed, limits) for seed in range(300)]
    assert not any(program.second_order for program in programs)
    assert not any(leaf.has_nan for program in programs for leaf in program.leaves)
    assert not any(leaf.requires_grad for program in programs if program.writes for leaf in program.leaves)


def program_with(word: str) -> Program:
    return next(p for p in PROGRAMS if any(s.word == word for s in p.steps) and len(p.steps) > 4)


@pytest.mark.parametrize("word", ["softmax", "cat", "set", "redistribute"])
def test_smallest(word: str) -> None:
    """The smallest program has the step that fails, the steps that it depends on, and one output."""
    program = program_with(word)
    asked = []

    def fails(smaller: Program) -> bool:
        asked.append(smaller)
        return any(step.word == word for step in smaller.steps)

    found = smallest(program, fails)
    assert sum(step.word == word for step in found.steps) == 1
    assert len(found.outputs) == 1
    assert len(found.steps) < len(program.steps)
    assert all(placement is Replicate() for leaf in found.leaves for placement in leaf.placements)
    values_of(found)  # it is a program
    assert len(asked) <= 200


def test_smallest_stops_asking() -> None:
    asked = []
    smallest(program_with("cat"), lambda program: bool(asked.append(program)), tries=3)
    assert len(asked) <= 3


def test_a_program_is_printed_in_a_few_lines() -> None:
    program = Program(
        7,
        (2,),
        (Leaf((4, 2), "float32", (Shard(0),), True, 3),),
        (Step("split", (0,), (2, 0)), Step("add", (1, 2), ())),
        (3,),
    )
    assert str(program).splitlines() == [
        "# seed 7, mesh (2,)",
        "v0 = float32[4, 2] placed [Shard(dim=0)], requires_grad",
        "v1, v2 = split(v0, 2, 0)",
        "v3 = add(v1, v2)",
        "compare v3",
    ]


def test_outcomes_of_ranks() -> None:
    right, refused, wrong = ("right", ""), ("refused", "ValueError: no"), ("wrong", "v1: off by 1")
    assert put_together(1, [right, right, None]).kind == "right"
    assert put_together(1, [refused, refused]).kind == "refused"
    assert put_together(1, [refused, right]).kind == "differs"
    both, only_plain = ("plain refused", "RuntimeError: no"), ("accepted", "RuntimeError: no")
    assert put_together(1, [only_plain, both]).kind == "plain refused"
    assert put_together(1, [right, wrong]).detail == "v1: off by 1"


class Scripted:
    """Stands for a pool: gives the outcome of a program, run after run."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = list(kinds)

    def run(self, ranks: int, job: Any, programs: list, family: str, timeout: float) -> list:
        if job is campaign.references:
            return [[None] * len(programs[rank::ranks]) for rank in range(ranks)]
        kind = self.kinds.pop(0)
        return [[(kind, "why")] * len(programs) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("kinds", "outcome"),
    [
        (("right",), Outcome(7, "right", "why")),
        (("wrong", *["right"] * REPEATS), Outcome(7, "unsteady", f"wrong once, then good {REPEATS} times: why")),
        (("wrong", "right", "differs"), Outcome(7, "wrong", "why")),
        (("wrong", *["refused"] * (REPEATS - 1), "wrong"), Outcome(7, "wrong", "why")),
    ],
)
def test_a_bad_program_runs_again(kinds: tuple[str, ...], outcome: Outcome) -> None:
    """A bad program stays bad if its second run is bad too."""
    pool = Scripted(*kinds)
    assert run_seeds(pool, range(7, 8)) == [outcome]
    assert not pool.kinds


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (np.float32([1.0, 2.0]), np.float32([1.0, 2.1])),
        (np.float32([1.0, 2.0]), np.float64([1.0, 2.0])),
        (np.float32([1.0]), np.float32([[1.0]])),
        (np.float32([1.0]), np.float32([np.nan])),
        (np.float32([np.inf]), np.float32([np.nan])),
        (np.int64([1]), np.int64([2])),
        (np.array([True]), np.array([False])),
    ],
)
def test_differences_are_seen(got: np.ndarray, wanted: np.ndarray) -> None:
    assert _differs(got, wanted)
    assert not _differs(got, got.copy())


def test_errors_that_rounding_makes() -> None:
    """An error that the program makes of a tiny one in its leaves is none; elsewhere it is."""
    got, wanted = np.float32([1.0, 2.5, np.inf]), np.float32([1.0, 2.0, 3.0])
    assert _differs(got, wanted)
    assert not _differs(got, wanted, np.array([0.0, 0.6, np.inf]))
    assert _differs(got, wanted, np.array([0.6, 0.4, np.inf]))
    assert not _differs(np.int64([1, 2]), np.int64([1, 3]), np.array([0.0, 10.0]))
    assert _differs(np.int64([1, 2]), np.int64([1, 3]), np.array([10.0, 0.0]))


def test_shaken_leaves() -> None:
    leaf = Leaf((3, 4), "float32", (Replicate(),), False, 5)
    one, two = leaf.values(1), leaf.values(2)
    assert one.dtype == np.float32 and not np.array_equal(one, two) and not np.array_equal(one, leaf.values())
    np.testing.assert_allclose(one, leaf.values(), atol=1e-5)
    whole = Leaf((3,), "int64", (Replicate(),), False, 5)
    assert np.array_equal(whole.values(1), whole.values())


def test_runs_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One of the frameworks may be missing here.
    monkeypatch.setattr("hyper_parallel.testing.fuzz.record.version", lambda framework: "1.0")
    file = tmp_path / "last_fuzz.json"
    add_run(file, "torch-cpu", "a", 5, 100, {"right": 90, "refused": 10}, 3.2)
    add_run(file, "torch-cpu", "a", 105, 50, {"right": 50}, 1.0)  # goes on where the last one ended
    add_run(file, "torch-cpu", "b", 155, 50, {"right": 50}, 1.0)
    add_run(file, "torch-cpu", "b", 955, 50, {"right": 50}, 1.0)
    add_run(file, "mindspore", "a", 1, 10, {"right": 10}, 1.0)
    record = json.loads(file.read_text())
    assert record["torch-cpu"]["programs"] == 250
    assert record["torch-cpu"]["outcomes"] == {"right": 240, "refused": 10}
    runs = [(run["commit"], run["first seed"], run["count"]) for run in record["torch-cpu"]["runs"]]
    assert runs == [("a", 5, 150), ("b", 155, 50), ("b", 955, 50)]
    assert record["mindspore"]["programs"] == 10


def test_a_bad_run_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "last_fuzz.json"
    add_run(file, "torch-cpu", "a", 1, 100, {"right": 100}, 1.0)
    add_run(file, "torch-cpu", "a", 101, 100, {"right": 99, "wrong": 1}, 1.0)
    record = json.loads(file.read_text())["torch-cpu"]
    assert (record["programs"], record["outcomes"]) == (100, {"right": 99, "wrong": 1})
    add_run(file, "torch-cpu", "b", 201, 30, {"right": 30}, 1.0)
    record = json.loads(file.read_text())["torch-cpu"]
    assert (record["programs"], record["outcomes"]) == (30, {"right": 30})


def test_results_in_row_major_order() -> None:
    """The result of `contiguous` is a view in a framework with row-major results, and a write reaches it; NumPy
    copies."""
    leaf = Leaf((2, 3), "float32", (Replicate(),), False, 5)
    steps = (
        Step("transpose", (0,), (0, 1)),
        Step("square", (1,), ()),
        Step("contiguous", (2,), ()),
        Step("set", (3,), ((...,), 2)),
    )
    program = Program(1, (2,), (leaf,), steps, (2,))
    assert (values_of(replace(program, row_major=True))[2] == 2).all()
    assert not (values_of(program)[2] == 2).any()


def test_what_was_written_is_shaken() -> None:
    """The norm of equal numbers makes much of errors of rounding, also where a write made them equal."""
    leaf = Leaf((5, 5), "float32", (Replicate(),), False, 5)
    steps = (Step("set", (0,), ((...,), 2)),)
    program = Program(1, (2,), (leaf,), steps, (1,))
    assert (values_of(program)[1] == 2).all()
    shaken = values_of(program, 1)[1]
    assert len(np.unique(shaken)) > 10 and np.abs(shaken - 2).max() < 1e-4
