"""A fixed share of the random programs; `python -m hyper_parallel.testing.fuzz` runs fresh ones (docs/fuzzing.md)."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.testing.fuzz.campaign import RANKS, run_seeds
from hyper_parallel.testing.labs import get_lab

FIRST = 1


def test_random_programs(pool: Any) -> None:
    if pool.size < RANKS:
        pytest.skip(f"random programs need {RANKS} ranks")
    outcomes = run_seeds(pool, range(FIRST, FIRST + get_lab().FUZZ_SHARE))
    bad = [outcome for outcome in outcomes if outcome.kind in ("wrong", "differs", "hanging")]
    assert not bad, "\n".join(f"seed {o.seed} {o.kind}: {o.detail}" for o in bad)
    right = sum(outcome.kind == "right" for outcome in outcomes)
    assert right >= 0.75 * len(outcomes), f"only {right} of {len(outcomes)} programs could be compared"
