"""Rules that are missing, not wrong: dimensions along which an operation could be sharded, or sums that it could keep
partial, and no rule says.

    python -m tests.unit.rules_missing

prints them for all calls of `rules_cases`. An operation that by its numbers is linear in an operand that is in no
`terms`, and one that gives the right result with a dimension sharded that the rule wants whole, are found by trying.
`ACCEPTED` holds the known cases, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.core.rules.op_sharding import OpSharding
from tests.unit.rules_cases import CASES
from tests.unit.rules_harness import Case, check, expected_results, relabelled, ways

__all__ = ["ACCEPTED", "Missing", "missing_in"]

#: Of these the rule could say more, or the numbers mislead: (operation, what) -> why it does not.
ACCEPTED: dict[tuple[str, str], str] = {
    (
        "attention",
        "linear in operand 2",
    ): "values are shards of heads; reducing them costs less than attending",
    (
        "attention",
        "operand 0 along dimension -2",
    ): "right without a causal mask only, which counts queries",
    ("attention", "operand 2 along dimension -1"): "attention is sharded by heads",
    ("batched", "linear in operand 1"): "right sides of a system: one rule serves all functions of matrices",
    ("batched", "operand 1 along dimension -1"): "right sides of a system, likewise",
    ("by_table", "operand 1 along dimension -1"): "places in parts of a table add up; whether it holds x does not",
    ("cat", "operand 0 along dimension -1"): "right for one operand only, of which cat is a copy",
    ("cross_entropy", "linear in operand 1"): "probabilities of classes are data, and never a partial sum",
    ("cross_entropy", "linear in operand 2"): "weights of classes are data, and never a partial sum",
    ("flex_attention", "linear in operand 2"): "as attention",
    ("flex_attention", "operand 2 along dimension -1"): "as attention",
    ("flex_attention", "operand 0 along dimension -2"): "functions of the program are told the query",
    ("flex_attention", "operand 0 along dimension -3"): "whole where a mask of other heads asks for it",
    ("fused_attention", "operand 0 along dimension -2"): "as attention",
    (
        "fused_attention",
        "operand 0 along dimension -3",
    ): "as attention, the length in front of the heads",
    ("gather", "operand 0 along dimension -1"): "many elements are taken, whose sum over ranks is larger than x",
    ("gather", "operand 0 along dimension -2"): "many elements are taken, likewise",
    ("index_select", "operand 0 along dimension -2"): "many elements are taken, likewise",
    ("getitem", "operand 0 along dimension -1"): "many elements are taken, likewise",
    ("getitem", "operand 0 along dimension -2"): "a slice with a step, right where the step divides every part",
    ("nll_loss", "linear in operand 0"): "log-probabilities come from log_softmax, which gives no partial sum",
    ("searchsorted", "operand 0 along dimension -1"): "places in parts of a sequence add up: without a sorter only",
    ("searchsorted", "operand 2 along dimension -1"): "likewise, where parts of the sequence are sorted by themselves",
    ("nll_loss", "linear in operand 2"): "weights of classes are data, and never a partial sum",
}

#: A label that is right on these is right on all: uneven parts, and an odd number of them.
_MESHES = ((2,), (3,))


@dataclass(frozen=True)
class Missing:
    """A dimension or a sum that the rule of a case does not mention.

    Attributes:
        op: the canonical operation.
        what: "linear in operand 0", "dimension 1 of operand 0".
        case: the call that shows it.
    """

    op: str
    what: str
    case: str


def missing_in(case: Case) -> Iterator[Missing]:
    """The dimensions and sums that the rule of ``case`` leaves out."""
    sharding = case.sharding()
    if not all(np.size(y) > 1 or np.ndim(y) == 0 for y in expected_results(case)) or not all(
        np.size(x) > 1 for x in case.operands if isinstance(x, np.ndarray)
    ):
        return  # of one element or none everything is true
    for i in _not_linear(case, sharding):
        if _is_linear(case, i):
            yield Missing(case.op, f"linear in operand {i}", str(case))
    for i, dim, wider in _wider(case, sharding):
        wider = replace(wider, nonempty=(*wider.nonempty, "new"))
        if _is_right(case, wider):
            yield Missing(case.op, f"operand {i} along dimension {dim - len(case.shapes[i])}", str(case))


def _floats(case: Case, sharding: OpSharding) -> list[int]:
    return [
        i
        for i, (x, labels) in enumerate(zip(case.operands, sharding.operands, strict=True))
        if labels is not None and x.dtype.kind == "f"
    ]


def _not_linear(case: Case, sharding: OpSharding) -> list[int]:
    """Operands that the rule does not call linear, or not alone: in an operation in place only the first one counts,
    whose placement the result has."""
    said = {i for term in sharding.terms for i in term} | set(sharding.unread)
    return [i for i in _floats(case, sharding) if i not in said and (i == 0 or not case.op.endswith("_"))]


def _is_linear(case: Case, i: int) -> bool:
    """Return whether results add up where operand ``i`` does, for operands of both signs, far from one another."""
    rng = np.random.default_rng(5)
    x = case.operands[i]
    for scale in (1.0, 30.0):
        one, other = (scale * rng.standard_normal(x.shape) for _ in range(2))
        parts = []
        for operand in (one, other, one + other):
            operands = (*case.operands[:i], operand, *case.operands[i + 1 :])
            try:
                parts.append(expected_results(replace(case, operands=operands)))
            except Exception:
                return False
        if any(y.dtype.kind != "f" for y in parts[0]):
            return False
        for a, b, total in zip(*parts, strict=True):
            with np.errstate(invalid="ignore"):
                if not np.allclose(a + b, total, rtol=1e-9, atol=1e-9):
                    return False
    return True


def _is_right(case: Case, wider: OpSharding) -> bool:
    tried = {choice.label for way in ways(case, wider, _MESHES) for choice in way.choices}
    if "new" not in tried:
        return False
    try:
        with np.errstate(all="ignore"):
            check(case, wider, _MESHES)
    except Exception:
        return False
    return True


def _wider(case: Case, right: OpSharding) -> Iterator[tuple[int, int, OpSharding]]:
    """The rule with one more label: on dimensions of equal size that must be whole, in one operand or several. The
    label is in all results, or it is contracted and in none."""
    whole = [_whole(labels, shape) for labels, shape in zip(right.operands, case.shapes, strict=True)]
    results = [_whole(labels, shape) for labels, shape in zip(right.results, right.result_shapes, strict=True)]
    for i, dims in enumerate(whole):
        for dim, size in dims.items():
            others = [
                [None, *(d for d, n in whole[j].items() if n == size)] if j > i else [None] for j in range(len(whole))
            ]
            for chosen in itertools.product(*others):
                operands = relabelled(right.operands, i, dim, "new")
                for j, d in enumerate(chosen):
                    if d is not None and j != i:
                        operands = relabelled(operands, j, d, "new")
                for reduce in {right.reduce or "sum", "max", "min"} if not right.reduce else {right.reduce}:
                    if reduce != "call":
                        yield i, dim, replace(right, operands=operands, reduce=reduce)
                for places in itertools.product(*results):
                    named = right.results
                    for j, d in enumerate(places):
                        named = relabelled(named, j, d, "new")
                    yield i, dim, replace(right, operands=operands, results=named)


def _whole(labels: Any, shape: Any) -> dict[int, int]:
    """The dimensions without a label that have something to be cut, with their sizes."""
    if labels is None:
        return {}
    return {d: n for d, (label, n) in enumerate(zip(labels, shape, strict=True)) if label is None and (n or 0) > 1}


def main() -> None:
    """Print the missing rules, once for each operation."""
    seen: dict[tuple[str, str], list[str]] = {}
    for case in CASES:
        for missing in missing_in(case):
            seen.setdefault((missing.op, missing.what), []).append(missing.case)
    for key, cases in sorted(seen.items()):
        why = f"   accepted: {ACCEPTED[key]}" if key in ACCEPTED else ""
        print(f"{key[0]:20} {key[1]:35} {sorted(set(cases))[0]} ({len(set(cases))}){why}")


if __name__ == "__main__":
    main()
