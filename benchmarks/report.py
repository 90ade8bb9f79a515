"""The result of a case, and how it is written.

A file of JSON holds the whole run, and a Markdown file of the same name a summary. ``python -m benchmarks.report
NAME.json`` prints the whole run as Markdown.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Goal", "Result", "Table", "as_json", "as_markdown", "as_summary", "read", "write"]

#: JSON that is not longer stands on one line.
LINE = 300


@dataclass
class Table:
    """Rows of cells. A cell is a text, a number, or a `timing.spread`; the first cell of a row is its name."""

    title: str
    columns: list[str]
    rows: list[list[Any]] = field(default_factory=list)


@dataclass
class Goal:
    """Something that is to hold: ``value <= limit``.

    Attributes:
        strict: a run fails when it does not hold, on whatever machine. Times are not strict.
    """

    what: str
    value: float
    limit: float
    strict: bool = False

    @property
    def reached(self) -> bool:
        """Return whether it holds; a NaN does not."""
        return self.value <= self.limit


@dataclass
class Result:
    """The measurements of a case.

    Attributes:
        case: its name on the command line.
        how: the measurement, in a few sentences.
    """

    case: str
    how: str
    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """The reverse of `dataclasses.asdict`."""
        tables = [Table(**table) for table in data["tables"]]
        return cls(data["case"], data["how"], tables, [Goal(**goal) for goal in data["goals"]])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{_number(value['median'])} ({_number(value['lower_quartile'])} to {_number(value['upper_quartile'])})"
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _grid(columns: list[str], rows: list[list[Any]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
        *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows),
        "",
    ]


def _of_goals(results: list[Result], missed_only: bool = False) -> list[str]:
    rows = [
        [result.case, goal.what, goal.value, f"<= {goal.limit:g}", "yes" if goal.reached else "**no**"]
        for result in results
        for goal in result.goals
        if not (missed_only and goal.reached)
    ]
    return _grid(["case", "goal", "measured", "limit", "reached"], rows) if rows else []


def _of_machine(environment: dict[str, Any]) -> list[str]:
    return ["## Machine", "", *(f"- {key}: {value}" for key, value in environment.items()), ""]


def as_markdown(environment: dict[str, Any], results: list[Result]) -> str:
    """The whole run: goals first, then every table of every case, then the machine."""
    lines = ["# Benchmark", "", "In brackets: quartiles over rounds. Cases: `benchmarks/README.md`.", ""]
    if goals := _of_goals(results):
        lines += ["## Goals", "", *goals]
    for result in results:
        lines += [f"## {result.case}", "", result.how, ""]
        for table in result.tables:
            lines += [f"**{table.title}**", "", *_grid(table.columns, table.rows)]
    return "\n".join([*lines, *_of_machine(environment)])


def as_summary(environment: dict[str, Any], results: list[Result]) -> str:
    """The missed goals, and the medians of each case: one row a table where the tables have equal columns."""
    goals = [goal for result in results for goal in result.goals]
    lines = [
        "# Benchmark",
        "",
        "A summary. The file of JSON next to this one holds every figure, with quartiles over rounds; `python -m "
        "benchmarks.report` prints it. Cases: `benchmarks/README.md`.",
        "",
    ]
    if goals:
        lines += ["## Goals", "", f"{sum(goal.reached for goal in goals)} of {len(goals)} were reached.", ""]
        lines += _of_goals(results, missed_only=True)
    for result in results:
        lines += [f"## {result.case}", "", result.how, ""]
        alike: dict[tuple[str, ...], list[Table]] = {}
        for table in result.tables:
            alike.setdefault((*table.columns, *(row[0] for row in table.rows)), []).append(table)
        for first, *others in alike.values():
            if not others:
                lines += [f"**{first.title}**", "", *_grid(first.columns, first.rows)]
                continue
            lines += [f"**{first.columns[-1]}**", ""]
            rows = [[table.title, *(_median(row[-1]) for row in table.rows)] for table in (first, *others)]
            lines += _grid(["", *(row[0] for row in first.rows)], rows)
    return "\n".join([*lines, *_of_machine(environment)])


def _median(cell: Any) -> Any:
    return cell["median"] if isinstance(cell, dict) else cell


def as_json(value: Any, indent: str = "") -> str:
    """JSON with numbers to six digits; a value longer than a line is written one item a line."""
    if isinstance(value, float):
        return json.dumps(float(f"{value:.6g}"))
    if isinstance(value, dict):
        items, brackets = [f"{json.dumps(key)}: {as_json(x, indent + ' ')}" for key, x in value.items()], "{}"
    elif isinstance(value, list):
        items, brackets = [as_json(x, indent + " ") for x in value], "[]"
    else:
        return json.dumps(value)
    line = ", ".join(items)
    if len(line) <= LINE and "\n" not in line:
        return f"{brackets[0]}{line}{brackets[1]}"
    return f"{brackets[0]}\n{indent} " + f",\n{indent} ".join(items) + f"\n{indent}{brackets[1]}"


def write(out: Path, environment: dict[str, Any], results: list[Result]) -> None:
    """Write the run to ``out`` with the suffix .json, and its summary to ``out`` with .md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment, "results": [dataclasses.asdict(result) for result in results]}
    # Not with_suffix: names may hold dots.
    Path(f"{out}.json").write_text(as_json(record) + "\n")
    Path(f"{out}.md").write_text(as_summary(*read(Path(f"{out}.json"))))


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """The environment and the results in a file that `write` wrote."""
    record = json.loads(path.read_text())
    return record["environment"], [Result.from_dict(result) for result in record["results"]]


if __name__ == "__main__":
    print(as_markdown(*read(Path(sys.argv[1]))))
