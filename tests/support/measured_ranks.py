"""Selects the ranks of the test pool that measure coverage.

Measuring on all four takes a fifth of the time. They run the same code but for branches that depend on the rank.
"""

from __future__ import annotations

import sys

from hyper_parallel.testing import spmd

#: The first rank, and the last of the largest world.
MEASURED = (0, 3)


def leave_the_rest() -> None:
    """Stop measuring in a worker that is none of `MEASURED`. Without coverage there is nothing to stop."""
    coverage = sys.modules.get("coverage")
    measurement = coverage.Coverage.current() if coverage else None
    if measurement is not None and spmd.rank not in MEASURED:
        measurement.stop()
