"""The brute-force check has teeth: it rejects rules that are wrong in one place."""

from __future__ import annotations

import pytest

from tests.unit.rules_cases import CASES
from tests.unit.rules_harness import fails, mutants
from tests.unit.rules_missing import ACCEPTED

RIGHT = {
    # Linear in the log-probabilities, which are never a partial sum: the rule does not say so, and the mutant is right.
    ("nll_loss", "terms"),
    # The values are right for empty parts too; the order of collectives in backward goes wrong.
    ("fused_attention", "nonempty"),
    # The largest elements of parts give the largest of all without it: it adds how ties share a gradient.
    ("amax", "call"),
    ("amin", "call"),
    # Right where many elements are taken too; the sum of the taken elements of all ranks is then larger than their
    # parts.
    ("index_select", "label added"),
    # Here ranks share the noise of a case.
    ("fused_attention", "call"),
    # Linear indeed, in some calls.
    *ACCEPTED,
}


@pytest.mark.nightly
@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_wrong_rules_are_rejected(op: str) -> None:
    rejected: dict[str, bool] = {}
    for case in CASES:
        if case.op == op:
            for mutant in mutants(case):
                if not rejected.get(mutant.kind) and (op, mutant.kind) not in RIGHT:
                    rejected[mutant.kind] = fails(case, mutant)
    assert rejected
    assert all(rejected.values()), f"not noticed: {[kind for kind, noticed in rejected.items() if not noticed]}"
