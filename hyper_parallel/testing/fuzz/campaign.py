"""Run of many programs on a pool of ranks: batches, combined verdicts of all ranks, restart of hanging ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.testing import spmd
from hyper_parallel.testing.fuzz.exchange import installed, patience
from hyper_parallel.testing.fuzz.families import FAMILIES
from hyper_parallel.testing.pool import JobError, WorkerPool

__all__ = ["BAD", "KINDS", "Outcome", "judge", "run_seeds"]

#: The possible outcomes of a program.
KINDS = ("right", "refused", "plain refused", "accepted", "unsteady", "wrong", "differs", "hanging")
#: Outcomes that are bugs.
BAD = ("wrong", "differs", "hanging")
RANKS = 4
#: Outcome of a program on one rank, and its explanation.
Verdict = tuple[str, str]
#: Number of further runs of a bad program: if all are good, the program counts as unsteady.
REPEATS = 5
#: Number of programs in a batch.
BATCH = 25


@dataclass(frozen=True)
class Outcome:
    """Outcome of the program of a seed; ``detail`` has the fault, or the reason of a refusal."""

    seed: int
    kind: str
    detail: str = ""


def references(programs: list[Any], family: str) -> list[Any]:
    """Run this rank's share of the programs on a single device, and return the results.

    A program may be given by its seed, a number.
    """
    known = FAMILIES[family]
    return [known.on_one_device(known.generate(p) if isinstance(p, int) else p) for p in programs[spmd.rank :: RANKS]]


def verdicts(wanted: list[Any], family: str) -> list[Verdict | None]:
    """Return this rank's verdicts on the distributed programs."""
    return [_in_step(FAMILIES[family].run(reference)) for reference in wanted]


def _in_step(verdict: Verdict | None) -> Verdict | None:
    """Return ``verdict``, or "hanging" if this rank waited for another rank until the time-out."""
    exchange = installed()
    problem = "" if exchange is None else exchange.end_program()
    return ("hanging", problem) if problem else verdict


def put_together(seed: int, by_rank: Sequence[Verdict | None]) -> Outcome:
    """Return the outcome of a program, which follows from the verdicts of all ranks."""
    members = [verdict for verdict in by_rank if verdict is not None]
    kinds = {kind for kind, _ in members}
    if "hanging" in kinds:
        return Outcome(seed, "hanging", "; ".join(f"rank {i}: {k} {d}" for i, (k, d) in enumerate(members))[:1500])
    if "wrong" in kinds:
        return Outcome(seed, "wrong", next(detail for kind, detail in members if kind == "wrong"))
    # A single device refuses a computation that a rank with an empty shard may accept.
    if kinds == {"plain refused", "accepted"}:
        return next(Outcome(seed, kind, detail) for kind, detail in members if kind == "plain refused")
    if len(kinds) > 1:
        return Outcome(seed, "differs", "; ".join(f"rank {i}: {k} {d}" for i, (k, d) in enumerate(members))[:600])
    return Outcome(seed, kinds.pop(), members[0][1])


def judge(pool: WorkerPool, program: Any, family: str = "operations") -> Outcome:
    """Run one program and return its outcome."""
    try:
        (by_rank,) = _verdicts(pool, [program], family)
    except JobError as error:
        return Outcome(program.seed, "hanging", str(error)[-1500:])
    return put_together(program.seed, by_rank)


def run_seeds(
    pool: WorkerPool,
    seeds: range,
    seen: Callable[[Outcome], None] = lambda outcome: None,
    family: str = "operations",
) -> list[Outcome]:
    """Run the programs of all seeds and return their outcomes; ``seen`` is called with each outcome."""
    outcomes: list[Outcome] = []
    for start in range(seeds.start, seeds.stop, BATCH):
        for outcome in _run_some(pool, list(range(start, min(start + BATCH, seeds.stop))), family):
            if outcome.kind in BAD:
                outcome = _again(pool, outcome, family)
            seen(outcome)
            outcomes.append(outcome)
    return outcomes


def _again(pool: WorkerPool, bad: Outcome, family: str) -> Outcome:
    """Run a bad program several times. Return ``bad`` if a repeat is bad too, else an outcome of kind "unsteady"."""
    for _ in range(REPEATS):
        if any(outcome.kind in BAD for outcome in _run_some(pool, [bad.seed], family)):
            return bad
    return Outcome(bad.seed, "unsteady", f"{bad.kind} once, then good {REPEATS} times: {bad.detail}")


def _run_some(pool: WorkerPool, seeds: list[int], family: str) -> Iterator[Outcome]:
    """Run a batch and yield the outcomes. If a rank hangs or dies, run halves, so that few programs are repeated."""
    try:
        for seed, by_rank in zip(seeds, _verdicts(pool, list(seeds), family), strict=True):
            yield put_together(seed, by_rank)
    except JobError as error:
        if len(seeds) == 1:
            yield Outcome(seeds[0], "hanging", str(error)[-1500:])
            return
        middle = len(seeds) // 2
        yield from _run_some(pool, seeds[:middle], family)
        yield from _run_some(pool, seeds[middle:], family)


def _verdicts(pool: WorkerPool, programs: list[Any], family: str) -> list[tuple[Verdict | None, ...]]:
    """Return the verdicts of all ranks on each program."""
    seconds = patience() * (1 + len(programs) / BATCH)
    wanted: list[Any] = [None] * len(programs)
    for rank, share in enumerate(pool.run(RANKS, references, programs, family, timeout=seconds)):
        wanted[rank::RANKS] = share
    return list(zip(*pool.run(RANKS, verdicts, wanted, family, timeout=seconds), strict=True))
