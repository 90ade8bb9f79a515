"""Run random programs: ``python -m hyper_parallel.testing.fuzz torch-cpu --count 1000``; see docs/fuzzing.md."""

from __future__ import annotations

import argparse
import collections
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hyper_parallel.testing.fuzz.campaign import BAD, KINDS, RANKS, run_seeds
from hyper_parallel.testing.fuzz.exchange import ExchangePool
from hyper_parallel.testing.fuzz.families import FAMILIES
from hyper_parallel.testing.fuzz.record import add_run, commit_of
from hyper_parallel.testing.fuzz.shrink import shrink
from hyper_parallel.testing.pool import WorkerPool

#: Number of programs that are run and recorded together.
PART = 1000
#: Number of parts after which ranks are restarted: MindSpore never frees about 130 kB for each program.
RENEWED = 10


def _parts(platform: str, seeds: range) -> Iterator[tuple[WorkerPool, range]]:
    """Yield ranges of seeds, each with the pool of ranks that runs their programs."""
    for start in range(seeds.start, seeds.stop, RENEWED * PART):
        with ExchangePool(platform, RANKS) as pool:
            for at in range(start, min(start + RENEWED * PART, seeds.stop), PART):
                yield pool, range(at, min(at + PART, seeds.stop))


def _run(pool: WorkerPool, part: range, family: str, as_found: bool, refusals: bool) -> collections.Counter[str]:
    """Run the programs of a range of seeds, print bad programs, and return the numbers of outcomes by kind."""
    shown = ("unsteady", *BAD, *(("refused",) if refusals else ()))
    outcomes = run_seeds(pool, part, family=family)
    for outcome in outcomes:
        if outcome.kind in shown:
            print(f"{outcome.kind}: seed {outcome.seed}: {outcome.detail}", flush=True)
        if outcome.kind in BAD:
            program = FAMILIES[family].generate(outcome.seed)
            if not isinstance(program, int):
                print(program if as_found else shrink(pool, program, outcome.kind, family), flush=True)
    return collections.Counter(outcome.kind for outcome in outcomes)


def main() -> int:
    """Run the command and return the exit status: 0 if no program was wrong, differed between ranks or hung."""
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.testing.fuzz", description=__doc__)
    parser.add_argument("platform", help="the backend, such as torch-cpu")
    parser.add_argument("--kind", choices=[*FAMILIES], default="operations", help="of programs")
    parser.add_argument("--refusals", action="store_true", help="print refused programs too")
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--seed", type=int, help="of the first program; fresh by default")
    parser.add_argument("--most", type=int, default=20, help="stop after so many that are bad")
    parser.add_argument("--as-found", action="store_true", help="print bad programs as they are, not made smaller")
    parser.add_argument("--patience", type=float, default=15, help="seconds until a rank counts as hanging")
    parser.add_argument("--record", type=Path, help="add the run to this file")
    arguments = parser.parse_args()
    # Set before the framework is loaded, here and in the ranks.
    os.environ["HYPER_PARALLEL_PLATFORM"] = arguments.platform
    os.environ["HYPER_PARALLEL_FUZZ_PATIENCE"] = str(arguments.patience)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOG_v", "3")
    first = secrets.randbelow(1 << 40) if arguments.seed is None else arguments.seed
    seeds, commit = range(first, first + arguments.count), commit_of(Path.cwd())
    counts: collections.Counter[str] = collections.Counter()
    started, bad = time.monotonic(), 0
    for pool, part in _parts(arguments.platform, seeds):
        began = time.monotonic()
        kinds = _run(pool, part, arguments.kind, arguments.as_found, arguments.refusals)
        if arguments.record is not None:
            seconds = time.monotonic() - began
            named = arguments.platform if arguments.kind == "operations" else f"{arguments.platform}, {arguments.kind}"
            add_run(arguments.record, named, commit, part.start, len(part), dict(kinds), seconds)
        counts += kinds
        print(f"{dict(counts)} after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        bad += sum(kinds[kind] for kind in BAD)
        if bad >= arguments.most:
            break
    print(f"{arguments.platform}, seeds from {first}, {counts.total()} programs, {time.monotonic() - started:.0f} s:")
    print(", ".join(f"{counts[kind]} {kind}" for kind in KINDS))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
