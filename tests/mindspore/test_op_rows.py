"""Parts of the op table that no call of `calls` reaches on CPU: arguments by keyword, operands without elements, random
counters, compiled functions."""

from __future__ import annotations

import importlib
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import DTensor, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.operations.binding import bind_of
from hyper_parallel.platform.arguments import dims_of, ints
from hyper_parallel.platform.mindspore.basics.seeds import COUNTERS, undo_draw
from hyper_parallel.platform.mindspore.op_table import OPS, VARIANTS

X = np.arange(6, dtype=np.float32).reshape(2, 3) + 1
seeds = importlib.import_module("mindspore.common.seed")


def run_row(name: str, func: Any, args: tuple, kwargs: dict | None = None) -> Any:
    """Bind a native call to its row, and run the row."""
    row = VARIANTS[name](args, kwargs or {}) if name in VARIANTS else OPS[name]
    assert row is not None
    return row.call(func, *bind_of(row)(func, args, kwargs or {}))


# -------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [
        (("x", 1, 2, 3), {}, (1, 2, 3)),
        (("x",), {"axis": 2, "length": 3, "start": 1}, (2, 1, 3)),
        ((), {"input": "x", "dim": 1, "start": 2, "length": 0}, (1, 2, 0)),
        (("x", 1, 2, 0, "dropped"), {"dropped": 1}, (1, 2, 0)),
    ],
)
def test_arguments(args: tuple, kwargs: dict, wanted: tuple) -> None:
    assert bind_of(OPS["Narrow"])(None, args, kwargs) == (("x",), wanted)


def test_missing_argument() -> None:
    with pytest.raises(TypeError, match="argument 'dim' is missing"):
        bind_of(OPS["Narrow"])(None, ("x",), {"start": 1, "length": 1})


def test_arguments_by_keyword_in_any_order() -> None:
    x = Tensor(X)
    assert bind_of(OPS["Narrow"])(None, (x,), {"length": 2, "start": 0, "axis": 1})[1] == (1, 0, 2)
    assert bind_of(OPS["TransposeExt"])(None, (x,), {"dim1": 0, "dim0": 1})[1] == ((1, 0),)
    assert bind_of(OPS["Reshape"])(None, (x,), {"shape": [3, 2]})[1] == ((3, 2),)


def test_dims_and_sizes_in_tensors() -> None:
    assert dims_of(Tensor([1, -1])) == (1, -1) and dims_of(Tensor(2)) == (2,)
    assert dims_of(()) is None and dims_of(None) is None and dims_of([0, Tensor(1)]) == (0, 1)
    assert ints((Tensor([2, 3]),)) == ints((2, Tensor(3))) == ints(([2, 3],)) == (2, 3)


def test_operands_by_keyword() -> None:
    """Operands given by keyword are passed on by keyword."""
    x, y = Tensor(X), Tensor(X * 2 + 1)
    result = run_row("Lerp", ops.lerp, (x,), {"end": y, "weight": 0.25})
    assert np.allclose(result.asnumpy(), X + 0.25 * (X + 1))
    operands, _ = bind_of(OPS["Lerp"])(None, (x,), {"end": y, "weight": 0.25})
    assert len(operands) == 2 and operands[0] is x and operands[1] is y


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [((), {"rounding_mode": "floor"}, X // 2), (("trunc",), {}, np.trunc(X / 2)), ((), {}, X / 2)],
)
def test_division_with_rounding(args: tuple, kwargs: dict, wanted: np.ndarray) -> None:
    """The mode is part of core's arguments: a quotient that is rounded is not linear."""
    calls = (Tensor(X), Tensor(np.float32(2)), *args)
    _, static_args = bind_of(OPS["DivMod"])(None, calls, kwargs)
    assert static_args[0] == (args[0] if args else kwargs.get("rounding_mode"))
    _, again = bind_of(OPS["DivMod"])(None, (Tensor(X + 1), *calls[1:]), kwargs)
    assert again == static_args and hash(again) == hash(static_args), "one plan serves both calls"

    def divide(x: Any, y: Any, mode: Any = None, rounding_mode: Any = None) -> Any:
        return ops.div(x, y, rounding_mode=mode or rounding_mode)

    assert np.array_equal(run_row("DivMod", divide, calls, kwargs).asnumpy(), wanted)


# -------------------------------------------------------------------- rows
def test_what_depends_on_all_values() -> None:
    """The row itself runs the given function."""
    x = np.float32([[0, 3, 0], [4, 0, 0]])
    assert run_row("NonZero", ops.nonzero, (Tensor(x),)).asnumpy().tolist() == np.argwhere(x).tolist()
    picked = run_row("MaskedSelect", ops.masked_select, (Tensor(x), Tensor(x > 0)))
    assert picked.asnumpy().tolist() == [3, 4]


def test_flatten_of_a_scalar() -> None:
    assert run_row("FlattenExt", None, (Tensor(3.0),)).asnumpy().tolist() == [3.0]


def test_squeeze_of_everything() -> None:
    x = Tensor(X.reshape(2, 1, 3, 1))
    assert run_row("Squeeze", None, (x,)).shape == (2, 3)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_nll_loss(reduction: str, ignored: int) -> None:
    """The primitive itself counts its reductions: 0, 1, 2. (Its kernel does not ignore anything under "none"; the
    result of `ops.nll_loss` holds.)"""
    mesh = init_device_mesh("cpu", (1,))
    scores, target, weight = np.log(X / X.sum(1, keepdims=True)), np.array([2, 0], np.int32), np.float32([1, 2, 3])
    primitive = ops.NLLLoss(reduction, ignored)
    parts = [distribute_tensor(Tensor(v), mesh, [Shard(0)]) for v in (scores, target, weight)]
    result = primitive(*parts)[0]
    taken = -scores[[0, 1], [2, 0]] * [3 * (ignored != 2), 1]
    by_hand = {"none": taken, "sum": taken.sum(), "mean": taken.sum() / (4 if ignored != 2 else 1)}[reduction]
    assert isinstance(result, DTensor) and result.shape == by_hand.shape
    assert np.allclose(result.asnumpy(), by_hand)


@pytest.mark.parametrize(("rest", "name"), [((0, 0), "embedding"), ((1, 0), None), ((0, 1), None)])
def test_look_ups(rest: tuple, name: str | None) -> None:
    """Look-ups with ids of two dims have a rule for the rows of a matrix only, without batch dims."""
    ids = Tensor([[0, 1], [1, 0]])
    row = VARIANTS["Gather"]((Tensor(X), ids, *rest), {})
    assert (row and row.name) == name
    assert VARIANTS["Gather"]((Tensor(X), 1, 0), {}) is None
    if row is not None:
        assert np.array_equal(run_row("Gather", None, (Tensor(X), ids, *rest)).asnumpy(), X[ids.asnumpy()])


# -------------------------------------------------------------------- operands without elements
@pytest.mark.parametrize("beta", [1, 2])
def test_addmm_of_an_empty_product(beta: int) -> None:
    """The result is the added term, with its gradient; the other operands are connected, with empty gradients."""
    c, a, b = Tensor(X), ops.zeros((2, 0)), ops.zeros((0, 3))

    def loss(c: Any, a: Any, b: Any) -> Any:
        y = run_row("Addmm", mint.addmm, (c, a, b), {"beta": beta})
        return (y * y).sum()

    value, gradients = ms.value_and_grad(loss, (0, 1, 2))(c, a, b)
    assert value.asnumpy() == pytest.approx((beta * X).__pow__(2).sum())
    assert np.array_equal(gradients[0].asnumpy(), 2 * beta**2 * X)
    assert (gradients[1].shape, gradients[2].shape) == ((2, 0), (0, 3))


def test_addmm_without_rows() -> None:
    c, a, b = Tensor(X[:1]), ops.zeros((0, 4)), ops.ones((4, 3))
    assert run_row("Addmm", mint.addmm, (c, a, b)).shape == (0, 3)
    gradients = ms.grad(lambda c, b: run_row("Addmm", mint.addmm, (c, a, b)).sum(), (0, 1))(c, b)
    assert [g.asnumpy().any() for g in gradients] == [False, False]
    assert [g.shape for g in gradients] == [(1, 3), (4, 3)]


def test_dropout_of_nothing_draws() -> None:
    """A rank without elements draws too, so that all ranks draw the same afterwards."""
    drawn = []
    for shape in ((0, 3), (2, 3)):
        ms.set_seed(3)
        assert run_row("DropoutExt", None, (ops.ones(shape), 0.5, True)).shape == shape
        drawn.append(ops.dropout(ops.ones((64,)), 0.5, True).asnumpy())
    assert np.array_equal(*drawn) and set(drawn[0]) == {0.0, 2.0}


def test_attention_of_nothing() -> None:
    q = ops.zeros((0, 2, 3, 4))
    row = VARIANTS["FlashAttentionScore"]
    args = (q, q, q, *(None,) * 7, 2, 1.0, 0.5, 2147483647, 2147483647, 0, 1, 0)
    assert row(args, {}) is not None
    assert run_row("FlashAttentionScore", lambda *args: pytest.fail("called"), args).shape == (0, 2, 3, 4)


def test_assignment_of_nothing() -> None:
    """Nothing to write, or nothing to write to."""

    def fail(*args: Any) -> None:
        pytest.fail("called")

    x, empty = Tensor(X), ops.zeros((0, 3))
    assert run_row("setitem_", fail, (empty, (slice(None), 0), 1.0)) is empty
    assert run_row("setitem_", fail, (x, Tensor(np.zeros(0, np.int64)), 1.0)) is x
    written = run_row("setitem_", lambda x, index, value: x.__setitem__(index, value), (x, (slice(None), 0), 9.0))
    assert written is x and x.asnumpy().tolist() == [[9, 2, 3], [9, 5, 6]]


def test_gradient_of_an_index_that_takes_nothing() -> None:
    """MindSpore's own fails, or reads memory that is not the tensor's."""
    for index in ((slice(2, 2), -1), (None, slice(0, 0)), (..., slice(3, 3)), (slice(0, 0), None, slice(0, 2))):

        def total(x: Any, index: tuple = index) -> Any:
            y = run_row("getitem", lambda x, index: x[index], (x, index))
            assert y.shape == X[index].shape
            return y.sum() + (x * 2).sum()

        assert np.array_equal(ms.grad(total)(Tensor(X)).asnumpy(), np.full_like(X, 2)), index


# -------------------------------------------------------------------- random counters
def test_an_undone_draw_is_drawn_again() -> None:
    before = dict(COUNTERS)
    try:
        COUNTERS.clear()
        ms.set_seed(11)
        x = ops.ones((64,))
        first = ops.dropout(x, 0.5, True, 7).asnumpy()
        ((key, counter),) = COUNTERS.items()
        assert key == ("dropout", 7)
        drawn = seeds._truncate_seed(counter - (seeds.keyConstant[0] ^ seeds.keyConstant[2]))
        for kernel, numbers in (("no such kernel", (11, drawn)), ("dropout", (11, drawn + 1)), ("dropout", (0, 0))):
            assert undo_draw(kernel, numbers) is None
            assert COUNTERS[key] == counter, "only the draw that is known is undone"
        assert undo_draw("dropout", (11, drawn)) == 7
        assert np.array_equal(ops.dropout(x, 0.5, True, 7).asnumpy(), first)
    finally:
        COUNTERS.clear()
        COUNTERS.update(before)


# -------------------------------------------------------------------- compiled functions
def test_plain_functions_are_compiled_as_ever() -> None:
    """Plain functions are compiled after a DTensor was made, too. So are functions that refer to names that are defined
    later."""
    distribute_tensor(Tensor(X), init_device_mesh("cpu", (1,)), [Shard(0)])

    @ms.jit
    def early(x: Any) -> Any:
        return x * 3 if x.shape[0] < 10 else later

    assert np.array_equal(early(Tensor(X)).asnumpy(), X * 3)
    later = Tensor(X)
    net = nn.Dense(3, 2)
    eager = net(later).asnumpy()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        assert np.allclose(net(later).asnumpy(), eager)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
