"""Partial sums that an operation completes first: it is not linear for the dtypes or numbers of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same

P, R = Partial(), Replicate()
#: The summands of two ranks. Some overflow float16, and some have a sum of another sign.
FLOATS = np.array([[6e4, 1e5, 0.5, 0, 1], [-5.9e4, 1 - 1e5, 0.7, 1, -2]], np.float32)
#: Summands with more digits than a float has.
INTEGERS = np.array([[2**53 + 1, 2**24 + 1, 3], [-(2**53), -(2**24), 4]])
INF = float("inf")

Call = Callable[[Any, Any], Any]


def to(name: str) -> Call:
    return lambda platform, x: platform.to_dtype(x, platform.dtypes[name])


#: name -> (summands, call on the sum)
COMPLETED: dict[str, tuple[np.ndarray, Call]] = {
    "to float16": (FLOATS, to("float16")),
    "to int64": (FLOATS, to("int64")),
    "double to float": (FLOATS * np.float64(1e300), to("float32")),
    "sum in int64": (FLOATS, lambda platform, x: x.sum(dtype=platform.dtypes["int64"])),
    "sum in float16": (FLOATS, lambda platform, x: x.sum(dtype=platform.dtypes["float16"])),
    "copy to integers": (
        FLOATS,
        lambda platform, x: to("int64")(platform, x * 0).copy_(x),
    ),
    "by zero": (FLOATS, lambda platform, x: x / 0),
    "by 0.0": (FLOATS, lambda platform, x: x / 0.0),
    "by a tensor of zeros": (FLOATS, lambda platform, x: x / (x - x)),
    "times infinity": (FLOATS, lambda platform, x: INF * x),
    "integers to float": (INTEGERS, to("float32")),
    "integers to double": (INTEGERS, to("float64")),
    "integers times a float": (INTEGERS, lambda platform, x: x * 0.5),
    "quotient of integers": (INTEGERS, lambda platform, x: x / 2),
    "integers and floats": (INTEGERS, lambda platform, x: x + to("float32")(platform, x)),
}
#: Calls of floats that keep the partial sum, without communication.
KEPT: dict[str, Call] = {
    "to bfloat16": to("bfloat16"),
    "to float64": to("float64"),
    "there and back": lambda platform, x: to("float32")(platform, to("bfloat16")(platform, x)),
    "sum in float64": lambda platform, x: x.sum(dtype=platform.dtypes["float64"]),
    "times a number": lambda platform, x: 2.0 * x,
    "by a number": lambda platform, x: x / 3,
}


@spmd.on_mesh()
def sums(mesh: Any) -> None:
    adapter, platform = get_adapter(), mesh.platform
    for name, (parts, call) in COMPLETED.items():
        got = call(platform, DTensor.from_local(adapter.tensor(parts[mesh.get_rank()]), mesh, [P]))
        wanted = call(platform, adapter.tensor(parts.sum(0)))
        assert got.dtype == wanted.dtype, name
        np.testing.assert_allclose(adapter.numpy(got.full_tensor()), adapter.numpy(wanted), 1e-6, err_msg=name)
    for name, call in KEPT.items():
        with CommDebugMode() as comm:
            got = call(platform, DTensor.from_local(adapter.tensor(FLOATS[mesh.get_rank()]), mesh, [P]))
        assert got.placements == (P,), name
        assert comm.get_total_counts() == 0, name


@spmd.on_mesh()
def writes(mesh: Any) -> None:
    """Check that a write that would have to complete the sum is refused before anything is written."""
    adapter = get_adapter()
    x = DTensor.from_local(adapter.tensor(FLOATS[mesh.get_rank()]), mesh, [P])
    for write in (lambda: x.mul_(INF), lambda: x.div_(0.0)):
        with pytest.raises(ValueError, match="cannot write into a tensor placed"):
            write()
    same(adapter.numpy(x.full_tensor()), FLOATS.sum(0), "values after refused writes")
    same(adapter.numpy(x.mul_(2.0).div_(4).full_tensor()), FLOATS.sum(0) / 2, "values after writes")


@spmd.on_mesh()
def gradients(mesh: Any) -> None:
    adapter, platform, weights = get_adapter(), mesh.platform, np.arange(1, 6, dtype=np.float32)

    def loss(local: Any) -> Any:
        y = DTensor.from_local(local, mesh, [P])
        for name in ("float16", "float32"):
            y = to(name)(platform, y)
        divisor = DTensor.from_local(adapter.tensor(weights), mesh)
        return adapter.weighted_sum(y / divisor, DTensor.from_local(adapter.tensor(weights), mesh)).full_tensor(), y

    _, (grad,) = adapter.value_and_grads(loss, [FLOATS[mesh.get_rank()]])
    same(grad, np.ones_like(weights), "gradient")


@spmd.on_mesh()
def means(mesh: Any) -> None:
    """Check means in another dtype, where a rank has no element: all ranks send that dtype."""
    adapter, platform = get_adapter(), mesh.platform
    for dtype, name in ((np.float32, "float64"), (np.float32, "float16"), (np.int32, "float32")):
        mine = np.ones((1 - mesh.get_rank(), 3), dtype)
        x = DTensor.from_local(adapter.tensor(mine), mesh, [Shard(0)], shape=(1, 3))
        for keepdim in (False, True):
            got = x.mean(0, keepdim, dtype=platform.dtypes[name])
            assert got.dtype == platform.dtypes[name]
            assert adapter.numpy(got.full_tensor()).tolist() == np.ones((1, 3) if keepdim else 3).tolist()


def test_sums_are_completed_where_they_must_be(pool: Any) -> None:
    pool.run(2, sums)


def test_writes_are_refused(pool: Any) -> None:
    pool.run(2, writes)


def test_gradients_of_completed_sums(pool: Any) -> None:
    pool.run(2, gradients)


def test_means_in_another_dtype(pool: Any) -> None:
    pool.run(2, means)
