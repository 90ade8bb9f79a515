"""The table of models in docs/huggingface.md, made from runs.

    python -m tests.support.model_table [--ranks 2 4] [--only Llama ...]

runs each model of `tests.torch.huggingface_table_models` forward and backward, on one process and on so many ranks, and
writes the outcomes into ``ci/last_models.json`` and into the page. ``--page`` writes the page from the record.

    python -m tests.support.model_table --sizes [--only ...]

applies the plans of `tests.torch.huggingface_sizes` to models without data, in this process alone, and writes
``ci/last_sizes.json`` and the second table of the page.
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

__all__ = [
    "PAGE",
    "RECORD",
    "SIZES_RECORD",
    "SIZES_TOLERANCE",
    "TOLERANCE",
    "main",
    "sizes_table",
    "table",
    "with_table",
]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "huggingface.md"
RECORD = ROOT / "ci" / "last_models.json"
BEGIN = "<!-- made by python -m tests.support.model_table: do not edit -->\n"
END = "<!-- end of the table -->"
SIZES_RECORD = ROOT / "ci" / "last_sizes.json"
SIZES_BEGIN = "<!-- made by python -m tests.support.model_table --sizes: do not edit -->\n"
SIZES_END = "<!-- end of the sizes -->"
#: Largest difference from the published number of parameters, in parts of it.
SIZES_TOLERANCE = 0.01
#: Whole parameters with a smaller share of all bytes are not named.
_NAMED = 0.002
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


def sizes_table(record: dict[str, Any]) -> str:
    """The table of a record of sizes.

    Args:
        record: by title, a dictionary with ranks, published billions of parameters, date, commit, versions and the
            outcome of `tests.torch.huggingface_sizes.share`.
    """
    lines = [
        "| model | parameters | ranks | bytes sharded | GiB on a rank | unsharded | run |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for title in sorted(record, key=str.lower):
        row = record[title]
        largest = sorted(row["whole"].items(), key=lambda item: -item[1])
        named = [f"`{name}` {part:.1%}" for name, part in largest if part >= _NAMED]
        cells = (
            title,
            f"{row['billions']:.3g} billion",
            str(row["ranks"]),
            f"{row['sharded']:.1%}",
            f"{row['rank_gib']:.3g}",
            ", ".join(named),
            f"{row['date']}, `{row['commit']}`",
        )
        lines.append(f"| {' | '.join(cells)} |")
    versions = sorted(
        {", ".join(f"{name} {number}" for name, number in sorted(row["versions"].items())) for row in record.values()}
    )
    return "\n".join([*lines, "", f"{len(record)} models. Versions: {'; '.join(versions)}."])


def with_table(page: str, record: dict[str, Any], sizes: dict[str, Any]) -> str:
    """``page`` with the tables of ``record`` and ``sizes`` between their markers."""
    for begin, text, end in ((BEGIN, table(record), END), (SIZES_BEGIN, sizes_table(sizes), SIZES_END)):
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


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


def _run_sizes(titles: Sequence[str], record: dict[str, Any]) -> list[str]:
    """Update a record of sizes. Returns the errors."""
    os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch-cpu")
    import transformers

    from tests.torch.huggingface_sizes import SIZES, share

    transformers.logging.set_verbosity_error()
    wrong: list[str] = []
    for row in SIZES:
        if titles and row.title not in titles:
            continue
        try:
            found = share(row)
        except Exception as error:  # all are tried
            wrong.append(f"{row.title}: {type(error).__name__}: {error}")
            record.pop(row.title, None)
            continue
        kept = {"ranks": row.ranks, "published": float(row.billions)}
        record[row.title] = {**kept, **_this_run(SIZES_RECORD), **found._asdict()}
        if abs(found.billions / kept["published"] - 1) > SIZES_TOLERANCE:
            wrong.append(f"{row.title}: {found.billions:.4g} billion parameters, published {row.billions}")
    return wrong


def _this_run(record: Path) -> dict[str, Any]:
    """Date, commit and versions."""
    sys.path.insert(0, str(ROOT / "ci"))
    import results

    written = [path.relative_to(ROOT).as_posix() for path in (record, PAGE)]
    return {"date": results.today(), "commit": results.commit_of(ROOT, but=written), "versions": _versions()}


def _versions() -> dict[str, str]:
    return {name: metadata.version(name).partition("+")[0] for name in ("transformers", "torch")}


def _read(record: Path) -> dict[str, Any]:
    return json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(f"{json.dumps(record, indent=1, sort_keys=True)}\n", encoding="utf-8")


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.model_table")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--only", nargs="*", default=[], metavar="TITLE", help="these models alone")
    parser.add_argument("--sizes", action="store_true", help="the second table: the sizes of released models")
    parser.add_argument("--page", action="store_true", help="write the page from the record, and run nothing")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.output is not None:
        _run(arguments.only, arguments.output)
        return 0
    record, sizes = _read(RECORD), _read(SIZES_RECORD)
    wrong: list[str] = []
    if arguments.sizes:
        wrong = _run_sizes(arguments.only, sizes)
        _write(SIZES_RECORD, sizes)
    elif not arguments.page:
        run = _this_run(RECORD)
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
        _write(RECORD, record)
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), record, sizes), encoding="utf-8")
    print("\n".join([*wrong, f"{len(record)} models, {len(sizes)} sizes"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
