"""Many programs on a pool of ranks: batches, verdicts of all ranks put together, hanging ranks replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hyper_parallel.testing.fuzz import compare, stacks
from hyper_parallel.testing.fuzz.program import Limits, Program, generate
from hyper_parallel.testing.labs import get_lab
from hyper_parallel.testing.pool import JobError, WorkerPool

__all__ = ["KINDS", "Outcome", "judge", "run_seeds"]

#: What may become of a program.
KINDS = ("right", "refused", "plain refused", "wrong", "differs", "hanging")
RANKS = 4
#: One of so many seeds makes a stack of modules.
STACKS = 20
#: Seconds that a single program may take, and programs of a batch.
PATIENCE, BATCH = 15.0, 25


@dataclass(frozen=True)
class Outcome:
    """What became of the program of a seed; ``detail`` says what was wrong, or why it was refused."""

    seed: int
    kind: str
    detail: str = ""


def limits() -> Limits:
    """What programs for the framework in use may contain."""
    lab = get_lab()
    return Limits(**lab.FUZZ_LIMITS)


def run_batch(seeds: list[int]) -> list[compare.Verdict | None]:
    """A job: this rank's verdicts."""
    found = limits()
    return [stacks.run(seed) if seed % STACKS == 0 else compare.run(generate(seed, found)) for seed in seeds]


def run_program(program: Program) -> compare.Verdict | None:
    """A job: this rank's verdict of one program, as the shrinker makes them."""
    return compare.run(program)


def put_together(seed: int, verdicts: list[compare.Verdict | None]) -> Outcome:
    """One outcome from those of all ranks."""
    members = [verdict for verdict in verdicts if verdict is not None]
    kinds = {kind for kind, _ in members}
    if "wrong" in kinds:
        return Outcome(seed, "wrong", next(detail for kind, detail in members if kind == "wrong"))
    if len(kinds) > 1:
        return Outcome(seed, "differs", "; ".join(f"rank {i}: {k} {d}" for i, (k, d) in enumerate(members))[:600])
    return Outcome(seed, kinds.pop(), members[0][1])


def judge(pool: WorkerPool, program: Program) -> Outcome:
    """Run one program."""
    try:
        return put_together(program.seed, pool.run(RANKS, run_program, program, timeout=PATIENCE))
    except JobError as error:
        return Outcome(program.seed, "hanging", str(error)[-1500:])


def run_seeds(pool: WorkerPool, seeds: range, seen: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Run the programs of all seeds; ``seen`` hears of each outcome."""
    outcomes: list[Outcome] = []
    for start in range(seeds.start, seeds.stop, BATCH):
        for outcome in _run_some(pool, list(range(start, min(start + BATCH, seeds.stop)))):
            seen(outcome)
            outcomes.append(outcome)
    return outcomes


def _run_some(pool: WorkerPool, seeds: list[int]) -> Iterator[Outcome]:
    """A batch; where a rank hangs or dies, its halves, so that few programs run again."""
    try:
        by_rank = pool.run(RANKS, run_batch, seeds, timeout=PATIENCE + 0.6 * len(seeds))
    except JobError as error:
        if len(seeds) == 1:
            yield Outcome(seeds[0], "hanging", str(error)[-1500:])
            return
        middle = len(seeds) // 2
        yield from _run_some(pool, seeds[:middle])
        yield from _run_some(pool, seeds[middle:])
        return
    for i, seed in enumerate(seeds):
        yield put_together(seed, [verdicts[i] for verdicts in by_rank])
