"""Check whether this tree is slower than another commit: ``python -m benchmarks.against REVISION [--pairs 9]``.

Each pair is two fresh processes, which take turns on one core. One has the package ``hyper_parallel`` of the other
commit, and one that of this tree. Everything else, the benchmark itself too, is this tree's. A pair gives one number
for each step: the median over its rounds of the ratio of two turns that follow one another. The table has the median
over the pairs, and an interval between two of their order statistics. This holds the true median with at least 95 %
confidence, whatever the distribution. Exits with 1 where an interval does not lie below 1.05.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import machine
from benchmarks.report import Goal, Result, Table, as_markdown, write

ROOT = Path(__file__).resolve().parent.parent
CONFIDENCE, LIMIT, ROUNDS = 0.95, 1.05, 40


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("revision", help="the other commit")
    parser.add_argument("--pairs", type=int, default=9, help="at least 6: fewer give no interval")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each step in a pair")
    parser.add_argument("--out", type=Path, help="result files without suffix; default: print only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        extract(arguments.revision, Path(folder))
        pairs = [_pair(Path(folder), arguments.rounds, swap=bool(i % 2)) for i in range(arguments.pairs)]
    result = summary(arguments.revision, pairs)
    environment = machine.describe()
    print(as_markdown(environment, [result]))
    if arguments.out is not None:
        write(arguments.out, environment, [result])
    return 0 if all(goal.reached for goal in result.goals) else 1


def extract(revision: str, folder: Path) -> None:
    """Put the package of another commit into ``folder``."""
    archive = subprocess.run(["git", "archive", revision, "hyper_parallel"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")


def _pair(old: Path, rounds: int, swap: bool) -> dict[str, float]:
    """The ratio new to old of each step, from two fresh processes. ``swap``: who begins."""
    with ExitStack() as stack:
        sides = [stack.enter_context(_side(path)) for path in ((ROOT, old) if swap else (old, ROOT))]
        names = json.loads(_ask(sides[0]))
        if json.loads(_ask(sides[1])) != names:
            raise RuntimeError("the two processes time different steps")
        ratios: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                first, second = (float(_ask(side, name)) for side in sides)
                ratios[name].append(first / second if swap else second / first)
    return {name: statistics.median(values) for name, values in ratios.items()}


@contextmanager
def _side(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that imports ``hyper_parallel`` from ``path``."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{path}{os.pathsep}{ROOT}",
        "HYPER_PARALLEL_PLATFORM": "torch-cpu",
        "OMP_NUM_THREADS": "1",
    }
    # -P: else the folder that the command is run in comes first, with its hyper_parallel.
    command = [sys.executable, "-P", "-m", "benchmarks.against_process"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _ask(side: subprocess.Popen[str], name: str = "") -> str:
    assert side.stdin is not None and side.stdout is not None
    if name:
        print(name, file=side.stdin, flush=True)
    answer = side.stdout.readline()
    if not answer:
        raise RuntimeError(f"a process that measures ended with {side.wait()}")
    return answer


def interval(values: list[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The narrowest pair of order statistics, at equal distances from both ends, that holds the median with this
    confidence.

    Raises:
        ValueError: for so few values that not even the smallest and the largest do.
    """
    n, ordered = len(values), sorted(values)
    missed, rank = 0.0, 0
    # The k-th smallest lies above the median where fewer than k values are below it: binomial with one half.
    while rank < n // 2 and 1 - 2 * (missed + math.comb(n, rank) / 2**n) >= confidence:
        missed += math.comb(n, rank) / 2**n
        rank += 1
    if not rank:
        raise ValueError(f"{n} pairs give no interval of {confidence:.0%} confidence: at least 6 are needed")
    return ordered[rank - 1], ordered[n - rank]


def summary(revision: str, pairs: list[dict[str, float]]) -> Result:
    """The table and its goals."""
    how = (
        f"Times of this tree divided by those of {revision}: {len(pairs)} interleaved pairs of processes, each rank 0 "
        "of a fake process group."
    )
    table = Table("New to old", ["step", "median", "lower end", "upper end"])
    result = Result("against", how, [table])
    for name in pairs[0]:
        values = [pair[name] for pair in pairs]
        low, high = interval(values)
        table.rows.append([name, *(f"{x:.3f}" for x in (statistics.median(values), low, high))])
        result.goals.append(Goal(f"{name}: upper end of the interval", high, LIMIT))
    return result


if __name__ == "__main__":
    sys.exit(main())
