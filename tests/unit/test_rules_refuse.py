"""Rules say nothing about calls that no framework takes: it has the better message."""

from __future__ import annotations

import pytest

from hyper_parallel.core.dtensor.operations.rules import OPERATIONS

REFUSED: dict[str, list[tuple[tuple, tuple]]] = {
    "along_linear": [(((5, 4),), ((1,), (3, 4)))],
    "topk": [(((5, 4),), (5, 1)), (((),), (2, 0))],
    "batched": [
        (((3,),), ((2,), ((),))),
        (((2, 3, 3), (4, 3, 3)), ((2, 2), ((),))),
        (((3, 3),), ((2, 2), ((),))),
    ],
    "pairs": [(((3,), (4, 3)), ()), (((5, 3), (4, 2)), ()), (((2, 5, 3), (3, 4, 3)), ())],
    "diagonal": [(((5,),), (0, 0, 1)), (((5, 4),), (0, 1, -1))],
    "diag_embed": [(((),), (0, 0, 1)), (((5,),), (0, 1, -1))],
    "windows": [(((5,),), (0, 6, 1)), (((5,),), (0, 2, 0))],
    "complex_pairs": [(((5, 3),), ()), (((),), ())],
    "scatter": [
        (((5, 4), (3,), (3, 4)), (0, "add")),
        (((5, 4), (3, 6), (3, 6)), (0, "add")),
    ],
    "index_write": [(((5, 4), (2, 2), (5, 4)), (1, "add")), (((5, 4), (3,), (5, 2)), (1, "add"))],
    "index_add": [
        (((5, 4), (2,), (3, 1)), ((("tensor", 0, 2, True),),)),
        (((5, 4), (3, 3), (2,)), ((("tensor", 0, 1, False),),)),
    ],
    "gather": [(((5, 4), None), (0,)), (((5, 4), (3,)), (0,))],
    "index_select": [(((5, 4), (2, 2)), (0,))],
    "searchsorted": [(((6,), None), ()), (((5, 6), (4, 3)), ())],
    "count": [(((5,), (4,)), (3,))],
}


@pytest.mark.parametrize(
    ("op", "shapes", "static_args"),
    [pytest.param(op, *call, id=f"{op}-{i}") for op, calls in REFUSED.items() for i, call in enumerate(calls)],
)
def test_refused(op: str, shapes: tuple, static_args: tuple) -> None:
    assert OPERATIONS[op].rule(shapes, static_args) is None
