"""Every call that users make: the same values on DTensors, whatever their placement, and always a DTensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.calls import CALLS, INPLACE_CALLS, evaluate, operands


def placed(mesh: Any, dim: int | None) -> Any:
    """Make DTensors, sharded along ``dim`` where they have it."""

    def distribute(t: Tensor) -> Any:
        placement = Replicate() if dim is None or dim >= t.ndim else Shard(dim)
        return distribute_tensor(t, mesh, [placement], src_data_rank=None)

    return distribute


def problem_of(call: str, names: dict[str, Any], plain: dict[str, Any]) -> str | None:
    """What is wrong with a call on DTensors, or None."""
    try:
        wanted = evaluate(call, plain)
        got = evaluate(call, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("\n")[0]
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


@pytest.mark.parametrize(("world", "dim"), [(1, None), (2, 0), (2, 1), (3, 0)])
def test_calls(pool: Any, world: int, dim: int | None) -> None:
    """Over three ranks, dims of size 4 leave one of them without elements."""
    assert pool.run(world, problems, dim, CALLS, timeout=300) == [[]] * world


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_inplace_calls(pool: Any, dim: int | None) -> None:
    assert pool.run(2, problems, dim, INPLACE_CALLS) == [[]] * 2
