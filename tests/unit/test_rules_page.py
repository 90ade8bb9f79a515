"""docs/rules.md has the table that its generator makes of what stands at the rules."""

from __future__ import annotations

import re

from hyper_parallel.core.dtensor.operations.rules import OPERATIONS
from tests.support.rule_table import PAGE, table, with_table


def test_the_page_is_what_the_generator_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "write it anew: python -m tests.support.rule_table"


def test_every_operation_is_in_the_table_and_says_what_it_is() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table(), re.MULTILINE))
    assert rows.keys() == {name for name in OPERATIONS if not name.startswith("custom:")}
    assert all(len(what) > 2 for what in rows.values())
