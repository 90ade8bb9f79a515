"""What the tests of both frameworks want of the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.operator_table.exchange import OperatorPool
from tests.support.operator_table.table import found_by, operators, worst

__all__ = ["none_wrong", "operator_pool"]


@pytest.fixture(scope="module")
def operator_pool(platform_name: str) -> Iterator[OperatorPool]:
    """Ranks that can try operators."""
    with OperatorPool(platform_name, first="tests.support.measured_ranks:leave_the_rest") as pool:
        yield pool


def none_wrong(pool: OperatorPool, at_least: int) -> None:
    """Try every operator with one sample and few placements: none is wrong or hangs.

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
    assert not bad, "\n".join(f"{what}\n    " + "\n    ".join(texts) for what, texts in bad.items())
