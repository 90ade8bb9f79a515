"""`fully_shard` with all that may be around it: a table in which each pair of choices meets."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.testing.extent import in_gate
from tests.mindspore.data_parallel_rows import run, settle
from tests.support.data_parallel_table import pairs, title

#: Every two choices together. A row takes seconds of compilation: the gate has the first and every fourth.
ROWS = pairs(settle)


@pytest.mark.parametrize("row", in_gate(ROWS, ROWS[::8]), ids=title)
def test_pairs(pool: Any, row: dict[str, Any]) -> None:
    pool.run(4, run, row)
