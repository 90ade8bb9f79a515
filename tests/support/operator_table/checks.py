"""The requirements that the tests of both frameworks have for the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hyper_parallel.testing.extent import everything
from tests.support.operator_table.exchange import OperatorPool
from tests.support.operator_table.page import PAGE, read
from tests.support.operator_table.table import ORDER, found_by, operators, worst

__all__ = ["as_good_as_the_page", "operator_pool"]


@pytest.fixture(scope="module")
def operator_pool(platform_name: str) -> Iterator[OperatorPool]:
    """Ranks that can try operators: four in the nightly run, two in the gate."""
    with OperatorPool(
        platform_name, 4 if everything() else 2, first="tests.support.measured_ranks:leave_the_rest"
    ) as pool:
        yield pool


def as_good_as_the_page(pool: OperatorPool, at_least: int) -> None:
    """Try every operator with one sample and few placements. None is wrong or hangs. None that the page lists with a
    rule gathers or is refused: that is the only sign of a lost rule.

    Args:
        pool: of the backend.
        at_least: how many operators there must be that a rank can compute.
    """
    found = found_by(pool, operators(pool)[1], 1, many=False)
    tried = {name: line["found"] for name, line in found.items() if "found" in line}
    assert len(tried) >= at_least
    bad = {
        f"{name}, {form}: {verdict}": verdicts[verdict]
        for name, forms in tried.items()
        for form, verdicts in forms.items()
        if (verdict := worst(found[name], form)) in ("wrong", "hanging")
    }
    said = read("mindspore" if pool.platform == "mindspore" else "torch-cpu")
    worse = {
        f"{name}, {form}: {now}, and {PAGE.name} says {verdict}": tried[name][form][now]
        for name, forms in said.items()
        for form, verdict in forms.items()
        if name in tried and (now := worst(found[name], form)) and ORDER.index(now) > ORDER.index(verdict)
    }
    bad |= worse
    assert not bad, "\n".join(f"{what}\n    " + "\n    ".join(texts) for what, texts in bad.items())
