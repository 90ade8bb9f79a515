"""Features of `mindspore.Tensor` besides operations, on DTensors: sizes, conversions, item assignment, reflected
operators; and overrides for parameters."""

from __future__ import annotations

import operator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops.operations.nn_ops import AllFinite

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    implicit_replication,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.platform.mindspore.patches import PATCHES
from hyper_parallel.platform.mindspore.tensors.tensor import Unknown
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import error_of, rows_of, whole

VALUES = np.arange(1, 13, dtype=np.float32).reshape(4, 3)


@on_mesh()
def sizes(mesh: Any) -> list[Any]:
    x = distribute_tensor(Tensor(VALUES), mesh, [Shard(0)])
    scalar = x.sum().astype(ms.int32)
    with mesh.platform.no_dispatch():
        local = (x.nbytes, x.numel(), len(x))
    return [
        (x.nbytes, x.dim(), x.ndimension(), x.numel(), x.nelement(), len(x)),
        local,
        list(range(100))[scalar],
        error_of(len, scalar),
    ]


def test_sizes_are_global(pool: Any) -> None:
    wanted = [(48, 2, 2, 12, 12, 4), (24, 6, 2), 78, "TypeError: len() of a 0-d tensor"]
    assert pool.run(2, sizes) == [wanted] * 2


#: index, value: dims that are cut must be whole
ASSIGNMENTS: list[tuple[Any, Any]] = [
    ((slice(None), 1), 7.0),
    ((slice(None), slice(1, 3)), -1.0),
    ((..., 0), 5.0),
    ((slice(None), slice(None, None, 2)), 9.0),
]


def assigned(x: Any, index: Any, value: Any) -> Any:
    """Twice ``x``, with the assignment."""
    y = x * 2
    y[index] = value
    return y


@on_mesh()
def item_assignment(mesh: Any) -> list[str]:
    problems = []
    for placement in (Shard(0), Replicate()):
        x = distribute_tensor(Tensor(VALUES), mesh, [placement])
        for index, value in ASSIGNMENTS:
            wanted = VALUES * 2
            wanted[index] = value
            gradient = 4 * wanted  # of the sum of squares of twice x
            gradient[index] = 0
            y = assigned(x, index, value)
            if not (isinstance(y, DTensor) and y.placements == (placement,) and np.array_equal(whole(y), wanted)):
                problems.append(f"{placement} {index}: {y.placements} {whole(y)}")

            def loss(x: Any, index: Any = index, value: Any = value) -> Any:
                y = assigned(x, index, value)
                return (y * y).sum()

            got = ms.grad(loss)(x)
            part = rows_of(gradient, x._layout).asnumpy()
            if not np.array_equal(whole(got), gradient if isinstance(got, DTensor) else part):
                problems.append(f"gradient {placement} {index}: {got}")
    y = distribute_tensor(Tensor(VALUES), mesh, [Shard(1)])
    column = distribute_tensor(Tensor(VALUES[:, 0] * 10), mesh, [Replicate()])
    y = y.redistribute(mesh, [Shard(0)]) * 1
    y[:, 2] = column
    wanted = VALUES.copy()
    wanted[:, 2] = VALUES[:, 0] * 10
    if not np.array_equal(whole(y), wanted):
        problems.append(f"distributed value: {whole(y)}")
    with mesh.platform.no_dispatch():
        y[0] = -3.0
    wanted[[0, 2]] = -3.0  # the first row of each rank
    if not np.array_equal(whole(y), wanted):
        problems.append(f"local: {whole(y)}")
    rows = distribute_tensor(Tensor(np.array([0, 2])), mesh, [Replicate()])
    errors = [error_of(operator.setitem, y, (slice(None), "rows"), 1.0)]
    y[0] = 1.0
    wanted[0] = 1.0
    y[rows] = 5.0
    wanted[[0, 2]] = 5.0
    return [*problems, errors, whole(y).tolist() == wanted.tolist()]


def test_item_assignment(pool: Any) -> None:
    for *problems, (by_name,), kept in pool.run(2, item_assignment):
        assert problems == []
        assert by_name.startswith("TypeError: cannot index a distributed tensor with 'rows': use ints, slices")
        assert kept is True


@on_mesh()
def reflected(mesh: Any) -> list[Any]:
    x = distribute_tensor(Tensor(VALUES), mesh, [Shard(0)])
    with mesh.platform.no_dispatch():
        local = x.__rsub__(Tensor(np.ones((2, 3), np.float32)))
        reverse = type(local) is Tensor and np.array_equal(local.asnumpy(), 1 - VALUES[2 * mesh.get_local_rank() :][:2])
    names = ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "matmul")
    unknown = [getattr(x, f"__r{name}__")("text") is NotImplemented for name in names]
    return [reverse, unknown, error_of(lambda: [1, 2] @ x).split(":")[0]]


def test_reflected_operators(pool: Any) -> None:
    assert pool.run(2, reflected) == [[True, [True] * 8, "TypeError"]] * 2


@on_mesh()
def infinities(mesh: Any) -> list[bool]:
    """Each rank looks at its part, and all get the same answer, wherever the non-finite numbers are."""
    found = []
    for number in (1.0, np.inf, -np.inf, np.nan):
        for place in ((0, 0), (3, 2)):
            values = VALUES.copy()
            values[place] = number
            tensors = [distribute_tensor(Tensor(v), mesh, [Shard(0)]) for v in (VALUES, values)]
            found.append(bool(AllFinite()(tensors)))
    return found


def test_all_finite_tells_whether_something_is_not(pool: Any) -> None:
    assert pool.run(2, infinities) == [[False] * 2 + [True] * 6] * 2


@on_mesh()
def plain_indexed(mesh: Any) -> list[Any]:
    """A plain tensor indexed by a DTensor."""
    table = Tensor(VALUES)
    index = distribute_tensor(Tensor([3, 1], ms.int64), mesh, [Shard(0)])
    errors = [error_of(lambda: table[index]), error_of(operator.setitem, table, index, 0.0)]
    with implicit_replication():
        rows = table[index]
    return [errors, isinstance(rows, DTensor), whole(rows).tolist(), table.asnumpy().tolist()]


def test_a_plain_tensor_indexed_by_a_distributed_one(pool: Any) -> None:
    for errors, distributed, rows, table in pool.run(2, plain_indexed):
        assert all(e.startswith("ValueError") and "got a plain tensor (the first operand" in e for e in errors), errors
        assert distributed and rows == VALUES[[3, 1]].tolist() and table == VALUES.tolist()


@on_mesh()
def parameter_methods(mesh: Any) -> dict[str, Any]:
    net = nn.Dense(3, 4)
    net.weight.set_data(Tensor(VALUES))
    parallelize_module(net, mesh, ColwiseParallel())
    weight = net.weight
    given = weight.clone(Tensor(VALUES * 5))
    copied = weight.copy()
    copied.set_data(ops.zeros((4, 3)))
    return {
        "clone of a whole value": np.array_equal(whole(given), VALUES * 5) and given.placements == (Shard(0),),
        "a parameter": isinstance(given, Parameter) and given.name == weight.name,
        "value": weight.value() is weight and weight.init_data() is weight,
        "a copy is independent": np.array_equal(whole(weight), VALUES) and not whole(copied).any(),
        "errors": [error_of(weight.set_data, 3.0), error_of(weight.set_data, "zeros")],
    }


def test_parameter_methods(pool: Any) -> None:
    for result in pool.run(2, parameter_methods):
        number, text = result.pop("errors")
        assert number.startswith("ValueError: parameter 'weight' has shape (4, 3), and the new data has shape ()")
        assert text.startswith("TypeError: Parameter data must be")
        assert all(result.values()), result


@on_mesh()
def scalar_parameter(mesh: Any) -> list[Any]:
    p = Parameter(Tensor(2.0), name="p")
    mesh.platform.set_distributed_parameter(
        ScalarNet(p), "p", Tensor(2.0), distribute_tensor(Tensor(2.0), mesh, [Replicate()])._layout
    )
    p.set_data(3)
    return [isinstance(p, DTensor), p.shape, float(p)]


class ScalarNet(nn.Cell):
    """Holds one number."""

    def __init__(self, p: Parameter) -> None:
        super().__init__()
        self.p = p


def test_a_scalar_parameter_takes_numbers(pool: Any) -> None:
    assert pool.run(2, scalar_parameter) == [[True, (), 3.0]] * 2


def test_wrappers_are_installed_once() -> None:
    distribute_tensor(Tensor(VALUES), init_device_mesh("cpu", (1,)), [Shard(0)])
    wrapped = [ops.Stack.__call__, AllFinite.__call__, Tensor.__getitem__, Parameter.__mul__]
    PATCHES.install()
    assert wrapped == [ops.Stack.__call__, AllFinite.__call__, Tensor.__getitem__, Parameter.__mul__]
    assert all(hasattr(call, "__wrapped__") for call in wrapped[:3])


@pytest.mark.parametrize("function", ["Sigmoid", "AssignAdd", "ScatterNdUpdate"])
def test_operations_without_a_row(function: str) -> None:
    """Core reports each once, so they compare by name; the name tells those that write in place."""

    class Primitive:
        name = function

    a, b = Unknown(Primitive()), Unknown(Primitive())
    assert a == b and len({a, b}) == 1 and a != function
    assert a.name.endswith("_") is (function != "Sigmoid")
    assert repr(a) == f"<operation {a.name}>"


def test_a_primitive_shows_its_name() -> None:
    """A primitive of the old calling convention has its name in core's messages."""
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(Tensor(VALUES), mesh, [Shard(0)])
    seen: list[Any] = []
    cls = type(x)
    original = cls._dispatch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cls,
            "_dispatch",
            staticmethod(lambda op, f, args, kwargs: (seen.append(f), original(op, f, args, kwargs))[1]),
        )
        ops.ReduceSum()(x, 1)
    assert "<primitive ReduceSum>" in map(repr, seen)
    assert get_platform("mindspore") is mesh.platform
