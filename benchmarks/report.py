"""What a case returns, and how it is written: JSON for programs, Markdown for people."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Goal", "Result", "Table", "as_markdown", "write"]


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
        """Whether it holds; a NaN does not."""
        return self.value <= self.limit


@dataclass
class Result:
    """What a case measured.

    Attributes:
        case: its name on the command line.
        how: what was measured, in a few sentences.
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


def as_markdown(environment: dict[str, Any], results: list[Result]) -> str:
    """The report: goals first, then each case, then the machine."""
    lines = [
        "# Benchmark",
        "",
        "In brackets: quartiles over rounds. Each case is explained in `benchmarks/README.md`.",
        "",
    ]
    goals = [(result, goal) for result in results for goal in result.goals]
    if goals:
        rows = [
            [result.case, goal.what, goal.value, f"<= {goal.limit:g}", "yes" if goal.reached else "**no**"]
            for result, goal in goals
        ]
        lines += ["## Goals", "", *_grid(["case", "goal", "measured", "limit", "reached"], rows)]
    for result in results:
        lines += [f"## {result.case}", "", result.how, ""]
        for table in result.tables:
            lines += [f"**{table.title}**", "", *_grid(table.columns, table.rows)]
    lines += ["## Machine", "", *(f"- {key}: {value}" for key, value in environment.items())]
    return "\n".join(lines) + "\n"


def write(out: Path, environment: dict[str, Any], results: list[Result]) -> None:
    """Write ``out`` with the suffixes .json and .md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment, "results": [dataclasses.asdict(result) for result in results]}
    # Not with_suffix: names may hold dots.
    Path(f"{out}.json").write_text(json.dumps(record, indent=1) + "\n")
    Path(f"{out}.md").write_text(as_markdown(environment, results))
