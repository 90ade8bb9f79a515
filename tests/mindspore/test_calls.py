"""Every call that users make: the same values on DTensors, whatever their placement, and always a DTensor."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor
from hyper_parallel.core.operations import dispatch
from hyper_parallel.testing.extent import everything
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.calls import CALLS, INPLACE_CALLS, MORE_CALLS, evaluate, operands


def placed(mesh: Any, dim: int | None) -> Any:
    """Make DTensors, sharded along ``dim`` where they have it."""

    def distribute(t: Tensor) -> Any:
        placement = Replicate() if dim is None or dim >= t.ndim else Shard(dim)
        return distribute_tensor(t, mesh, [placement], src_data_rank=None)

    return distribute


def remembered_calls() -> int:
    return sum(map(len, dispatch.CALLS.values()))


def problem_of(
    call: str, names: dict[str, Any], plain: dict[str, Any], earlier: dict[str, Any] | None = None
) -> str | None:
    """The problem of a call on DTensors, or None; ``earlier``: arguments of a call before it, to be remembered."""
    try:
        wanted = evaluate(call, plain)
        if earlier is not None:
            evaluate(call, earlier)
        remembered = remembered_calls()
        got = evaluate(call, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
    if earlier is not None and remembered_calls() > remembered:
        return "is remembered a second time"
    for y, t in zip(got, wanted, strict=True):
        if not isinstance(y, DTensor):
            return f"gives a {type(y).__name__}"
        if y.dtype != t.dtype or tuple(y.shape) != tuple(t.shape):
            return f"gives {y.dtype} {tuple(y.shape)}, wanted {t.dtype} {tuple(t.shape)}"
        whole = y.full_tensor().asnumpy()
        if not np.allclose(whole, t.asnumpy(), rtol=2e-5, atol=1e-6, equal_nan=True):
            return f"placed {y.placements}: gives {whole}, wanted {t}"
    return None


@on_mesh()
def problems(mesh: Any, dim: int | None, calls: list[str]) -> list[str]:
    found = []
    for call in calls:
        problem = problem_of(call, operands(placed(mesh, dim)), operands())
        if problem is not None:
            found.append(f"{call}: {problem}")
    return found


@on_mesh()
def problems_when_repeated(mesh: Any, dim: int, calls: list[str]) -> list[str]:
    """Dispatch looks less closely at a call that it knows; MindSpore has a new function object for each."""
    found, place = [], placed(mesh, dim)

    def place_half(t: Tensor) -> Any:
        return place(t if t.dtype in (ms.bool_, ms.int32, ms.int64) else t * 0.5)

    for call in calls:
        earlier = operands(place_half)
        problem = problem_of(call, operands(place), operands(), earlier)
        if problem is not None:
            found.append(f"{call}: {problem}")
    return found


@pytest.mark.parametrize(
    ("world", "dim"),
    [
        pytest.param(1, None, marks=pytest.mark.nightly),
        pytest.param(2, 0, marks=pytest.mark.nightly),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        (3, 0),
    ],
)
def test_calls(pool: Any, world: int, dim: int | None) -> None:
    """Dims of size 4 over three ranks leave one rank without elements."""
    assert pool.run(world, problems, dim, CALLS, timeout=300) == [[]] * world


def test_repeated_calls(pool: Any) -> None:
    calls = (CALLS + MORE_CALLS)[:: 1 if everything() else 3]
    assert pool.run(2, problems_when_repeated, 0, calls, timeout=300) == [[]] * 2


@on_mesh()
def numbers(mesh: Any) -> list[bool]:
    """A remembered call keeps at most the type of a number."""
    x = distribute_tensor(Tensor(np.ones((4, 2), np.float32)), mesh, [Shard(0)])
    found = [x * 2.0, x * 3.0, x + 2.5, x + 4.5, x - 1, x - 2, x.reshape(2, 4), x.reshape(8, 1), x.chunk(2, 0)[1]]
    wanted = [2, 3, 3.5, 5.5, 0, -1, np.ones((2, 4)), np.ones((8, 1)), np.ones((2, 2))]
    pairs = zip(found, wanted, strict=True)
    return [bool(np.array_equal(y.full_tensor().asnumpy(), w + np.zeros(y.shape))) for y, w in pairs]


def test_numbers_in_repeated_calls(pool: Any) -> None:
    assert pool.run(2, numbers) == [[True] * 9] * 2


@pytest.mark.parametrize(("world", "dim"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.nightly)])
def test_more_calls(pool: Any, world: int, dim: int) -> None:
    """Calls of functions that are used less often."""
    assert pool.run(world, problems, dim, MORE_CALLS, timeout=300) == [[]] * world


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_inplace_calls(pool: Any, dim: int | None) -> None:
    assert pool.run(2, problems, dim, INPLACE_CALLS) == [[]] * 2
