"""A fixed set of random programs; ``python -m hyper_parallel.testing.fuzz`` runs new programs (docs/fuzzing.md). Here
the programs communicate by the backend's own collectives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.conformance.found_programs import FOUND
from hyper_parallel.testing.conformance.found_trainers import FOUND_TRAINERS
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.fuzz.campaign import BAD, RANKS, Outcome, judge, run_seeds
from hyper_parallel.testing.fuzz.families import limits, training_limits

FIRST = 1


@pytest.fixture(autouse=True)
def enough_ranks(pool: Any) -> None:
    if pool.size < RANKS:
        pytest.skip(f"random programs need {RANKS} ranks")


def test_random_programs(pool: Any) -> None:
    share = get_adapter().FUZZ_SHARE if everything() else get_adapter().FUZZ_SHARE // 4
    check(run_seeds(pool, range(FIRST, FIRST + share)), 0.75)


def test_random_trainers(pool: Any) -> None:
    share = get_adapter().TRAINING_SHARE if everything() else get_adapter().TRAINING_SHARE // 5
    check(run_seeds(pool, range(FIRST, FIRST + share), family="training"), 0.9)


def test_random_programs_with_cut_sequences(pool: Any) -> None:
    share = get_adapter().TRAINING_SHARE // (1 if everything() else 10)
    check(run_seeds(pool, range(FIRST, FIRST + share), family="sequences"), 0.75)


def check(outcomes: list[Outcome], compared: float) -> None:
    bad = [outcome for outcome in outcomes if outcome.kind in BAD]
    assert not bad, "\n".join(f"seed {o.seed} {o.kind}: {o.detail}" for o in bad)
    right = sum(outcome.kind == "right" for outcome in outcomes)
    assert right >= compared * len(outcomes), f"only {right} of {len(outcomes)} programs could be compared"


@pytest.mark.parametrize("what", FOUND)
def test_programs_that_failed_once(pool: Any, what: str) -> None:
    program, found = FOUND[what], limits()
    if (program.second_order and not found.second_order) or any(s.word in found.without for s in program.steps):
        pytest.skip("programs for this framework do not have this")
    outcome = judge(pool, replace(program, row_major=found.row_major))
    # Accepted: the single device alone refuses.
    assert outcome.kind in ("right", "refused", "accepted"), f"{outcome.kind}: {outcome.detail}"


@pytest.mark.parametrize("what", FOUND_TRAINERS)
def test_trainers_that_failed_once(pool: Any, what: str) -> None:
    program, found = FOUND_TRAINERS[what], training_limits()
    words = {word for word, *_ in program.actions}
    if words & found.without or (program.model.writer and program.model.writer not in found.writers):
        pytest.skip("programs for this framework do not have this")
    if program.model.again and program.model.again not in found.again:
        pytest.skip("programs for this framework do not have this")
    dtype = program.model.dtype if program.model.dtype in found.dtypes else found.dtypes[0]
    outcome = judge(pool, replace(program, model=replace(program.model, dtype=dtype)), "training")
    assert outcome.kind == "right", f"{outcome.kind}: {outcome.detail}"
