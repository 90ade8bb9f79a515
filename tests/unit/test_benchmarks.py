"""The code around the measurements: statistics, reports, plots. The measurements check themselves."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import against, cases, machine, plot
from benchmarks.report import Goal, Result, Table, as_json, as_markdown, as_summary, read, write
from benchmarks.timing import Effort, Step, interleaved, ratios, spread


def result() -> Result:
    rows: list[list[Any]] = [
        [name, spread([1.0, 2.0, 3.0]), spread([ratio] * 3), spread([ratio] * 3)]
        for name, ratio in (("unsharded", 0.5), ("hand-written, textbook", 1.0), ("torch <1>", 100.0))
    ]
    columns = ["version", "microseconds", "ratio to textbook", "ratio to tuned"]
    goals = [Goal("slow", 2.0, 1.5), Goal("equal", 0.0, 0.0, strict=True), Goal("lost", float("nan"), 1.0)]
    return Result("mlp", "how", [Table("MLP: forward", columns, rows)], goals)


def test_spread() -> None:
    assert spread([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0}


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios({"a": [2.0, 30.0], "b": [1.0, 10.0]}, "b") == {"a": [2.0, 3.0], "b": [1.0, 1.0]}


def test_interleaved_tells_a_long_step_from_a_short_one() -> None:
    """The clock is advanced by the steps alone, so that a busy machine makes no difference."""
    now, cleared = [0], []

    def takes(nanoseconds: int) -> None:
        now[0] += nanoseconds

    steps = {
        "short": Step(lambda: takes(200_000)),
        "long": Step(lambda: takes(2_000_000), lambda: cleared.append(1)),
    }
    times = interleaved(steps, Effort(rounds=3, turn=0.001), lambda: now[0])
    assert cleared
    assert times == {"short": [200.0] * 3, "long": [2000.0] * 3}


def test_goals() -> None:
    assert [goal.reached for goal in result().goals] == [False, True, False]


def test_report(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "cpu-2.10"
    write(out, {"torch": "2.13"}, [result()])
    record = json.loads((tmp_path / "folder" / "cpu-2.10.json").read_text())
    assert record["environment"] == {"torch": "2.13"}
    again = Result.from_dict(record["results"][0])
    assert dataclasses.asdict(again)["tables"] == dataclasses.asdict(result())["tables"]
    text = as_markdown(*read(tmp_path / "folder" / "cpu-2.10.json"))
    assert text == as_markdown({"torch": "2.13"}, [result()])
    assert "| mlp | slow | 2.00 | <= 1.5 | **no** |" in text
    assert "| unsharded | 2.00 (1.50 to 2.50) | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) |" in text


def test_json_has_one_item_a_line_where_it_is_long() -> None:
    rows = [["x" * 100, float(i), {"median": 2 / 3}] for i in range(9)]
    text = as_json({"n": 1, "rows": rows, "title": None})
    assert json.loads(text) == {"n": 1, "rows": [[a, b, {"median": 0.666667}] for a, b, _ in rows], "title": None}
    assert len(text.splitlines()) == 2 + 2 + len(rows) + 2


def test_summary(tmp_path: Path) -> None:
    """The goals that were missed; the medians of tables that have the same versions, a row each; other tables whole."""
    alone = Table("Loading", ["way", "seconds"], [["meta", spread([1.0, 2.0, 3.0])]])
    several = dataclasses.replace(result(), tables=[*result().tables, alone, *result().tables])
    write(tmp_path / "cpu", {"torch": "2.13"}, [several])
    text = (tmp_path / "cpu.md").read_text()
    assert "1 of 3 were reached" in text and "| slow |" in text and "| equal |" not in text
    assert "**ratio to tuned**" in text and "|  | unsharded | hand-written, textbook | torch <1> |" in text
    assert text.count("| MLP: forward | 0.50 | 1.00 | 100.0 |") == 2
    assert "**Loading**" in text and "| meta | 2.00 (1.50 to 2.50) |" in text
    assert text.endswith("- torch: 2.13\n")


RESULTS = sorted((Path(cases.__file__).parents[1] / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_summaries_are_those_of_the_runs(path: Path) -> None:
    assert path.with_suffix(".md").read_text() == as_summary(*read(path))


def test_the_committed_plot_is_drawn_from_a_committed_run() -> None:
    drawn = [plot.draw(json.loads(path.read_text())) for path in RESULTS]
    assert (Path(cases.__file__).parents[2] / "docs" / "benchmarks.svg").read_text() in drawn


def test_results_have_little_weight() -> None:
    """One run of a machine, not the history: the repository keeps that."""
    files = [path for path in RESULTS[0].parent.iterdir() if path.suffix not in (".json", ".md")]
    assert not files
    assert all(len(path.read_text().splitlines()) < 1000 for path in RESULTS)


def test_plot() -> None:
    # MindSpore's tables have the same titles, and other columns.
    other = {"case": "mindspore", "tables": [{"title": "MLP: forward", "columns": ["version"], "rows": []}]}
    results = [dataclasses.asdict(result()), other]
    record = {"environment": {"processor": "A & B", "torch": "2.13"}, "results": results}
    root = ElementTree.fromstring(plot.draw(record))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"MLP: forward", "torch <1>", "0.50", "100.00"} <= set(words)
    _, *bars = root.iter("{http://www.w3.org/2000/svg}rect")
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths[1] == 0 < widths[0] < widths[2], "unsharded, hand-written, torch: distances from 1"
    with pytest.raises(ValueError, match="no table"):
        plot.draw({**record, "results": []})


def test_machine() -> None:
    described = machine.describe()
    assert described["cores"] and described["processor"] and described["python"].startswith("3.")  # type: ignore[union-attr]


def test_every_case_has_a_module() -> None:
    folder = Path(cases.__file__).parent
    assert sorted(cases.NAMES) == sorted(path.stem for path in folder.glob("[a-z]*.py"))


def test_every_case_is_explained() -> None:
    readme = (Path(cases.__file__).parents[1] / "README.md").read_text()
    assert all(f"| `{name}` |" in readme for name in cases.NAMES)


def test_interval_of_the_median() -> None:
    values = [float(x) for x in range(1, 10)]
    assert against.interval(values) == (2.0, 8.0), "for 9 values: 96.1 %"
    assert against.interval(values[:6]) == (1.0, 6.0) and against.interval(values, 0.5) == (3.0, 7.0)
    with pytest.raises(ValueError, match="5 pairs give no interval"):
        against.interval(values[:5])


def test_summary_of_pairs() -> None:
    pairs = [{"quick": 1.0 + i / 100, "slow": 1.0 + i / 50} for i in range(6)]
    slow = against.summary("abc", pairs)
    assert slow.tables[0].rows == [["quick", "1.025", "1.000", "1.050"], ["slow", "1.050", "1.000", "1.100"]]
    assert [goal.reached for goal in slow.goals] == [True, False]
