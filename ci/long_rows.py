"""Run a table that takes too long for the gate, as a part of `make nightly`.

The table of data parallelism has every combination of three choices of `tests/support/data_parallel_table.py`, and
random rows. The table of torch.compile has models with Inductor, and every style on four ranks.

    python -m ci.long_rows torch-cpu [--more 100] [--seed 1] [--limit N]
    python -m ci.long_rows torch-cpu --compiled [--limit N]

Prints the rows that fail. The exit status is 1 if a row fails.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
import time
from pathlib import Path

from ci.progress import Events
from hyper_parallel.testing.pool import JobError, WorkerPool
from tests.support.data_parallel_table import full_set, title

#: backend -> the module whose ``run`` runs a row, and whose ``settle`` makes choices consistent.
ROWS = {"torch-cpu": "tests.torch.data_parallel_rows", "mindspore": "tests.mindspore.data_parallel_rows"}
#: The same for compiled models. The module has a list ``ROWS``; the last item of a row is its number of ranks.
COMPILED = {"torch-cpu": "tests.torch.compiled_rows"}


def main() -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=sorted(ROWS))
    parser.add_argument("--more", type=int, default=100, metavar="N", help="rows at random besides")
    parser.add_argument("--seed", type=int, default=datetime.date.today().toordinal(), help="of those")
    parser.add_argument("--compiled", action="store_true", help="the table of torch.compile")
    parser.add_argument("--limit", type=int, metavar="N", help="the first rows only")
    parser.add_argument("--progress", default=os.devnull, metavar="FILE", help="write events as lines of JSON")
    parser.add_argument("--report", default=os.devnull, metavar="FILE", help="write the results as JSON")
    arguments = parser.parse_args()
    os.environ["HYPER_PARALLEL_PLATFORM"] = arguments.backend
    if arguments.compiled and arguments.backend not in COMPILED:
        parser.error(f"--compiled is for {', '.join(COMPILED)}")
    rows_of = importlib.import_module((COMPILED if arguments.compiled else ROWS)[arguments.backend])
    rows = rows_of.ROWS if arguments.compiled else full_set(rows_of.settle, arguments.more, arguments.seed)
    rows = rows[: arguments.limit]
    events, started, failed = Events(arguments.progress), time.monotonic(), []
    events.add(collected=len(rows))
    with WorkerPool(arguments.backend) as pool:
        for row in rows:
            name = " ".join(map(str, row)) if arguments.compiled else title(row)
            events.add(started=name)
            outcome = "passed"
            try:
                pool.run(row[-1] if arguments.compiled else 4, rows_of.run, row, timeout=600)
            except JobError as error:
                failed.append(name)
                outcome = "failed"
                print(f"{name} failed: {row}\n{error}", flush=True)
                events.add(failed=name, text=f"{row}\n{error}")
            events.add(finished=name, outcome=outcome)
    print(f"{len(rows)} rows in {time.monotonic() - started:.0f} s, {len(failed)} failed")
    drawn = {} if arguments.compiled else {"at random": arguments.more, "seed": arguments.seed}
    Path(arguments.report).write_text(json.dumps({"rows": len(rows), **drawn, "failed": failed}), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
