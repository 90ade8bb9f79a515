"""Reduction of a failing program to a smaller one that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hyper_parallel.testing.fuzz import reductions
from hyper_parallel.testing.fuzz.campaign import judge
from hyper_parallel.testing.fuzz.families import FAMILIES
from hyper_parallel.testing.pool import WorkerPool

__all__ = ["shrink", "smallest"]

#: Most programs that are tried, by kind of failure: each hanging program may cost its time-out.
TRIES = {"hanging": 100}
MANY = 200


def shrink(pool: WorkerPool, program: Any, kind: str, family: str = "operations") -> Any:
    """Return the smallest program found that has the outcome ``kind``."""

    def fails(smaller: Any) -> bool:
        return judge(pool, smaller, family).kind == kind

    return smallest(program, fails, TRIES.get(kind, MANY), FAMILIES[family].smaller)


def smallest(
    program: Any,
    fails: Callable[[Any], bool],
    tries: int = MANY,
    smaller: Callable[[Any], Iterator[Any]] = reductions.smaller,
) -> Any:
    """Return the smallest program found for which ``fails`` is true, after at most ``tries`` calls."""
    progress = True
    while progress:
        progress = False
        for candidate in smaller(program):
            if tries == 0:
                return program
            tries -= 1
            if fails(candidate):
                program, progress = candidate, True
                break
    return program
