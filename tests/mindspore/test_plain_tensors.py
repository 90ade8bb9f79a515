"""Plain tensors that meet DTensors: whichever comes first, the error names the operands that do not mix; nothing takes
a part."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

from hyper_parallel import DTensor, Shard, distribute_tensor, implicit_replication
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import error_of, whole

VALUES = np.arange(16, dtype=np.float32).reshape(4, 4) / 7

MIXED = """
    plain.mul(x); plain.mul(other=x); plain.add(x); plain.sub(x); plain.div(x); plain.pow(x); plain.matmul(x)
    plain.mm(x); plain.maximum(x); plain.eq(x); plain.less(x); plain.masked_fill(x > 0, 1.0); plain.where(x > 0, plain)
    plain.expand_as(x); plain.add_(x); plain.mul_(x); plain.copy_(x); plain.__iadd__(x); plain.gather(1, x.int())
    plain.lerp(x, 0.5); plain + x; plain == x; mint.mul(plain, x); mint.cat([plain, x]); parameter * x; x * parameter
"""
REPLICATED = ("plain.mul(x)", "plain.sub(x)", "plain.matmul(x)", "plain.where(x > 0, plain)", "plain.expand_as(x)")
COPIES = ("Tensor(x)", "Tensor(x, ms.float16)", "Tensor(input_data=x)", "ms.tensor(x)")


def names(mesh: Any = None) -> dict[str, Any]:
    x = Tensor(VALUES)
    if mesh is not None:
        x = distribute_tensor(x, mesh, [Shard(0)])
    return {"x": x, "plain": Tensor(VALUES + 1), "parameter": Parameter(Tensor(VALUES + 1))}


def evaluate(call: str, operands: dict[str, Any]) -> Any:
    return eval(call, {"ms": ms, "mint": mint, "Tensor": Tensor}, operands)


@on_mesh()
def errors_of_mixed(mesh: Any) -> list[str]:
    """Calls whose error is another than that plain and distributed tensors do not mix."""
    problems = []
    for line in MIXED.strip().splitlines():
        for call in line.strip().split("; "):
            error = error_of(evaluate, call, names(mesh))
            if not (error.startswith("ValueError") and "got a plain tensor" in error and "from_local" in error):
                problems.append(f"{call}: {error}")
    return problems


def test_mixing_is_refused_whichever_comes_first(pool: Any) -> None:
    assert pool.run(2, errors_of_mixed) == [[], []]


@on_mesh()
def replicated(mesh: Any) -> list[str]:
    """Calls that give another value than on plain tensors where plain ones count as replicated."""
    problems = []
    with implicit_replication():
        for call in REPLICATED:
            got, wanted = evaluate(call, names(mesh)), evaluate(call, names())
            if not isinstance(got, DTensor) or not np.allclose(whole(got), wanted.asnumpy()):
                problems.append(f"{call}: {got}")
    return problems


def test_plain_first_under_implicit_replication(pool: Any) -> None:
    assert pool.run(2, replicated) == [[], []]


@on_mesh()
def copies(mesh: Any) -> list[Any]:
    errors = [error_of(evaluate, call, names(mesh)) for call in COPIES]
    x = names(mesh)["x"]
    inside = Tensor(x.to_local()), x.copy(), Parameter(x), Tensor([x, x])
    return [*errors, [isinstance(t, DTensor) for t in inside], [tuple(t.shape) for t in inside]]


def test_a_plain_tensor_of_a_distributed_one_is_refused(pool: Any) -> None:
    for *errors, distributed, shapes in pool.run(2, copies):
        for error in errors:
            assert error.startswith("TypeError: Tensor() of a DTensor, global shape (4, 4)")
            assert "x.full_tensor()" in error
        assert distributed == [False, True, True, False]
        assert shapes == [(2, 4), (4, 4), (4, 4), (2, 4, 4)]


@on_mesh()
def settings(mesh: Any) -> list[Any]:
    """A plain tensor keeps its value where it is given a DTensor."""
    operands = names(mesh)
    calls = ("parameter.set_data(x)", "parameter.assign_value(x)", "plain.assign_value(x)")
    errors = [error_of(evaluate, call, operands) for call in calls]
    return [*errors, [bool((operands[name].asnumpy() == VALUES + 1).all()) for name in ("plain", "parameter")]]


def test_a_plain_tensor_is_not_set_to_a_part(pool: Any) -> None:
    for *errors, kept in pool.run(2, settings):
        for error in errors:
            assert error.startswith("TypeError: the value of the plain ") and "x.full_tensor()" in error
        assert kept == [True, True]


def test_plain_programs_stay_as_they_are() -> None:
    """Tensors and parameters of one class are no business of anybody's."""
    x, parameter = Tensor(VALUES), Parameter(Tensor(VALUES))
    assert not hasattr(parameter, "__fallback__")
    assert type(x * parameter) is Tensor and type(parameter.mul(x)) is Tensor
    gradient = ms.grad(lambda x: (x.mul(parameter) + ops.exp(x)).sum())(x)
    assert np.allclose(gradient.asnumpy(), VALUES + np.exp(VALUES))
