"""Texts and pictures of CommTrace, explain and their like, without a framework: numbers, tables, pictures, traces."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyper_parallel.cli.output import print_text
from hyper_parallel.debug.collective import Collective
from hyper_parallel.debug.comm_trace import CommTrace
from hyper_parallel.debug.svg import svg_of_lines
from hyper_parallel.debug.text import fold_lines, format_bytes, format_seconds, format_table


def collective(kind: str, seconds: float | None, module: str = "up") -> Collective:
    start = None if seconds is None else 0.5
    return Collective(module, "forward", kind, "sum", "tp", 2, (4, 8), "float32", 128, start, seconds)


def test_numbers() -> None:
    assert [format_bytes(n) for n in (0, 1536, 3 * 2**30)] == ["0 B", "1.5 KiB", "3 GiB"]
    times = {None: "-", 2.5: "2.5 s", 0.025: "25 ms", 0.00025: "250 us", 1e-8: "0.01 us"}
    assert [format_seconds(s) for s in times] == list(times.values())
    assert format_table(("a", "n"), [("up", 12), ("down", 4)], right=[1]) == "a      n\nup    12\ndown   4"


def test_tables_as_wide_as_a_terminal() -> None:
    """The widest column is folded between words, then the next; columns that end at one place never are."""
    rows = [("up", "forward: 2 all_gather, 2 reduce_scatter", 12), ("down", "nothing", 4)]
    table = format_table(("module", "what", "n"), rows, right=[2], width=32)
    assert table.splitlines() == [
        "module  what                   n",
        "up      forward: 2            12",
        "        all_gather, 2",
        "        reduce_scatter",
        "down    nothing                4",
    ]
    assert format_table(("module", "what", "n"), rows, right=[2], width=80) == format_table(
        ("module", "what", "n"), rows, right=[2]
    )
    cells = ("one two three four five six", "seven eight nine ten")
    both = format_table(("a", "b"), [cells], width=34)
    assert max(map(len, both.splitlines())) <= 34
    assert sorted(both.split()) == sorted(["a", "b", *cells[0].split(), *cells[1].split()])


def test_lines_as_wide_as_a_terminal() -> None:
    """Continuations stand to the right of everything below the line. Long words and short lines stay as they are."""
    tree = "  up  Linear\n    weight (8, 4) -> (4, 4), Shard(0) on tp\n\na_name_of_some_module.that_is_long x"
    assert fold_lines(tree, 32).split("\n") == [
        "  up  Linear",
        "    weight (8, 4) -> (4, 4),",
        "            Shard(0) on tp",
        "",
        "a_name_of_some_module.that_is_long",
        "        x",
    ]
    assert fold_lines(tree, 80) == tree


def test_a_trace(tmp_path: Path) -> None:
    trace = CommTrace()
    trace.collectives += [collective("all_reduce", 0.002), collective("all_reduce", 0.004)]
    trace.collectives.append(collective("broadcast", None, ""))
    lines = trace.table().splitlines()
    assert "all_reduce (sum)" in lines[1] and "tp (2 ranks)" in lines[1] and lines[1].split()[-2:] == ["6", "ms"]
    assert lines[2].startswith("-") and lines[2].endswith("-")
    assert json.loads(trace.to_json())["collectives"][0]["bytes"] == 128
    trace.save_chrome_trace(tmp_path / "trace.json", rank=3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["ph"] for e in events] == ["M", "M", "X", "X", "X"] and {e["pid"] for e in events} == {3}
    assert events[2]["name"] == "all_reduce up" and events[2]["dur"] == pytest.approx(2000) and events[4]["dur"] == 0


def test_a_picture_of_lines() -> None:
    picture = svg_of_lines(["# Modules", "up < down"])
    assert "font-weight='bold'" in picture and ">Modules<" in picture and "up &lt; down" in picture


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is in colours where rich is installed; elsewhere it is unchanged."""
    printed: list[Any] = []
    console = SimpleNamespace(print=lambda text, markup: printed.append((text, markup)))
    monkeypatch.setitem(sys.modules, "rich.console", SimpleNamespace(Console=lambda file, soft_wrap: console))
    print_text("[up]", _Terminal())
    assert printed == [("[up]", False)]
    monkeypatch.setenv("COLUMNS", "20")
    print_text("    weight (8, 4), Shard(0) on tp", _Terminal())
    assert printed.pop()[0].split("\n") == ["    weight (8, 4),", f"{' ' * 12}Shard(0)", f"{' ' * 12}on tp"]
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for file in (_Terminal(), io.StringIO()):
        print_text("[up]", file)
        assert file.getvalue() == "[up]\n" and len(printed) == 1
