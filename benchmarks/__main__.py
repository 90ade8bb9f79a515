"""``python -m benchmarks [CASE ...] [--out benchmarks/results/NAME] [--quick]``."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

from benchmarks import machine
from benchmarks.cases import NAMES, find
from benchmarks.report import Result, as_markdown, write
from benchmarks.timing import QUICK, Effort


def main() -> int:
    """Run cases, print the report, and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Cost of parallel models. See README.md.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of {', '.join(NAMES)}; default: all")
    parser.add_argument("--out", type=Path, help="result files without suffix; default: print only")
    parser.add_argument("--quick", action="store_true", help="few rounds: says that it works, not how fast")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(NAMES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")

    os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch-cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    environment = machine.describe()
    results: list[Result] = []
    for name in arguments.cases or NAMES:
        start = time.monotonic()
        results.append(find(name)(QUICK if arguments.quick else Effort()))
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if arguments.out is not None:
            write(arguments.out, environment, results)  # after each case, so that an interrupted run leaves something
    print(as_markdown(environment, results))
    broken = [goal.what for result in results for goal in result.goals if goal.strict and not goal.reached]
    for what in broken:
        print(f"FAILED: {what}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
