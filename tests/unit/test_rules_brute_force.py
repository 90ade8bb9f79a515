"""Every rule, by brute force: the labels it gives are right, and are the ones expected."""

from __future__ import annotations

import pytest

from hyper_parallel.core.rules import OPERATIONS
from tests.unit.rules_cases import CASES
from tests.unit.rules_harness import Case, check, check_labels


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_runs_equal_the_whole(case: Case) -> None:
    check_labels(case)
    assert check(case) >= 4


def test_every_rule_has_a_case() -> None:
    own = {name for name in OPERATIONS if not name.startswith("custom:")}
    assert {case.op for case in CASES} == own - {"replicate"}
