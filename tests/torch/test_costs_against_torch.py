"""Operations send no more than torch's DTensor sends for the same calls, and docs/communication_costs.md says so."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks.torch_groups import fake_group
from tests.torch.torch_costs import (
    DIFFERENT,
    PAGE,
    RANKS,
    REDISTRIBUTED,
    compare_operations,
    compare_redistributions,
)

pytestmark = pytest.mark.skipif(dist.is_initialized(), reason="another test has process groups of its own")


@pytest.mark.parametrize(("mesh", "size"), REDISTRIBUTED)
def test_redistributions(mesh: tuple[int, ...], size: tuple[int, ...]) -> None:
    with fake_group(RANKS):
        found = list(compare_redistributions(mesh, size))
    assert [c for c in found if c.is_more] == []
    assert len(found) > 15 and all(c.torch is not None for c in found)
    assert any(c.ours.messages for c in found)


def test_operations() -> None:
    with fake_group(RANKS):
        found = list(compare_operations())
    more = {(c.name, c.placements): c for c in found if c.is_more}
    assert set(more) == set(DIFFERENT)
    assert sum(c.torch is None for c in found) < 5, [c for c in found if c.torch is None]
    softmax = next(c for c in found if (c.name, c.placements) == ("softmax along 1", "S1"))
    # Two reductions of a number a row; torch gathers 8 of 32 columns of each rank.
    assert (softmax.ours.messages, softmax.ours.bytes) == (2, 2 * 2 * 0.75 * 16 * 4)
    assert softmax.torch is not None and softmax.torch.bytes == 3 * 16 * 8 * 4
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    for c in found:
        if c.torch is not None and c.ours != c.torch:
            row = f"| `{c.name}` | {c.placements} | {c.ours} | {c.torch} |"
            assert any(line.startswith(row) for line in rows), row
