"""Refusals of rules: the operation then runs on gathered operands, and the native operation reports its error, if
any."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.core.rules import OPERATIONS, rule
from hyper_parallel.core.rules.labels import axes, axis, broadcast

_ALL = ("slice", None, None, None)
_TENSOR = ("tensor", 0, 1, False)

REFUSED: list[tuple[str, tuple, tuple]] = [
    ("replicate", ((4,),), ()),
    ("pointwise", ((4,), (3,)), ()),
    ("pointwise_", ((1, 4), (3, 4)), ()),
    ("pointwise_", (None, (3, 4)), ()),
    ("add_", ((4,), (3,)), ()),
    ("like", ((4,), (4,)), ()),
    ("linear", ((5, 4), (6, 3), None), ()),
    ("linear", ((5, 4), (6, 4), (1,)), ()),
    ("linear", ((), (6, 4), None), ()),
    ("linear", ((5, 4), (2, 6, 4), None), ()),
    ("matmul", ((5, 4), (5, 4)), (False, False)),
    ("matmul", ((2, 5, 4), (3, 4, 5)), (False, False)),
    ("matmul", ((), (3,)), (False, False)),
    ("addmm", ((3,), (5, 4), (4, 6)), ()),
    ("addmm", ((6,), (5, 4), (3, 6)), ()),
    ("einsum", ((3, 3),), ("ii->i",)),
    ("einsum", ((3, 4),), ("...a->a",)),
    ("einsum", ((3, 4), (5,)), ("ab,b->a",)),
    ("einsum", ((3, 4), (4,)), ("ab->a",)),
    ("einsum", ((3, 4),), ("ab->c",)),
    ("einsum", ((3, 4),), ("abc->c",)),
    ("reshape", ((4, 3),), ((5, -1),)),
    ("reshape", ((4, 3),), ((5, 2),)),
    ("reshape", ((4, 0),), ((0, -1),)),
    ("permute", ((4, 3),), ((0, 0),)),
    ("expand", ((4, 3),), ((3,),)),
    ("expand", ((4, 3),), ((-1, 4, 3),)),
    ("expand", ((4, 3),), ((5, 3),)),
    ("repeat", ((4, 3),), ((2,),)),
    ("repeat_interleave", ((4, 3),), (2, None)),
    ("repeat_interleave", ((), (4,)), ((2, 3), 0)),
    ("pad", ((4, 3),), (((1, 1),),)),
    ("getitem", ((4, 3),), ((("bool", True), _ALL),)),
    ("getitem", ((4, 3), (5,)), ((("tensor", 0, 1, True),),)),
    ("getitem", ((4, 3), (3,)), ((_ALL, ("tensor", 0, 1, True)),)),
    ("getitem", ((4, 3),), ((Ellipsis, Ellipsis),)),
    ("getitem", ((4, 3),), ((0, 0, 0),)),
    ("getitem", ((4, 3), (2,), (5,)), ((_TENSOR, ("tensor", 1, 1, False)),)),
    # Where NumPy and torch put the dimensions of an index tensor in different places.
    ("getitem", ((2, 3, 4), (5,)), ((0, _ALL, _TENSOR),)),
    ("getitem", ((2, 3, 4), (), (5,)), ((("tensor", 0, 0, False), _ALL, ("tensor", 1, 1, False)),)),
    ("getitem", ((3, 4), (5,), (5,)), ((_TENSOR, Ellipsis, ("tensor", 1, 1, False)),)),
    ("setitem_", ((4, 3), (2,)), ((1,),)),
    ("setitem_", ((4, 3), (2, 3)), ((1,),)),
    ("setitem_", ((4, 3), None), ((("bool", True),),)),
    ("labelled", ((4,),), ("nc->nc", ((4, 3),), 0)),
    ("narrow", ((4, 3),), (0, 2, 3)),
    ("narrow", ((),), (0, 0, 1)),
    ("gather", ((4, 3), (4,)), (0,)),
    ("index_select", ((4, 3), (2, 2)), (0,)),
    ("one_hot", ((4,),), (-1,)),
    ("cat", ((4, 3), (3,)), (0,)),
    ("cat", ((4, 3), (4, 2)), (0,)),
    ("cat", (), (0,)),
    ("stack", ((4, 3), (4, 2)), (0,)),
    ("split", ((4, 3),), ((1, 1), 0)),
    ("split", ((4, 3),), (0, 0)),
    ("split", ((),), (1, 0)),
    ("chunk", ((4, 3),), (0, 0)),
    ("unbind", ((),), (0,)),
    ("topk", ((4, 3),), (4, 1)),
    ("glu", ((4, 3),), (1,)),
    ("glu", ((),), (0,)),
    ("rotary", ((4, 6), (4, 3), (4, 6)), ("half",)),
    ("rotary", ((4, 6), (5, 6), (5, 6)), ("half",)),
    ("rotary", ((1, 6), (5, 6), (5, 6)), ("half",)),
    ("rotary", ((4, 6), None, (4, 6)), ("half",)),
    ("layer_norm", ((4, 3), (4,), None), (1, 0)),
    ("rms_norm", ((3,), None), (2, 0)),
    ("embedding", ((4,), (3,)), (None,)),
    ("attention", ((2, 4, 5, 3), (2, 3, 5, 3), (2, 3, 5, 3)), (False, 0.0)),
    ("attention", ((2, 4, 5, 3), (2, 4, 5, 3), (2, 4, 5, 3)), (False, 0.1)),
    ("attention", ((2, 4, 5, 3), (2, 4, 6, 3), (2, 4, 5, 3)), (False, 0.0)),
    ("attention", ((2, 4, 5, 3), (2, 4, 6, 3), (2, 4, 6, 3), (5, 5)), (False, 0.0)),
    ("attention", ((2, 4, 5, 3), (2, 4, 6, 3), (2, 4, 6, 3), (6,)), (False, 0.0)),
    ("attention", ((2, 4, 5, 3), (3, 4, 6, 3), (3, 4, 6, 3)), (False, 0.0)),
    ("attention", ((2, 4, 5, 3), None, (3, 4, 6, 3)), (False, 0.0)),
    ("add_rms_norm", ((4, 3), (4, 3), (4,)), ()),
    ("add_rms_norm", ((4, 3), (3,), (3,)), ()),
    ("add_rms_norm", ((4, 3), (4, 3), None), ()),
    ("add_rms_norm", ((3,), (3,), (4, 3)), ()),
    *(
        ("fused_attention", shapes, (layout, heads, 1.0, False, 8, False))
        for layout, heads, *shapes in (
            ("BNDS", 4, *[(2, 4, 5, 3)] * 3),
            ("BNSD", 0, *[(2, 4, 5, 3)] * 3),
            ("BNSD", 2, *[(2, 4, 5, 3)] * 3),
            ("BNSD", 4, *[(8, 5, 3)] * 3),
            ("BNSD", 4, (2, 4, 5, 3), (2, 4, 5, 2), (2, 4, 5, 3)),
            ("BNSD", 4, (2, 4, 5, 3), (2, 3, 5, 3), (2, 3, 5, 3)),
            ("BNSD", 4, (2, 4, 5, 3), (2, 2, 5, 3), (2, 4, 5, 3)),
            ("BNSD", 4, (2, 4, 5, 3), (2, 0, 5, 3), (2, 0, 5, 3)),
            ("BNSD", 4, (2, 4, 5, 3), (3, 4, 5, 3), (3, 4, 5, 3)),
            ("BNSD", 4, (2, 4, 5, 3), (2, 4, 5, 3), (2, 4, 6, 3)),
            ("BSH", 4, *[(2, 5, 10)] * 3),
            ("BSH", 4, (2, 5, 8), (2, 5, 3), (2, 5, 3)),
            ("BSH", 4, (2, 5, 8), (2, 5, 4), (2, 5, 5)),
            ("BSH", 4, (2, 5, 0), (2, 5, 4), (2, 5, 4)),
            ("BNSD", 4, *[(2, 4, 5, 3)] * 3, (2, 3, 5, 5)),
            ("BNSD", 4, *[(2, 4, 5, 3)] * 3, (3, 4, 5, 5)),
            ("BNSD", 4, *[(2, 4, 5, 3)] * 3, (5,)),
            ("BNSD", 4, *[(2, 4, 5, 3)] * 3, (4, 5, 5)),
            ("BNSD", 4, *[(2, 4, 5, 3)] * 3, None, (4, 5, 5)),
            ("BNSD", 4, *[(2, 4, 5, 3)] * 3, None, None, (3,)),
            ("TND", 4, *[(6, 4, 3)] * 3, None, None, None, (6, 3, 2), (6, 4, 2)),
            ("TND", 4, *[(6, 4, 3)] * 3, None, None, None, (6, 4, 2), (6, 3, 2)),
            ("TND", 4, (6, 4, 3), None, (6, 4, 3)),
        )
    ),
    ("cross_entropy", ((4, 3), (3,), None), ("mean", -100, 0.0)),
    ("cross_entropy", ((4, 3), (4, 2), None), ("mean", -100, 0.0)),
    ("cross_entropy", ((4, 3), (4,), None), ("median", -100, 0.0)),
    ("cross_entropy", ((4, 3), (4,), None), ("mean", -100, 1.5)),
    ("cross_entropy", ((4, 3), (4,), (4,)), ("mean", -100, 0.0)),
    ("nll_loss", ((), (), None), ("mean", -100)),
    ("along_linear", ((5, 4),), ((1,), (3, 4))),
    ("topk", ((5, 4),), (5, 1)),
    ("topk", ((),), (2, 0)),
    ("batched", ((3,),), ((2,), ((),))),
    ("batched", ((2, 3, 3), (4, 3, 3)), ((2, 2), ((),))),
    ("batched", ((3, 3),), ((2, 2), ((),))),
    ("pairs", ((3,), (4, 3)), ()),
    ("pairs", ((5, 3), (4, 2)), ()),
    ("pairs", ((2, 5, 3), (3, 4, 3)), ()),
    ("diagonal", ((5,),), (0, 0, 1)),
    ("diagonal", ((5, 4),), (0, 1, -1)),
    ("diag_embed", ((),), (0, 0, 1)),
    ("diag_embed", ((5,),), (0, 1, -1)),
    ("windows", ((5,),), (0, 6, 1)),
    ("windows", ((5,),), (0, 2, 0)),
    ("complex_pairs", ((5, 3),), ()),
    ("complex_pairs", ((),), ()),
    ("scatter", ((5, 4), (3,), (3, 4)), (0, "add")),
    ("scatter", ((5, 4), (3, 6), (3, 6)), (0, "add")),
    ("index_write", ((5, 4), (2, 2), (5, 4)), (1, "add")),
    ("index_write", ((5, 4), (3,), (5, 2)), (1, "add")),
    ("index_add", ((5, 4), (2,), (3, 1)), ((("tensor", 0, 2, True),),)),
    ("index_add", ((5, 4), (3, 3), (2,)), ((("tensor", 0, 1, False),),)),
    ("gather", ((5, 4), None), (0,)),
    ("gather", ((5, 4), (3,)), (0,)),
    ("index_select", ((5, 4), (2, 2)), (0,)),
    ("searchsorted", ((6,), None), ()),
    ("searchsorted", ((5, 6), (4, 3)), ()),
    ("count", ((5,), (4,)), (3,)),
]


@pytest.mark.parametrize(("op", "shapes", "static_args"), REFUSED, ids=str)
def test_refused(op: str, shapes: tuple, static_args: tuple) -> None:
    assert OPERATIONS[op].rule(tuple(shapes), static_args) is None


@pytest.mark.parametrize(
    ("op", "static_args"),
    [("sum", ((2,), False)), ("permute", ((0, 2),)), ("unsqueeze", (3,)), ("squeeze", ((-3,),)), ("split", (1, 2))],
)
def test_a_dimension_that_does_not_exist_is_an_error(op: str, static_args: tuple) -> None:
    with pytest.raises(IndexError, match=r"out of range for a tensor with [23] dimension"):
        OPERATIONS[op].rule(((4, 3),), static_args)


def test_a_second_rule_of_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="'linear' already has a rule"):
        rule("linear")(lambda shapes, static_args: None)


@pytest.mark.parametrize(("dim", "ndim", "expected"), [(-1, 3, 2), (2, 3, 2), (0, 0, 0), (-1, 0, 0)])
def test_axis(dim: int, ndim: int, expected: int) -> None:
    assert axis(dim, ndim) == expected


@pytest.mark.parametrize(
    ("dims", "ndim", "expected"),
    [(None, 2, {0, 1}), ((), 2, {0, 1}), (-1, 2, {1}), ((0, -1), 3, {0, 2}), ((0,), 0, set())],
)
def test_axes(dims: Any, ndim: int, expected: set) -> None:
    assert axes(dims, ndim) == expected


def test_broadcast_stretches_size_1_only() -> None:
    shape, labels, operands = broadcast(((4, 1), None, (3,), (1, 1)))
    assert shape == (4, 3)
    assert operands == ((labels[0], None), None, (labels[1],), (None, None))
    assert broadcast(((0,), (1,)))[0] == (0,)
    assert broadcast(((0,), (2,))) is None
    assert broadcast(()) == ((), (), ())
