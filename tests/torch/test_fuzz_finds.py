"""Random programs find bugs: a bug is planted on the ranks, and has to come out, in few lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from hyper_parallel.platform import get_platform
from hyper_parallel.testing import spmd
from hyper_parallel.testing.fuzz.campaign import BAD, RANKS, judge, run_seeds
from hyper_parallel.testing.fuzz.exchange import ExchangePool
from hyper_parallel.testing.fuzz.families import limits
from hyper_parallel.testing.fuzz.program import generate
from hyper_parallel.testing.fuzz.shrink import shrink

pytestmark = pytest.mark.skipif(os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="tried on torch-cpu, once")


def lose_rows() -> None:
    """A job: gathering a matrix of floats gives the parts in another order."""
    platform: Any = get_platform()
    gather = platform.all_gather
    platform.all_gather = lambda x, group, size: (
        gather(x, group, size).flip(0) if x.is_floating_point() and size == 4 else gather(x, group, size)
    )


def stay_away() -> None:
    """A job: rank 2 takes no part in reducing numbers."""
    platform: Any = get_platform()
    reduce = platform.all_reduce
    platform.all_reduce = lambda x, op, group: x if spmd.rank == 2 and x.numel() == 1 else reduce(x, op, group)


@pytest.fixture
def ranks() -> Iterator[ExchangePool]:
    with ExchangePool("torch-cpu", RANKS) as pool:
        yield pool


@pytest.mark.nightly
@pytest.mark.parametrize(("plant", "kind"), [(lose_rows, "wrong"), (stay_away, "hanging")])
def test_planted_bugs_are_found(ranks: ExchangePool, plant: Any, kind: str) -> None:
    ranks.run(RANKS, plant)
    outcomes = run_seeds(ranks, range(1, 61))
    found = [o for o in outcomes if o.kind == kind and o.seed % 20]
    assert len(found) >= 2, [o.kind for o in outcomes]
    # A smaller program still fails, in a few steps.
    program = shrink(ranks, generate(found[0].seed, limits()), kind)
    assert judge(ranks, program).kind == kind
    assert len(program.steps) <= 3 and len(program.leaves) == 1, str(program)
    assert any(o.kind not in BAD for o in outcomes)  # the ranks go on after each
