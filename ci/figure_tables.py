"""Sections of the documentation that are generated from committed results of fuzzing, mutants and benchmarks.

``python -m ci.figures --write`` writes them. A unit test fails if a page has another text.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

from table import with_section

__all__ = ["SECTIONS", "renewed"]

BENCHMARKS = "benchmarks/results/x86_64-2-cores.json"
WIDTH = 120
#: Outcomes in the order of docs/fuzzing.md; the bad ones come last.
OUTCOMES = ("right", "refused", "plain refused", "accepted", "unsteady", "wrong", "differs", "hanging")


def _read(root: Path, name: str) -> Any:
    return json.loads((root / name).read_text(encoding="utf-8"))


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """Return a table in Markdown; the columns with indices in ``right`` are right-aligned."""
    rules = ["---:" if i in right else "---" for i in range(len(columns))]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (columns, *rows)]
    return "\n".join([lines[0], "|" + "|".join(rules) + "|", *lines[1:]])


def _filled(text: str) -> str:
    """Return ``text`` wrapped to the width of a page."""
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


def _stamp(entry: dict[str, Any]) -> str:
    return f"{entry['date']}, `{entry['commit']}`"


def fuzz(root: Path) -> str:
    """Return a table of the outcomes of the last random programs, with their runs."""
    rows = [
        [
            f"`{backend}`",
            f"{entry['programs']:,}",
            *(f"{entry['outcomes'].get(kind, 0):,}" for kind in OUTCOMES),
            "; ".join(f"{run['count']:,}: {run['framework']}, {_stamp(run)}" for run in entry["runs"]),
        ]
        for backend, entry in _read(root, "ci/last_fuzz.json").items()
    ]
    return _table(["backend", "programs", *OUTCOMES, "runs"], rows, right=range(1, 2 + len(OUTCOMES)))


def mutants(root: Path) -> str:
    """Return the results of the last run of mutants, with tables of survivors and of nightly-only ones."""
    found = _read(root, "ci/last_mutants.json")
    survivors, verdicts = found["survivors"], found["verdicts"]
    noticed = sum(verdicts.get(name, 0) for name in ("failed", "hung", "broken"))
    # Runs from before the nightly run existed have no such entries.
    late, untried = found.get("at night alone", []), found.get("not tried at night", 0)
    same = sum(survivor["why"].startswith("equivalent") for survivor in survivors)
    first = (
        f"Of {found['mutants']} mutants of seed {found['seed']}, {noticed} were noticed by the gate and {len(late)} by "
        f"the nightly run alone ({_stamp(found)}), and {len(survivors)} survived, of which {same} change nothing"
        f"{f' and {untried} were not tried at night' if untried else ''}:"
    )
    rows = [[*_where(survivor), survivor["why"]] for survivor in survivors]
    parts = [_filled(first), _table(["where", "change", "why it does not matter"], rows)]
    if late:
        rows = [[*_where(mutant), f"`{_code(mutant['test'] or mutant['verdict'])}`"] for mutant in late]
        parts += ["The nightly run alone notices:", _table(["where", "change", "test"], rows)]
    return "\n\n".join(parts)


def _where(mutant: dict[str, Any]) -> list[str]:
    """Return the cells that name the file that a mutant changes, and the change."""
    change = f"`{_code(mutant['change'])}` in `{_code(mutant['text'])}`"
    return [f"`{mutant['where'].removeprefix('hyper_parallel/')}`", change]


def _code(text: str) -> str:
    """Return ``text`` escaped for a cell of a table."""
    return text.replace("|", "\\|")


class _Benchmarks:
    """Results of the last run of the benchmarks."""

    def __init__(self, root: Path) -> None:
        record = _read(root, BENCHMARKS)
        environment = record["environment"]
        commit = environment["hyper_parallel"].replace("-dirty", "+changes")
        self.stamp = _stamp({"date": environment["date"], "commit": commit})
        self.cases = {result["case"]: result for result in record["results"]}

    def ratios(self, case: str, version: str, titled: Callable[[str], bool] = lambda title: True) -> str:
        """Return the range of the median ratios to tuned code, in the tables whose title passes ``titled``."""
        medians = [
            row[table["columns"].index("ratio to tuned")]["median"]
            for table in self.cases[case]["tables"]
            for row in table["rows"]
            if row[0] == version and titled(table["title"])
        ]
        digits = 2 if max(medians) < 2 else 1
        return f"{min(medians):.{digits}f} to {max(medians):.{digits}f}"


def _with_gradients(title: str) -> bool:
    return not title.endswith("no_grad")


def speed(root: Path) -> str:
    """Return a paragraph for the README: the host's times relative to tuned hand-written code."""
    run, ours, theirs = _Benchmarks(root), "hyper_parallel", "torch.distributed.tensor"
    plain = [
        run.ratios("mlp", ours, _with_gradients),
        run.ratios("llama", ours, lambda title: _with_gradients(title) and "sequence" not in title),
    ]
    sequence = run.ratios("llama", ours, lambda title: "sequence" in title)
    styles = [run.ratios(case, theirs, _with_gradients) for case in ("mlp", "llama")]
    text = (
        "The host's time for very small models without a network, as a multiple of the time of tuned hand-written "
        f"code: {plain[0]} for an MLP, {plain[1]} for a Llama block, and {sequence} for that block with sequence "
        "parallelism. Modules hand plain tensors to each other. Torch's styles take "
        f"{styles[0]} for the MLP and {styles[1]} for the block, sequence parallelism included ({run.stamp})."
    )
    return _filled(text)


def home(root: Path) -> str:
    """Return a paragraph for the home page: a Llama block relative to hand-written code, with torch's styles."""
    run = _Benchmarks(root)
    ours, theirs = (
        run.ratios("llama", version, lambda title: _with_gradients(title) and "sequence" not in title)
        for version in ("hyper_parallel", "torch.distributed.tensor")
    )
    text = (
        f"**Tensor parallelism: {ours} times** the host's time of tuned hand-written code, for a very small Llama "
        f"block without a network. Torch's styles take {theirs} times that time ({run.stamp})."
    )
    return _filled(text)


def aims(root: Path) -> str:
    """Return the goals and results of the small models, and the ratios at real sizes."""
    run = _Benchmarks(root)
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for goal in (goal for case in ("mlp", "llama") for goal in run.cases[case]["goals"]):
        title, _, compared = goal["what"].split(": ")
        version, _, rival = compared.rpartition(" to ")
        name = title + version.removeprefix("hyper_parallel")
        cells.setdefault(name, {}).setdefault(rival, []).append(goal)
    rows = [
        [name, *(cell for rival in ("textbook", "tuned") for cell in _cells(goals.get(rival, [])))]
        for name, goals in cells.items()
    ]
    link = f"[the last run](../../{Path(BENCHMARKS).with_suffix('.md').as_posix()})"
    first = f"Medians of ratios, forward and then with backward, in {link} ({run.stamp}). Bold ones miss their aim."
    torchs = [run.ratios("gloo", f"torch.distributed.tensor{more}") for more in ("", ", DTensors between modules")]
    last = (
        "At real sizes over gloo, 2 and 4 ranks, the same models take "
        f"{run.ratios('gloo', 'hyper_parallel')} times the time of tuned code, with DTensors between modules "
        f"{run.ratios('gloo', 'hyper_parallel, DTensors between modules')}. Torch's styles take {torchs[0]}, and with "
        f"DTensors between modules {torchs[1]} ({run.stamp})."
    )
    table = _table(["", "to textbook", "aim", "to tuned", "aim"], rows)
    return f"{_filled(first)}\n\n{table}\n\n{_filled(last)}"


def _cells(goals: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the cells with results and with goals; equal goals appear once."""
    reached = (f"**{g['value']:.2f}**" if g["value"] > g["limit"] else f"{g['value']:.2f}" for g in goals)
    return ", ".join(reached), ", ".join(dict.fromkeys(f"{goal['limit']:.2f}" for goal in goals))


#: Name of a section -> (page, function that returns the section).
SECTIONS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "speed": ("README.md", speed),
    "home": ("docs/index.md", home),
    "fuzz": ("docs/fuzzing.md", fuzz),
    "mutants": ("docs/notes/mutants.md", mutants),
    "aims": ("docs/notes/performance.md", aims),
}


def renewed(root: Path) -> dict[Path, str]:
    """Return the pages below ``root`` with outdated sections -> their new text."""
    pages: dict[Path, str] = {}
    for name, (page, make) in SECTIONS.items():
        path = root / page
        text = pages.get(path) or path.read_text(encoding="utf-8")
        begin = f"<!-- made by python -m ci.figures --write, {name}: do not edit -->"
        pages[path] = with_section(text, make(root), begin, f"<!-- end of {name} -->")
    return {path: text for path, text in pages.items() if text != path.read_text(encoding="utf-8")}
