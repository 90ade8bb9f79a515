"""``hyper-parallel compare``: find where two recorded runs first differ."""

from __future__ import annotations

import argparse
from pathlib import Path

from hyper_parallel.cli.output import UsageError, show
from hyper_parallel.debug.records.comparing import compare
from hyper_parallel.debug.records.errors import RecordError

__all__ = ["run"]


def run(given: argparse.Namespace) -> int:
    """Print the comparison; return 1 if the runs differ by more than rounding.

    Raises:
        UsageError: for names that are no pairs, and for folders without a complete record.
    """
    names = {}
    for pair in given.name:
        old, equals, new = pair.partition("=")
        if not equals:
            raise UsageError(f"--name takes PATH_IN_A=PATH_IN_B, got {pair!r}")
        names[old] = new
    try:
        found = compare(given.a, given.b, given.reference, names)
    except (RecordError, ValueError) as error:
        raise UsageError(str(error)) from None
    if given.svg:
        Path(given.svg).write_text(found.svg(), encoding="utf-8")
    show(f"{found.table()}\n\n{found}" if given.all else str(found), found.as_dict(), given.json)
    return int(found.departs)
