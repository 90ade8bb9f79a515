"""Rules say all that they can, but for the cases that are accepted with a reason. The search for missing rules finds
something."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.testing.extent import in_gate
from tests.unit.rules_cases import CASES
from tests.unit.rules_missing import ACCEPTED, missing_in

OPS = sorted({case.op for case in CASES})
#: Operations whose search takes as long as those of all others.
SLOW = {"batched", "flex_attention", "fused_attention"}


@pytest.mark.parametrize("op", in_gate(OPS, [op for op in OPS if op not in SLOW]))
def test_nothing_is_missing(op: str) -> None:
    found = {missing.what for case in CASES if case.op == op for missing in missing_in(case)}
    assert found == {what for own, what in ACCEPTED if own == op}


@pytest.mark.parametrize(
    ("op", "changes", "missing"),
    [
        ("linear_unary", {"terms": ()}, "linear in operand 0"),
        ("sum", {"terms": ()}, "linear in operand 0"),
        ("linear_unary", {"operands": (("a", None),), "results": (("a", None),)}, "operand 0 along dimension -1"),
        ("sum", {"operands": (("a", None),), "results": (("a",),)}, "operand 0 along dimension -1"),
        ("amax", {"operands": (("a", None),), "results": (("a",),)}, "operand 0 along dimension -1"),
        ("matmul", {"operands": (("m", None), (None, "n")), "results": (("m", "n"),)}, "operand 0 along dimension -1"),
    ],
)
def test_what_a_rule_lost_is_missed(monkeypatch: pytest.MonkeyPatch, op: str, changes: dict, missing: str) -> None:
    case = next(
        case for case in CASES if case.op == op and all(x.ndim == 2 for x in case.operands if isinstance(x, np.ndarray))
    )
    right = OPERATIONS[op]
    wrong = replace(right, rule=lambda shapes, static_args: replace(right.rule(shapes, static_args), **changes))
    monkeypatch.setitem(OPERATIONS, op, wrong)
    assert missing in {found.what for found in missing_in(case)}
