"""Check that two runs agree, usually one per framework, or one without a break and one that resumed.

python compare.py runs/torch-cpu-tp2.json runs/mindspore-tp2.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

STEPS, TOLERANCE = 20, 1e-3
STEPS_AFTER_RESUME, TOLERANCE_AFTER_RESUME = 4, 1e-5


def largest_difference(first: list[float], second: list[float], steps: int) -> float:
    """Largest relative difference over the first steps."""
    if min(len(first), len(second)) < steps:
        raise SystemExit(f"both runs need at least {steps} steps in common")
    return max(abs(a - b) / abs(a) for a, b in zip(first[:steps], second[:steps], strict=True))


def main() -> int:
    """Compare the losses of two files that train.py wrote."""
    parser = argparse.ArgumentParser(description="Check that two runs agree.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    arguments = parser.parse_args()
    first, second = (json.loads(p.read_text()) for p in (arguments.first, arguments.second))
    if first["weights"] != second["weights"]:
        raise SystemExit("the two runs did not start from the same weights")
    status = 0
    start = max(run["first_step"] for run in (first, second))
    steps, tolerance = (STEPS_AFTER_RESUME, TOLERANCE_AFTER_RESUME) if start else (STEPS, TOLERANCE)
    for kind in ("sharded_losses", "unsharded_losses"):
        difference = largest_difference(*(run[kind][start - run["first_step"] :] for run in (first, second)), steps)
        agrees = difference <= tolerance  # a NaN does not
        status |= not agrees
        print(
            f"{kind.replace('_', ' ')} of {first['platform']} and {second['platform']}:"
            f" largest relative difference over {steps} steps after step {start} {difference:.1e},"
            f" allowed {tolerance:.0e}: {'ok' if agrees else 'FAILED'}"
        )
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
