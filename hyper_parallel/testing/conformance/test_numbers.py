"""Tensors without dimensions where an operation takes a number: the number is the one that ``x.item()`` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.extent import on_ranks

#: Calls with a float 3, and the integers 2 and 0.
CALLS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "alpha": lambda x, three, two, zero: x.add(x, alpha=three),
    "dim": lambda x, three, two, zero: x.sum(zero),
    "dim by name": lambda x, three, two, zero: x.mean(axis=zero),
    "dim of a repeated call": lambda x, three, two, zero: x.cumsum(zero),
    "stop": lambda x, three, two, zero: x[:two],
    "start among others": lambda x, three, two, zero: x[zero:, two],
    "step": lambda x, three, two, zero: x[::two],
    "length": lambda x, three, two, zero: x.narrow(0, zero, two),
    "size of parts": lambda x, three, two, zero: x.split(two)[1],
    "shape": lambda x, three, two, zero: x.reshape(two, -1),
    "shape as a tuple": lambda x, three, two, zero: x.reshape((two, -1)),
    "shape of another": lambda x, three, two, zero: x.new_zeros((two, 3)) + three,
}


def as_tensors(mesh: Any, placement: Any, *numbers: float) -> list[Any]:
    """Return numbers as distributed tensors without dimensions, in parts that differ between ranks."""
    adapter, found = get_adapter(), []
    for number in numbers:
        whole = np.array(number, np.float32 if isinstance(number, float) else np.int64)
        mine = whole
        if placement.is_partial():
            others = mesh.size() - 1
            mine = np.array(7 if mesh.get_local_rank() else whole - 7 * others, whole.dtype)
        found.append(DTensor.from_local(adapter.tensor(mine), mesh, [placement], shape=()))
    return found


@spmd.on_mesh()
def numbers(mesh: Any, placement: Any) -> None:
    adapter, array = get_adapter(), floats(6, 4)
    for what, call in CALLS.items():
        wanted = adapter.numpy(call(adapter.tensor(array), 3.0, 2, 0))
        for of_x in (Shard(0), Replicate()):
            x = DTensor.from_local(adapter.tensor(array), mesh, [Replicate()]).redistribute(placements=[of_x])
            with CommDebugMode() as plain:
                call(x, 3.0, 2, 0)
            for three, two, zero in ((3.0, 2, 0), (3.0, 2, 0)):  # the second call finds the recipe of the first
                given = as_tensors(mesh, placement, three, two, zero)
                with CommDebugMode() as comm:
                    y = call(x, *given)
                same(adapter.numpy(y), wanted, f"{what}, x placed {of_x}, numbers placed {placement}")
            if not placement.is_partial():
                assert comm.get_comm_counts() == plain.get_comm_counts(), what


@pytest.mark.parametrize("placement", [Partial(), Replicate()], ids=repr)
@on_ranks(1, 2)
def test_numbers(pool: Any, world_size: int, placement: Any) -> None:
    pool.run(world_size, numbers, placement)


@spmd.on_mesh()
def changed_numbers(mesh: Any) -> None:
    """Check calls with a tensor that gets another number: plain, and distributed in a list of sizes."""
    adapter, array = get_adapter(), floats(6, 4)
    x = DTensor.from_local(adapter.tensor(array), mesh, [Replicate()]).redistribute(placements=[Shard(0)])
    start = adapter.tensor(np.array(0))
    for i in range(3):
        same(adapter.numpy(x[start:]), array[i:], f"from {i}")
        start += 1
    for sizes in ((6, 4), (4, 6), (2, 12)):
        given = as_tensors(mesh, Replicate(), *sizes)
        same(adapter.numpy(x.reshape(tuple(given))), array.reshape(sizes), f"shape {sizes}")
    same(adapter.numpy(x * np.float64(2)), array * 2, "a number of numpy")


@on_ranks(1, 2)
def test_changed_numbers(pool: Any, world_size: int) -> None:
    pool.run(world_size, changed_numbers)


@spmd.on_mesh()
def gradients(mesh: Any) -> None:
    adapter, array = get_adapter(), floats(6, 4)
    three, two, _ = as_tensors(mesh, Partial(), 3.0, 2, 0)

    def loss(x: Any) -> Any:
        d = DTensor.from_local(x, mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        return (d[:two].add(d[:two], alpha=three) ** 2).sum().full_tensor(), d

    _, (grad,) = adapter.value_and_grads(loss, [array])
    wanted = np.where(np.arange(6)[:, None] < 2, 32 * array, 0)
    same(grad, wanted, "gradient", 1e-5)


@on_ranks(1, 2)
def test_gradients(pool: Any, world_size: int) -> None:
    pool.run(world_size, gradients)
