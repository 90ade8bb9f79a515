"""The table of models in docs/huggingface.md, made from runs.

    python -m tests.support.model_table [--ranks 2 4] [--only Llama ...]

runs each model of `tests.torch.huggingface_table_models` forward and backward, on one process and on so many ranks, and
writes the outcomes into ``ci/last_models.json`` and into the page. ``--page`` writes the page from the record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RECORD", "TOLERANCE", "main", "table", "with_table"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "huggingface.md"
RECORD = ROOT / "ci" / "last_models.json"
BEGIN = "<!-- made by python -m tests.support.model_table: do not edit -->\n"
END = "<!-- end of the table -->"
#: Largest difference of losses and gradients. Some models compute a part in single precision always.
TOLERANCE = 2e-6


def table(record: dict[str, Any]) -> str:
    """The table of a record.

    Args:
        record: by title, a dictionary with note, date, commit and versions of a run, and its outcomes by ranks.
    """
    lines = [
        "| model | ranks | bytes sharded | largest difference of a gradient | run | |",
        "|---|---|---|---|---|---|",
    ]
    for title in sorted(record, key=str.lower):
        row = record[title]
        ranks = sorted(row["ranks"], key=int)
        found = [row["ranks"][count] for count in ranks]
        shares = [f"{one['sharded']:.0%}" for one in found]
        cells = (
            title,
            ", ".join(ranks),
            ", ".join(dict.fromkeys(shares)) if len(set(shares)) == 1 else ", ".join(shares),
            f"{max(one['gradients'] for one in found):.0e}",
            f"{row['date']}, `{row['commit']}`",
            row["note"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    versions = sorted(
        {", ".join(f"{name} {number}" for name, number in sorted(row["versions"].items())) for row in record.values()}
    )
    return "\n".join([*lines, "", f"{len(record)} models. Versions: {'; '.join(versions)}."])


def with_table(page: str, record: dict[str, Any]) -> str:
    """``page`` with the table of ``record`` between its markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(record)}\n\n{END}{rest.partition(END)[2]}"


def _run(titles: Sequence[str], output: Path) -> None:
    """Compare models on all ranks of the world. The first rank writes the outcomes, or the errors, as JSON."""
    import transformers

    from hyper_parallel import init_device_mesh
    from tests.torch.huggingface_table_models import ROWS, compare

    transformers.logging.set_verbosity_error()
    mesh = init_device_mesh(mesh_dim_names=("tp",))
    found: dict[str, Any] = {}
    for row in ROWS:
        if titles and row.title not in titles:
            continue
        try:
            outcome = compare(row, mesh)
        except Exception as error:  # all are tried; an error is one of all ranks
            found[row.title] = {"error": f"{type(error).__name__}: {error}"}
        else:
            found[row.title] = {"note": row.note, **outcome._asdict()}
    if mesh.get_rank() == 0:
        output.write_text(json.dumps(found), encoding="utf-8")


def _start(ranks: int, titles: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", __spec__.name, "--output", str(output), "--only", *titles]
        environment = {"HYPER_PARALLEL_PLATFORM": "torch-cpu", "OMP_NUM_THREADS": "1", **os.environ}
        subprocess.run(command, check=True, cwd=ROOT, env=environment)
        return json.loads(output.read_text(encoding="utf-8"))


def _versions() -> dict[str, str]:
    return {name: metadata.version(name).partition("+")[0] for name in ("transformers", "torch")}


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.model_table")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--only", nargs="*", default=[], metavar="TITLE", help="these models alone")
    parser.add_argument("--page", action="store_true", help="write the page from the record, and run nothing")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output is not None:
        _run(arguments.only, arguments.output)
        return 0
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    wrong: list[str] = []
    if not arguments.page:
        sys.path.insert(0, str(ROOT / "ci"))
        import results

        written = [path.relative_to(ROOT).as_posix() for path in (RECORD, PAGE)]
        run = {"date": results.today(), "commit": results.commit_of(ROOT, but=written), "versions": _versions()}
        found = {ranks: _start(ranks, arguments.only) for ranks in arguments.ranks}
        for title in found[arguments.ranks[0]]:
            by_ranks = {str(ranks): dict(found[ranks][title]) for ranks in arguments.ranks}
            notes = {one.pop("note", "") for one in by_ranks.values()}
            for ranks, one in by_ranks.items():
                # A comparison that is not below: so NaN counts as wrong.
                if "error" in one or not max(one["loss"], one["gradients"]) < TOLERANCE:
                    wrong.append(f"{title} on {ranks} ranks: {one.get('error') or one}")
            if not any(text.startswith(f"{title} on ") for text in wrong):
                record[title] = {"note": notes.pop(), **run, "ranks": by_ranks}
            else:
                record.pop(title, None)
        RECORD.write_text(f"{json.dumps(record, indent=1, sort_keys=True)}\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    print("\n".join([*wrong, f"{len(record)} models"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
