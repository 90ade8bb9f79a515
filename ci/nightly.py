"""Tables that take too long for the gates. The full table of data parallelism: every three choices of
`tests/support/data_parallel_table.py` together, and rows at random. The table of torch.compile: models with Inductor,
and every style on four ranks.

    python -m ci.nightly torch-cpu [--more 100] [--seed 1] [--limit N]
    python -m ci.nightly torch-cpu --compiled [--limit N]

Rows that fail are named, and make the exit status 1. What ran is recorded in ``ci/last_nightly.json``, each backend
with its last run.
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

from hyper_parallel.testing.fuzz.record import commit_of
from hyper_parallel.testing.pool import JobError, WorkerPool
from tests.support.data_parallel_table import full_set, title

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "ci" / "last_nightly.json"
#: backend -> the module whose ``run`` runs a row, and whose ``settle`` knows what there is.
ROWS = {"torch-cpu": "tests.torch.data_parallel_rows", "mindspore": "tests.mindspore.data_parallel_rows"}
#: The same of compiled models, with the list ``ROWS``, each row ending on how many ranks it is for.
COMPILED = {"torch-cpu": "tests.torch.compiled_rows"}


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=sorted(ROWS))
    parser.add_argument("--more", type=int, default=100, metavar="N", help="rows at random besides")
    parser.add_argument("--seed", type=int, default=datetime.date.today().toordinal(), help="of those")
    parser.add_argument("--compiled", action="store_true", help="the table of torch.compile")
    parser.add_argument("--limit", type=int, metavar="N", help="the first rows only; nothing is recorded then")
    arguments = parser.parse_args()
    os.environ["HYPER_PARALLEL_PLATFORM"] = arguments.backend
    if arguments.compiled and arguments.backend not in COMPILED:
        parser.error(f"--compiled is for {', '.join(COMPILED)}")
    rows_of = importlib.import_module((COMPILED if arguments.compiled else ROWS)[arguments.backend])
    rows = rows_of.ROWS if arguments.compiled else full_set(rows_of.settle, arguments.more, arguments.seed)
    rows = rows[: arguments.limit]
    started, failed = time.monotonic(), []
    with WorkerPool(arguments.backend) as pool:
        for i, row in enumerate(rows):
            try:
                pool.run(row[-1] if arguments.compiled else 4, rows_of.run, row, timeout=600)
            except JobError as error:
                failed.append(" ".join(map(str, row)) if arguments.compiled else title(row))
                print(f"{failed[-1]} failed: {row}\n{error}", flush=True)
            if (i + 1) % 20 == 0:
                print(f"{i + 1} of {len(rows)} rows, {len(failed)} failed", flush=True)
    seconds = time.monotonic() - started
    print(f"{len(rows)} rows in {seconds:.0f} s, {len(failed)} failed")
    if arguments.limit is None:
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        drawn = {} if arguments.compiled else {"at random": arguments.more, "seed": arguments.seed}
        known[f"{arguments.backend}, compiled" if arguments.compiled else arguments.backend] = {
            "rows": len(rows),
            **drawn,
            "failed": failed,
            "commit": commit_of(ROOT),
            "date": datetime.date.today().isoformat(),
            "seconds": round(seconds),
        }
        RECORD.write_text(json.dumps(known, indent=2) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
