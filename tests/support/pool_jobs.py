"""Jobs for the tests of the pool itself. They use no framework."""

from __future__ import annotations

import os
import time

from hyper_parallel.testing import spmd


def describe(*args: object) -> tuple:
    """The identity of the rank that runs this, and its arguments."""
    return spmd.rank, spmd.world_size, os.environ["RANK"], os.environ["WORLD_SIZE"], args


_calls = 0


def count() -> int:
    """The number of calls in this worker."""
    global _calls
    _calls += 1
    return _calls


def fail_on(ranks: tuple[int, ...]) -> int:
    """Fail on some ranks, after a word on stdout."""
    if spmd.rank in ranks:
        print(f"about to fail on rank {spmd.rank}", flush=True)
        raise ValueError("failed on purpose")
    return spmd.rank


def sleep_on(rank: int, seconds: float) -> None:
    """Hang on one rank."""
    if spmd.rank == rank:
        time.sleep(seconds)


def die_on(rank: int) -> None:
    """Leave without a word on one rank, as after a segmentation fault."""
    if spmd.rank == rank:
        os._exit(7)


def unpicklable() -> object:
    """Return an object that cannot be sent."""
    return lambda: None
