"""Many programs on a pool of ranks: batches, verdicts of all ranks put together, hanging ranks replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.fuzz import compare, stacks
from hyper_parallel.testing.fuzz.exchange import installed, patience
from hyper_parallel.testing.fuzz.program import Limits, Program, generate
from hyper_parallel.testing.pool import JobError, WorkerPool

__all__ = ["BAD", "KINDS", "Outcome", "judge", "run_seeds"]

#: What may become of a program.
KINDS = ("right", "refused", "plain refused", "accepted", "unsteady", "wrong", "differs", "hanging")
#: Of these, what must not become of any.
BAD = ("wrong", "differs", "hanging")
RANKS = 4
#: So often a bad program runs again before it counts as unsteady.
REPEATS = 5
#: One of so many seeds makes a stack of modules.
STACKS = 20
#: Programs of a batch.
BATCH = 25


@dataclass(frozen=True)
class Outcome:
    """What became of the program of a seed; ``detail`` says what was wrong, or why it was refused."""

    seed: int
    kind: str
    detail: str = ""


def limits() -> Limits:
    """What programs for the framework in use may contain."""
    adapter = get_adapter()
    return Limits(**adapter.FUZZ_LIMITS)


def references(programs: list[Program | int]) -> list[compare.Reference | stacks.Reference]:
    """A job: what this rank's share of the programs gives on a single device. A number is the seed of a stack or of a
    program."""
    found, mine = limits(), programs[spmd.rank :: RANKS]
    return [
        stacks.on_one_device(p)
        if isinstance(p, int) and p % STACKS == 0
        else compare.on_one_device(generate(p, found) if isinstance(p, int) else p)
        for p in mine
    ]


def verdicts(wanted: list[compare.Reference | stacks.Reference]) -> list[compare.Verdict | None]:
    """A job: this rank's verdicts on the distributed programs."""
    return [_in_step(stacks.run(r) if isinstance(r, stacks.Reference) else compare.run(r)) for r in wanted]


def _in_step(verdict: compare.Verdict | None) -> compare.Verdict | None:
    """``verdict``, unless this rank waited in vain for another one."""
    exchange = installed()
    problem = "" if exchange is None else exchange.end_program()
    return ("hanging", problem) if problem else verdict


def put_together(seed: int, by_rank: Sequence[compare.Verdict | None]) -> Outcome:
    """One outcome from those of all ranks."""
    members = [verdict for verdict in by_rank if verdict is not None]
    kinds = {kind for kind, _ in members}
    if "hanging" in kinds:
        return Outcome(seed, "hanging", "; ".join(f"rank {i}: {k} {d}" for i, (k, d) in enumerate(members))[:1500])
    if "wrong" in kinds:
        return Outcome(seed, "wrong", next(detail for kind, detail in members if kind == "wrong"))
    if kinds == {"plain refused", "accepted"}:  # a single device refuses what a rank without elements need not compute
        return next(Outcome(seed, kind, detail) for kind, detail in members if kind == "plain refused")
    if len(kinds) > 1:
        return Outcome(seed, "differs", "; ".join(f"rank {i}: {k} {d}" for i, (k, d) in enumerate(members))[:600])
    return Outcome(seed, kinds.pop(), members[0][1])


def judge(pool: WorkerPool, program: Program) -> Outcome:
    """Run one program."""
    try:
        (by_rank,) = _verdicts(pool, [program])
    except JobError as error:
        return Outcome(program.seed, "hanging", str(error)[-1500:])
    return put_together(program.seed, by_rank)


def run_seeds(pool: WorkerPool, seeds: range, seen: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Run the programs of all seeds; ``seen`` hears of each outcome."""
    outcomes: list[Outcome] = []
    for start in range(seeds.start, seeds.stop, BATCH):
        for outcome in _run_some(pool, list(range(start, min(start + BATCH, seeds.stop)))):
            if outcome.kind in BAD:
                outcome = _again(pool, outcome)
            seen(outcome)
            outcomes.append(outcome)
    return outcomes


def _again(pool: WorkerPool, bad: Outcome) -> Outcome:
    """``bad`` if its program is bad once more; if it is good every time, it counts as unsteady."""
    for _ in range(REPEATS):
        if any(outcome.kind in BAD for outcome in _run_some(pool, [bad.seed])):
            return bad
    return Outcome(bad.seed, "unsteady", f"{bad.kind} once, then good {REPEATS} times: {bad.detail}")


def _run_some(pool: WorkerPool, seeds: list[int]) -> Iterator[Outcome]:
    """A batch; where a rank hangs or dies, its halves, so that few programs run again."""
    try:
        for seed, by_rank in zip(seeds, _verdicts(pool, list(seeds)), strict=True):
            yield put_together(seed, by_rank)
    except JobError as error:
        if len(seeds) == 1:
            yield Outcome(seeds[0], "hanging", str(error)[-1500:])
            return
        middle = len(seeds) // 2
        yield from _run_some(pool, seeds[:middle])
        yield from _run_some(pool, seeds[middle:])


def _verdicts(pool: WorkerPool, programs: list[Program | int]) -> list[tuple[compare.Verdict | None, ...]]:
    """The verdicts of all ranks on each program."""
    seconds = patience() * (1 + len(programs) / BATCH)
    wanted: list[Any] = [None] * len(programs)
    for rank, share in enumerate(pool.run(RANKS, references, programs, timeout=seconds)):
        wanted[rank::RANKS] = share
    return list(zip(*pool.run(RANKS, verdicts, wanted, timeout=seconds), strict=True))
