"""docs/rules.md has the table that its generator makes of the rules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hyper_parallel.core import rules
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.core.rules.signature import MEANINGS
from tests.support.rule_table import PAGE, table, with_table


def test_the_page_is_what_the_generator_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "write it anew: python -m tests.support.rule_table"


def test_every_operation_is_in_the_table_and_says_what_it_is() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| .*\|", table(), re.MULTILINE))
    assert rows.keys() == {name for name in OPERATIONS if not name.startswith("custom:")}
    assert all(len(what) > 2 for what in rows.values())


def test_meanings_are_those_of_static_arguments() -> None:
    static = {x.name for op in OPERATIONS.values() for x in op.signature.static}
    assert MEANINGS.keys() <= static


def test_what_is_known_of_an_operation_stands_at_its_rule_only() -> None:
    """No other module of core that runs operations names one."""
    folder = Path(rules.__file__).parents[1]
    named = {
        (path.name, node.value)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OPERATIONS
    }
    assert {name for _, name in named} <= {"sum"}, named  # of which partial sums are made too
