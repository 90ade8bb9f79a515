"""Primitives that have no kernel on CPU: rows that substitute one are run, the others are given a function that
records how it is called."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint

from hyper_parallel.core.operations.binding import bind_of
from hyper_parallel.platform.mindspore.op_table import OPS, RESULTS, VARIANTS
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.calls import evaluate, operands
from tests.mindspore.nets import whole
from tests.mindspore.test_calls import placed

#: call that has no kernel for plain tensors on CPU -> one that has and gives the same
SUBSTITUTED = {
    "mint.stack([x, y], 1)": "ops.stack([x, y], 1)",
    "F.embedding(ids, w)": "ops.gather(w, ids, 0)",
    "mint.norm(x)": "ops.norm(x)",
    "mint.norm(x, 1, 1)": "x.abs().sum(1)",
    "mint.norm(x, float('inf'), 1, True)": "x.abs().amax(1, True)",
    "mint.norm(x, 3, 0)": "(x.abs()**3).sum(0)**(1/3)",
    "mint.linalg.vector_norm(x, 2, 1)": "(x * x).sum(1).sqrt()",
    "mint.addmm(y[:, :5], x, w.T, beta=2)": "y[:, :5] * 2 + mint.matmul(x, w.T)",
    "mint.mm(x, w.T)": "mint.matmul(x, w.T)",
    "mint.index_select(x, 0, i)": "ops.gather(x, i, 0)",
    "F.one_hot(i, 5)": "ops.one_hot(i, 5).astype(ms.int32)",
    "mint.zeros_like(x)": "x * 0",
    "mint.ones_like(x)": "x * 0 + 1",
    "mint.full_like(x, 2.0)": "x * 0 + 2",
    "mint.clone(x)": "x * 1",
    "x.clone()": "x * 1",
    "mint.repeat_interleave(x, 2, 1)": "ops.repeat_interleave(x, 2, 1)",
}


@on_mesh()
def substituted(mesh: Any, dim: int) -> list[str]:
    problems = []
    for call, plain in SUBSTITUTED.items():
        (got,), (wanted,) = evaluate(call, operands(placed(mesh, dim))), evaluate(plain, operands())
        if got.dtype != wanted.dtype or not np.allclose(whole(got), wanted.asnumpy(), atol=1e-5):
            problems.append(f"{call}: {got.dtype} {whole(got)}, wanted {wanted.dtype} {wanted}")
    return problems


@pytest.mark.parametrize("dim", [0, 1])
def test_substituted(pool: Any, dim: int) -> None:
    assert pool.run(2, substituted, dim) == [[]] * 2


class Recorder:
    """Stands for a native function: returns a given result and keeps the arguments."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.args: tuple = ()

    def __call__(self, *args: Any) -> Any:
        self.args = args
        return self.result


def call_through(name: str, args: tuple, result: Any) -> tuple[tuple, Any, Any, tuple]:
    """(operands, static_args, result, arguments of the native call) of a row."""
    row = VARIANTS[name](args, {}) if name in VARIANTS else OPS[name]
    assert row is not None
    recorder = Recorder(result)
    found, static_args = bind_of(row)(recorder, args, {})
    answer = row.call(recorder, found, static_args)
    return found, static_args, answer, recorder.args


Q = Tensor(np.ones((2, 4, 3, 8), np.float32))
V8 = Tensor(np.ones(8, np.float32))
FLASH = (Q, Q, Q, None, None, None, None, None, None, None, 8, 0.9, 0.5, 2147483647, 2147483647, 0, 1, 2)


def test_flash_attention() -> None:
    """The number of heads of the call is that of the shard."""
    found, static_args, result, native = call_through("FlashAttentionScore", FLASH, (None, None, None, "attention"))
    assert found == (Q, Q, Q, None)
    assert static_args[0] is True and static_args[1] == pytest.approx(0.1)
    assert result == "attention" and RESULTS["FlashAttentionScore"](result)[3] == "attention"
    assert native == (*FLASH[:10], 4, *FLASH[11:])


@pytest.mark.parametrize(("place", "value"), [(16, 0), (3, Q), (8, Q)])
def test_rare_flash_attention_has_no_row(place: int, value: Any) -> None:
    args = (*FLASH[:place], value, *FLASH[place + 1 :])
    assert VARIANTS["FlashAttentionScore"](args, {}) is None


def test_norms() -> None:
    found, static_args, result, native = call_through("LayerNormExt", (Q, (3, 8), V8, V8, 1e-5), "y")
    assert (found, static_args[:2], result) == ((Q, V8, V8), (2, 2), "y")
    assert native == (Q, (3, 8), V8, V8, 1e-5)
    found, static_args, result, native = call_through("RmsNorm", (Q, V8, 1e-6), ("y", "rstd"))
    assert (found, static_args[:2], result, native) == ((Q, V8), (1, 1), ("y", "rstd"), (Q, V8, 1e-6))


@pytest.mark.parametrize(
    ("name", "args", "static_args"),
    [
        ("SortExt", (Q, 1, True, False), (1,)),
        ("CumsumExt", (Q, 2, None), (2,)),
        ("Roll", (Q, 1, 2), (2,)),
        ("TrilExt", (Q, 0), (-2, -1)),
    ],
)
def test_along_dims(name: str, args: tuple, static_args: tuple) -> None:
    found, got, result, native = call_through(name, args, "y")
    assert (found, got[0], result, native) == ((Q,), static_args, "y", args)


@pytest.mark.parametrize(
    ("name", "args", "static_args"),
    [
        ("LogSoftmaxExt", (Q, 2, None), (2, None)),
        ("LogSoftmax", (Q, -1), (-1, None)),
        ("Softmax", (Q, (-1,)), (-1, None)),
    ],
)
def test_softmax(name: str, args: tuple, static_args: tuple) -> None:
    found, got, result, native = call_through(name, args, "y")
    assert (found, got[:2], result, native) == ((Q,), static_args, "y", args)


@pytest.mark.parametrize(
    ("name", "args", "canonical", "dims", "keepdim"),
    [
        ("ArgMaxExt", (Q, 1, True), "reduce_whole", (1,), True),
        ("LogSumExp", (Q, (1, 2), False), "logsumexp", (1, 2), False),
        ("Var", (Q, 1, 1, True), "reduce_whole", (1,), True),
        ("Std", (Q, None, 1, False), "reduce_whole", None, False),
        ("MaxDim", (Q, 1, True), "reduce_pair", (1,), True),
    ],
)
def test_reductions(name: str, args: tuple, canonical: str, dims: Any, keepdim: bool) -> None:
    assert OPS[name].name == canonical
    found, static_args, result, native = call_through(name, args, "y")
    assert (found, static_args[:2], result, native) == ((Q,), (dims, keepdim), "y", args)


def test_dropout() -> None:
    row = OPS["FuncDropoutExt"]
    assert bind_of(row)(None, (Q, 0.25, True, False, None, None), {}) == ((Q,), (0.25, True, None, None, False))


def test_a_type_is_a_number_in_generated_code() -> None:
    for dtype in (42, 43, 44, 45):  # floating dtypes
        assert VARIANTS["Cast"]((Q, dtype), {}).name == "linear_unary"
    for dtype in (30, 34, 35):  # bool and integers
        assert VARIANTS["Cast"]((Q, dtype), {}).name == "pointwise"


def test_padding_of_an_embedding_gets_no_gradient() -> None:
    ids, weight = Tensor([[0, 1], [2, 1]]), Tensor(np.ones((3, 2), np.float32))
    row = VARIANTS["Embedding"]((ids, weight, 1, None, 2.0, False), {})
    assert row is not None

    def look_up(weight: Any) -> Any:
        operands, static_args = bind_of(row)(None, (ids, weight, 1, None, 2.0, False), {})
        return row.call(mint.nn.functional.embedding, operands, static_args).sum()

    assert ms.grad(look_up)(weight).asnumpy().tolist() == [[1, 1], [0, 0], [1, 1]]
