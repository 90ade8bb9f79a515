"""Signatures of operations, and the binder that brings native calls into their form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.operations.binding import bind_of
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.core.rules.signature import FORMS, REQUIRED, Signature, read_arguments
from hyper_parallel.platform.arguments import call_again, call_by_position, call_elementwise, ints, placed
from hyper_parallel.platform.contract.dispatch import Given, NativeOp, UnboundCallError, Words
from tests.unit.rules_cases import CASES
from tests.unit.rules_harness import Case

SPELLINGS = {"x": "input self", "dim": "axis", "dims": "dim axes"}
EXACT = Words(np.ndarray, SPELLINGS)
DROPPING = Words(np.ndarray, SPELLINGS, {"dim": int}, drops=True)
A, B, C = (np.zeros((n, 2)) for n in (3, 4, 5))


def bound(name: str, takes: str, *args: Any, words: Words = EXACT, **kwargs: Any) -> tuple[tuple, Any]:
    return bind_of(NativeOp(name, takes, call_by_position, words=words))(None, args, kwargs)


# ---------------------------------------------------------------------------------------------- texts
def test_a_text_names_arguments() -> None:
    x, weight, dims, size, more, no = read_arguments("*x weight/w(out,in)=None dims:=(1,-1) *sizes +p=2.0 -q")
    assert (x.mark, x.name, x.default, x.dims, x.fixed) == ("*", "x", REQUIRED, None, False)
    assert (weight.spellings, weight.default, weight.dims) == (("weight", "w"), None, ("out", "in"))
    assert dims.fixed and dims.default == (1, -1) and size.mark == "*"
    assert (more.mark, more.default, no.mark, no.default) == ("+", 2.0, "-", REQUIRED)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("custom:")])
def test_every_signature_says_which_arguments_may_be_left_out(name: str) -> None:
    """Operands that must be given come first, as static arguments do, and no name stands twice."""
    signature = OPERATIONS[name].signature
    names = [x.name for x in (*signature.operands, *signature.static)]
    assert len(names) == len(set(names))
    for arguments in (signature.operands, signature.static):
        defaults = [x.default is REQUIRED for x in arguments if not x.mark]
        assert defaults == sorted(defaults, reverse=True), signature.text


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_of_the_brute_force_fit_the_signature(case: Case) -> None:
    signature = OPERATIONS[case.op].signature
    fixed = [x for x in signature.operands if not x.mark]
    assert signature.several or len(case.operands) <= len(fixed)
    for argument, operand in zip(fixed, case.operands, strict=False):
        assert operand is not None or argument.default is None, argument.name
        if argument.dims is not None and isinstance(operand, np.ndarray):
            count = len(argument.dims) - ("*" in argument.dims)
            assert operand.ndim >= count if "*" in argument.dims else operand.ndim == count, argument.name
    assert all(x.default is not REQUIRED for x in fixed[len(case.operands) :])
    if not OPERATIONS[case.op].elementwise:
        assert all(x.default is not REQUIRED for x in signature.static[len(case.static_args) :]), signature.text


# ---------------------------------------------------------------------------------------------- by the signature
def test_arguments_that_a_row_does_not_name() -> None:
    assert bound("narrow", "", 1, axis=2, start=3, length=4, out=None) == ((1,), (2, 3, 4))
    for args, kwargs in (((1, 2, 3, 4, 5), {}), ((), {"dim": 1}), ((1, 2, 3, 4), {"nonsense": 1})):
        with pytest.raises(UnboundCallError):
            bound("narrow", "", *args, **kwargs)


def test_arguments_that_are_dropped() -> None:
    takes = "x dim start:=0 length=9"
    for args, kwargs in (((1, 2), {"nonsense": 1}), ((1, 2, 9, 3), {}), ((), {"axis": 2, "self": 1})):
        assert bound("narrow", takes, *args, words=DROPPING, **kwargs) == ((1,), (2, 0, 9))
    with pytest.raises(TypeError, match="argument 'dim' is missing"):
        bound("narrow", takes, 1, words=DROPPING, length=2)


def test_arguments_that_take_what_is_left() -> None:
    for words in (EXACT, DROPPING):
        for args, kwargs in (((1, 2, 3), {}), ((1, (2, 3)), {}), ((1, [2, 3]), {}), ((1,), {"sizes": (2, 3)})):
            assert bound("expand", "", *args, words=words, **kwargs) == ((1,), ((2, 3),))
        assert bound("expand", "", 1, words=words) == ((1,), ((),))
    assert bound("expand", "", 1, words=DROPPING, shape=(2, 3)) == ((1,), ((2, 3),))
    assert bound("squeeze", "x *removed=None", A) == ((A,), (None,))
    assert bound("squeeze", "x *removed=None", A, 0, 1) == ((A,), ((0, 1),))


def test_another_order_and_other_arguments() -> None:
    assert bound("gather", "x dim index/at nothing=0", "a", 2, at="b") == (("a", "b"), (2,))
    assert bound("pairs", "x y +p=2.0", "a", "b") == (("a", "b"), (2.0,))
    assert bound("along_dims", "x dims results:=2", "a", 1) == (("a",), ((1,), 2))
    assert bound("cat", "", ["a", "b"], dim=1) == (("a", "b"), (1,))
    assert bound("setitem", "x index value", "a", 0, "b") == (("a", "b"), (0,))
    bind = bind_of(NativeOp("narrow", lambda func, args, kwargs: (args, ()), call_by_position))
    assert bind(None, (1,), {}) == ((1,), ())


def test_what_a_row_adjusts() -> None:
    row = NativeOp("glu", "", call_by_position, words=EXACT, adjust=lambda func, xs, static: (xs, (func, *static)))
    assert bind_of(row)("f", ("a",), {}) == (("a",), ("f", -1))


def test_forms() -> None:
    x = np.zeros((2, 3, 4))
    assert bound("reshape", "flatten:", x, 1) == ((x,), ((2, 12),))
    assert bound("reshape", "flatten: x end_dim start_dim:=0", x, 1) == ((x,), ((6, 4),))
    assert bound("permute", "transpose:", x, dim1=0, dim0=2) == ((x,), ((2, 1, 0),))
    assert bound("rms_norm", "by_weight: x weight/gamma eps/epsilon=1e-6", x, gamma=A)[1] == (2, 1, 1e-6)
    with pytest.raises(UnboundCallError):
        bound("reshape", "flatten:", x, 2, 1)
    for form in FORMS.values():
        assert form.make.__doc__


def test_calls_that_are_made_again() -> None:
    def function(*args: Any, **kwargs: Any) -> tuple:
        return args, kwargs

    assert call_by_position(function, ("a", "b"), (1, 2)) == (("a", "b", 1, 2), {})
    operands, static_args = bound("along_linear", "x shifts=None dims=None ...", "a", [1, [2]], dims=[3])
    assert operands == ("a",) and hash(static_args) and static_args[:2] == ((3,), None)
    assert call_again(function, ("local",), static_args) == (("local", (1, (2,))), {"dims": (3,)})
    operands, static_args = bound("along_linear", "x dims=None ...", self=A, dims=1)
    assert operands == (A,) and call_again(function, ("local",), static_args) == (("local",), {"dims": 1})
    operands, static_args = bound("div", "...", A, B, "floor")
    assert static_args[0] == "floor" and call_again(function, (1, 2), static_args) == ((1, 2, "floor"), {})


# ---------------------------------------------------------------------------------------------- element-wise
def test_element_wise() -> None:
    for args, kwargs in (((1, 2), {}), ((1,), {"other": 2}), ((), {"other": 2, "input": 1})):
        assert bound("add", "x other", *args, **kwargs) == ((1, 2), None)
    assert bound("add", "x other", 1, 2, 3, alpha=4) == ((1, 2), ((3,), (("alpha", 4),)))
    assert call_elementwise(lambda *a, **k: (a, k), (1, 2), ((3,), (("alpha", 4),))) == ((1, 2, 3), {"alpha": 4})
    with pytest.raises(UnboundCallError):
        bound("add", "x other", A, B, out=C)
    # The tensors, wherever they are.
    assert bound("pointwise", "*", A, B) == ((A, B), None)
    operands, static_args = bound("pointwise", "*", 1, A, weight=B)
    assert operands == (A, B) and placed(["a", "b"], static_args) == ([1, "a"], {"weight": "b"})


# ---------------------------------------------------------------------------------------------- as called
def test_calls_taken_apart() -> None:
    seen: list[Given] = []

    def facts(given: Given) -> tuple:
        seen.append(given)
        return (given.values.get("dim"),)

    def bind(name: str, takes: str, words: Words = EXACT) -> Callable[..., Any]:
        row = NativeOp(name, takes, call_by_position, words=words, facts=facts)
        return lambda *args, **kwargs: bind_of(row)(None, args, kwargs)

    scatter = bind("scatter", "x dim index source/src")
    operands, static_args = scatter(A, 1, B, src=C)
    assert operands == (A, B, C) and static_args == (1, (0, 2, "src"), (None, 1, None), (("src", None),))
    assert placed(["a", None, "c"], ((0, None, 1), (None, None), ())) == (["a", "c"], {})
    assert seen[-1].shapes == ((3, 2), (4, 2), (5, 2))
    assert scatter(A, 1, B, 2.0)[0] == (A, B, None)  # one that may be left out
    with pytest.raises(UnboundCallError):
        scatter(A, 1, 2)
    with pytest.raises(UnboundCallError):
        scatter(A, 1, B, out=C)
    assert bind("scatter", "x dim index source", DROPPING)(A, 1, 2)[0] == (A, None, None)
    bind("batched", "x(m,n) tau(k) -rtol")(A, rtol=1)
    assert seen[-1].operands == (A,) and seen[-1].behind == (2,) and seen[-1].values == {"rtol": 1}
    assert bind("labelled", "x weight")(A)[0] == (A, None)


# ---------------------------------------------------------------------------------------------- values
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


def test_signatures_are_read_once() -> None:
    assert Signature.of("x | dim") is Signature.of("x | dim")
