"""Timing side by side: all versions take turns within a round, and ratios are taken within the round."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Effort", "Step", "Turns", "frozen", "interleaved", "no_collection", "ratios", "spread"]

Clock = Callable[[], int]


@dataclass(frozen=True)
class Step:
    """A function to time.

    Attributes:
        run: the function to time.
        clear: called after each reading of the clock, untimed.
        repeats: how often it runs between two readings, which disturb the processor's caches.
    """

    run: Callable[[], object]
    clear: Callable[[], object] = lambda: None
    repeats: int = 1


@dataclass(frozen=True)
class Effort:
    """The amount of measuring.

    Attributes:
        rounds: how often each version has its turn.
        turn: how long a turn lasts, in seconds; it has at least ``calls`` readings.
        calls: see there.
    """

    rounds: int = 100
    turn: float = 0.01
    calls: int = 3


QUICK = Effort(rounds=10, turn=0.003)


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude the objects that live now from the garbage collector, which makes its runs short."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """Stop Python's garbage collector, which would otherwise run in some of the measured steps."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _cost_of(clock: Clock) -> float:
    """The time between two readings of the clock with nothing in between."""
    readings = [clock() for _ in range(1001)]
    return statistics.median(b - a for a, b in itertools.pairwise(readings))


def _median_of(step: Step, calls: int, clock: Clock) -> float:
    """Median over ``calls`` readings, in nanoseconds."""
    times = []
    run, clear, repeats = step.run, step.clear, range(step.repeats)
    for _ in range(calls):
        start = clock()
        for _ in repeats:
            run()
        times.append(clock() - start)
        clear()
    return statistics.median(times)


class Turns:
    """The turns of one step, which is warmed up when this is made."""

    def __init__(self, step: Step, seconds: float, clock: Clock, least: int = 3) -> None:
        """``seconds`` is how long a turn lasts; it has at least ``least`` readings of ``clock``."""
        self._step, self._clock, self._cost = step, clock, _cost_of(clock)
        _median_of(step, 5, clock)
        self._calls = max(least, round(seconds * 1e9 / _median_of(step, 5, clock)))
        _median_of(step, self._calls, clock)

    def take(self) -> float:
        """Microseconds of one run: the median reading of a turn."""
        return (_median_of(self._step, self._calls, self._clock) - self._cost) / self._step.repeats / 1000


def interleaved(
    steps: Mapping[str, Step], effort: Effort, clock: Clock = time.process_time_ns
) -> dict[str, list[float]]:
    """Microseconds a run: of each step, the median reading of its turn in each round. Turns are in random order.

    The default clock is the processor time of this process: on a busy machine, wall time makes long steps look longer,
    because they are the ones that get interrupted.
    """
    order = random.Random(0)
    turns = {name: Turns(step, effort.turn, clock, effort.calls) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    with frozen():
        for _ in range(effort.rounds):
            names = list(steps)
            order.shuffle(names)
            with no_collection():
                for name in names:
                    times[name].append(turns[name].take())
    return times


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, list[float]]:
    """Ratio of each to ``base`` in the same round."""
    return {name: [a / b for a, b in zip(own, times[base], strict=True)] for name, own in times.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}
