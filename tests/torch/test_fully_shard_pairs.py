"""`fully_shard` with all that may be around it: a table in which each pair of choices meets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.data_parallel_table import pairs, title
from tests.torch.data_parallel_rows import run, settle


@pytest.mark.parametrize("row", pairs(settle), ids=title)
def test_pairs(pool: Any, row: dict[str, Any]) -> None:
    pool.run(4, run, row)
