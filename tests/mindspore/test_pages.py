"""Every block of Python in the documentation of MindSpore runs as it stands, on four ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import blocks_of, pages, run_page


@pytest.mark.parametrize("page", pages(mindspore=True))
def test_page(pool: Any, page: str, tmp_path: Path) -> None:
    assert pool.run(4, run_page, page, str(tmp_path)) == [len(blocks_of(page))] * 4
