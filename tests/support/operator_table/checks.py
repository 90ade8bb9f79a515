"""What the tests of both frameworks want of the table."""

from __future__ import annotations

from hyper_parallel.testing.pool import WorkerPool
from tests.support.operator_table.table import found_by, operators, worst

__all__ = ["none_wrong"]


def none_wrong(pool: WorkerPool, at_least: int) -> None:
    """Try every operator with one sample and few placements: none is wrong or hangs.

    Args:
        pool: of the backend.
        at_least: how many operators there must be that a rank can compute.
    """
    names = operators(pool)[1]
    found = found_by(pool, names, 1, many=False)
    tried = [name for name, line in found.items() if "found" in line]
    assert len(tried) >= at_least
    bad = {
        f"{name}, {form}: {worst(line, form)}": verdicts[worst(line, form)]
        for name, line in found.items()
        for form, verdicts in line.get("found", {}).items()
        if worst(line, form) in ("wrong", "hanging")
    }
    assert not bad, "\n".join(f"{what}\n    " + "\n    ".join(texts) for what, texts in bad.items())
