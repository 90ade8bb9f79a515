"""Rows of op tables as text."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.platform.row_text import RowText, UnboundCallError, call_again, call_by_position, ints

SPELLINGS = {"input": "self", "dim": "axis", "dims": "dim axes"}
CONVERSIONS = {"keepdim": bool, "sizes": ints, "only": lambda value: (value,)}
EXACT = RowText(SPELLINGS, CONVERSIONS)
DROPPING = RowText(SPELLINGS, CONVERSIONS, drops=True)


def test_arguments_that_a_row_does_not_name() -> None:
    unpack = EXACT.signature("input dim=0")
    assert unpack((1,), {"axis": 2, "out": None}) == [1, 2]
    for args, kwargs in (((1, 2, 3), {}), ((), {"dim": 1}), ((1,), {"nonsense": 1})):
        with pytest.raises(UnboundCallError):
            unpack(args, kwargs)


def test_arguments_that_are_dropped() -> None:
    unpack = DROPPING.signature("input dim keepdim=False")
    for args, kwargs in (((1, 2), {"nonsense": 1}), ((1, 2, 0, 3), {}), ((), {"axis": 2, "self": 1})):
        assert unpack(args, kwargs) == [1, 2, False]
    with pytest.raises(TypeError, match="argument 'dim' is missing"):
        unpack((1,), {"keepdim": True})


def test_arguments_that_take_what_is_left() -> None:
    for texts in (EXACT, DROPPING):
        unpack = texts.signature("input *sizes/dims")
        for args, kwargs in (((1, 2, 3), {}), ((1, (2, 3)), {}), ((1, [2, 3]), {}), ((1,), {"dims": (2, 3)})):
            assert unpack(args, kwargs) == [1, (2, 3)]
        assert unpack((1,), {}) == [1, ()]
        assert unpack((1,), {"dims": 2}) == [1, (2,)]
    assert unpack((1,), {"any name": (2, 3)}) == [1, (2, 3)]


def test_a_row_says_what_becomes_of_the_arguments() -> None:
    bind = EXACT.arguments("input only/dim/axis index/at keepdim=False -> index input | only 1 keepdim 'x'")
    assert bind(None, ("a", 2), {"at": "b"}) == (("b", "a"), ((2,), 1, False, "x"))
    assert bind(None, (), {"self": "a", "axis": 2, "index": "b", "keepdim": 1})[1] == ((2,), 1, True, "x")
    assert EXACT.arguments("input dim=3")(None, ("a",), {}) == (("a",), (3,))
    assert EXACT.arguments(bind) is bind

    @EXACT.binds("input dim=3")
    def arranged(x: Any, dim: int) -> tuple[tuple, tuple]:
        return (x,), (dim + 1,)

    assert arranged(None, (), {"input": "a"}) == (("a",), (4,))


def test_calls() -> None:
    """Calls by position, repeated in their original form with other tensors."""

    def function(*args: Any, **kwargs: Any) -> tuple:
        return args, kwargs

    assert call_by_position(function, ("a", "b"), (1, 2)) == (("a", "b", 1, 2), {})
    bind = EXACT.repeated("input shifts=None sizes=None -> input | sizes 1")
    operands, static_args = bind(None, ("a", [1, [2]]), {"sizes": [3]})
    assert operands == ("a",) and hash(static_args)
    assert call_again(function, ("local",), static_args) == (("local", (1, (2,))), {"sizes": (3,)})
    tensor = object()
    operands, static_args = bind(None, (), {"self": tensor, "sizes": 1})
    assert operands == (tensor,) and call_again(function, ("local",), static_args) == (("local",), {"sizes": 1})


def test_numbers_in_tensors() -> None:
    class Number:
        def __init__(self, value: Any) -> None:
            self.value = value

        def tolist(self) -> Any:
            return self.value

        def __int__(self) -> int:
            return self.value

    assert ints((Number([2, 3]),)) == ints((2, Number(3))) == ints(([2, 3],)) == (2, 3)
    assert ints((Number(2),)) == ints(2) == (2,) and ints(()) == ()
