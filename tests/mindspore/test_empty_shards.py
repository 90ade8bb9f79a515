"""One rank holds no elements. Every call gives the values and the gradients of the unsharded one. All ranks issue the
same collectives, which `check_ranks` compares."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest

from hyper_parallel import DTensor, check_ranks, manual_seed
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.calls import CALLS, evaluate, operands
from tests.mindspore.test_calls import placed

_FLOATS = (ms.float16, ms.float32)

#: Calls that turn values into a truth value, and their consequences: no gradient goes through, and all ranks must know
#: that.
MASKS = [
    "ops.where((x > 0.5).any(), x * v, x)",
    "ops.where((x > 0.5).all(), x * v, x)",
    "(x > 0.5).any().astype(ms.float32) * v",
    "(x > 0.5).all().astype(ms.float32) * (x * v)",
    "(x > 0.5).any(0).astype(ms.float32) * v",
    "(x > 0.5).astype(ms.float32) * v",
    "(x > 0.5).astype(ms.int32).sum().astype(ms.float32) * v",
    "(x * x).argmax(1).astype(ms.float32) * x[:, 0]",
    "ops.isfinite(x * v).astype(ms.float32) * v",
    "ops.one_hot((x > 0.5).astype(ms.int32), 6).astype(ms.float32) * v",
    "ops.masked_fill(x * v, (x > 0.5).any(), 2.0)",
    "ops.topk(x, 2)[1].astype(ms.float32) * x[:, :2]",
    "x.astype(ms.float16).astype(ms.float32) * v",
    "x.astype(ms.int32).astype(ms.float32) * v",
    "ops.zeros_like(x) + v",
    "(x * v) / ops.ones_like(x * v).sum()",
    "(x * v) / ops.full_like(x * v, 2.0).sum()",
    "(x * v) / (1 + ops.stop_gradient(x * v).sum() ** 2)",
]
#: Plain tensors have no gradient on CPU; MindSpore gives none of class weights, and one of another shape than a table.
_OWN_GRADIENTS = """
    F.softplus(x); mint.unbind(x); mint.unbind(x3); mint.unbind(x3, 1)
    mint.select(x, 0, 1); x.select(0, 1); x.select(-1, -1)
    ops.NLLLoss()(x, i, v)[0]; ops.NLLLoss('sum')(x, i, v)[0]; ops.NLLLoss('none')(x, i, v)[0]
    ops.EmbeddingLookup()(w, ids, 0)
"""


def gradients(call: str, names: dict[str, Any], differentiate: Any) -> tuple[Any, list[str], tuple]:
    """The loss of a call, and its gradients by the operands that it names."""
    code = compile(call, "call", "eval").co_names
    floats = [n for n, x in names.items() if x.dtype in _FLOATS and x.ndim]
    used = [n for n in floats if n in code or n == "x"]

    def loss(*values: Any) -> Any:
        total = names["x"].sum() * 0.0
        for y in evaluate(call, {**names, **dict(zip(used, values, strict=True))}):
            if y.dtype in _FLOATS:
                total = total + (y * y + y).sum()
        return total

    value, found = differentiate(loss, tuple(range(len(used))))(*(names[n] for n in used))
    return value, used, found if isinstance(found, tuple) else (found,)


def whole(x: Any) -> np.ndarray:
    return (x.full_tensor() if isinstance(x, DTensor) else x).asnumpy()


def problem_of(call: str, names: dict[str, Any], mesh: Any) -> str | None:
    value, used, wanted = gradients(call, operands(), ms.value_and_grad)
    with check_ranks(mesh):
        got_value, _, got = gradients(call, names, value_and_grad)
        got_value, got = whole(got_value), [whole(g) for g in got]
    if not np.allclose(got_value, value.asnumpy(), rtol=1e-3 if "16" in call else 1e-4, atol=1e-5, equal_nan=True):
        return f"gives {got_value}, wanted {value}"
    for name, g, w in zip(used, got, wanted, strict=True):
        if g.shape != w.shape or not np.allclose(g, w.asnumpy(), rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"gradient of {name}: {g}, wanted {w}"
    return None


@on_mesh()
def problems(mesh: Any, dim: int, calls: list[str]) -> list[str]:
    found = []
    manual_seed(0, mesh)  # earlier jobs may have drawn on some of the ranks, which `check_ranks` would notice
    for call in calls:
        problem = problem_of(call, operands(placed(mesh, dim)), mesh)
        if problem is not None:
            found.append(f"{call}: {problem}")
    return found


def differentiable() -> list[str]:
    left_out = {call.strip() for line in _OWN_GRADIENTS.splitlines() for call in line.split("; ")}
    assert left_out - set(CALLS) == {""}
    return [call for call in CALLS if call not in left_out]


NIGHTLY = [pytest.param(*row, marks=pytest.mark.nightly) for row in ((3, 0, 1), (4, 1, 4))]


@pytest.mark.parametrize(("world", "dim", "every"), [(3, 0, 3), *NIGHTLY])
def test_gradients(pool: Any, world: int, dim: int, every: int) -> None:
    """Dims of size 4 over three ranks, and of size 6 over four, leave one rank without elements."""
    assert pool.run(world, problems, dim, differentiable()[::every], timeout=300) == [[]] * world


@pytest.mark.parametrize(("world", "dim"), [(3, 0), (4, 1)])
def test_masks(pool: Any, world: int, dim: int) -> None:
    assert pool.run(world, problems, dim, MASKS) == [[]] * world


@on_mesh()
def written_after(mesh: Any) -> None:
    """Writing to a tensor does not concern the backward of an operation before that does not need its values: on ranks
    with nothing as on the others."""

    def loss(x: Any, v: Any) -> Any:
        h = x * 1.0
        y = h + v
        h[0:2] = 3.0
        return (y * y).sum() + (h * v).sum()

    named = operands()
    given = operands(placed(mesh, 0))
    _, wanted = ms.value_and_grad(loss, (0, 1))(named["x"], named["v"])
    with check_ranks(mesh):
        _, got = value_and_grad(loss, (0, 1))(given["x"], given["v"])
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(whole(g), w.asnumpy(), rtol=1e-5)


def test_writes_after_operations(pool: Any) -> None:
    pool.run(3, written_after)
