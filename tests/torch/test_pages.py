"""Every block of Python in the documentation runs as it stands, on four ranks."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.testing.extent import in_gate
from tests.support.pages import ELSEWHERE, PROGRAMS, ROOT, blocks_of, pages, run_page
from tests.support.programs import run_each

#: Pages whose code starts processes by itself: they run as programs.
ALONE = ("docs/explain.md", "docs/getting_started.md")

#: Pages whose programs take long, each of functions that have tests of their own.
LONG = ("docs/checkpoint.md", "docs/explain.md")


def by_length(names: Iterable[str]) -> list[Any]:
    """Rows, of which the gate leaves out `LONG`."""
    names = list(names)
    return in_gate(names, [name for name in names if name not in LONG])


@pytest.mark.parametrize("page", by_length(page for page in pages() if page not in ALONE))
def test_page(pool: Any, page: str, tmp_path: Path) -> None:
    if "transformers" in (ROOT / page).read_text(encoding="utf-8") and not find_spec("transformers"):
        pytest.skip("transformers is not installed")
    assert pool.run(4, run_page, page, str(tmp_path)) == [len(blocks_of(page))] * 4


@pytest.mark.parametrize("page", by_length(ALONE))
def test_page_of_programs(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    # Code that starts processes is a program of its own, whose other code those would run as well.
    apart = [block for block in blocks if "__main__" in block]
    together = "\n".join(block for block in blocks if block not in apart)
    for i, program in enumerate([together, *apart]):
        script = tmp_path / f"program{i}.py"
        script.write_text(program, encoding="utf-8")
        (ended,) = run_each([script], [{}], tmp_path)
        assert ended.status == 0, ended.err


def test_what_runs_elsewhere_is_named_there() -> None:
    for name, test in PROGRAMS.items():
        assert name in (ROOT / test).read_text(encoding="utf-8")
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")
