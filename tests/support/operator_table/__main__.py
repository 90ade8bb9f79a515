"""``python -m tests.support.operator_table torch-cpu [--only PATTERN] [--samples N] [--keep]``: docs/operators.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Try the operators, print those that are not right, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.operator_table", description=__doc__)
    parser.add_argument("platform", choices=["torch-cpu", "mindspore"])
    parser.add_argument("--only", help="operators whose names match this regular expression; the page stays as it is")
    parser.add_argument(
        "--renew", action="store_true", help="with --only: write the page, which keeps the verdicts on others"
    )
    parser.add_argument("--samples", type=int, default=6, help="of each operator")
    parser.add_argument("--few", action="store_true", help="few placements, as the tests")
    parser.add_argument("--keep", action="store_true", help="leave the page as it is")
    parser.add_argument("--details", help="a JSON file for all that was found; operators in it are not tried again")
    arguments = parser.parse_args()
    kept = Path(arguments.details) if arguments.details else None
    os.environ["HYPER_PARALLEL_PLATFORM"] = arguments.platform
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOG_v", "3")
    # Imported here, because the environment counts when frameworks are loaded.
    from tests.support.operator_table.exchange import OperatorPool
    from tests.support.operator_table.table import found_by, operators, worst

    with OperatorPool(arguments.platform) as pool:
        title, every = operators(pool)
        names = every
        if arguments.only:
            names = [name for name in names if re.search(arguments.only, name)]
        found = json.loads(kept.read_text(encoding="utf-8")) if kept is not None and kept.exists() else {}

        def tell(more: dict[str, Any], text: str) -> None:
            print(text, file=sys.stderr, flush=True)
            if kept is not None:
                kept.write_text(json.dumps({**found, **more}, indent=1), encoding="utf-8")

        remaining = [name for name in names if name not in found]
        found.update(found_by(pool, remaining, arguments.samples, not arguments.few, tell))
    bad = 0
    for name, line in found.items():
        for form, verdicts in line.get("found", {}).items():
            if worst(line, form) in ("wrong", "hanging"):
                bad += 1
                texts = [text for v in ("hanging", "wrong") for text in verdicts.get(v, []) if text]
                print(f"{name} ({form}): {worst(line, form)}\n    " + "\n    ".join(texts))
    if (arguments.renew or not arguments.only) and not arguments.keep:
        from tests.support.operator_table.page import said, write

        if arguments.only:
            found = {**said(arguments.platform, every), **found}
        write(arguments.platform, found, arguments.samples, title, all_anew=not arguments.only)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
