"""Ints and slices along a sharded dimension: if few elements are selected, only these are communicated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, local_parts, same
from hyper_parallel.testing.extent import on_ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
#: On more than one rank, the first dimension leaves ranks with one row and with none.
SHAPE = (5, 4, 6)
INDICES: list[Any] = [
    0,
    -1,
    slice(1, 3),
    (slice(None), -1),
    (..., 2),
    (None, 3),
    (slice(0, None, 2), 1),
    (slice(None), slice(None), slice(1, 3)),
    slice(1, 5),  # most of it
    slice(2, 2),
]


def check(mesh: Any, placements: tuple, index: Any) -> dict[str, int]:
    """Compare values and gradients; return the bytes of the collectives of the selection."""
    adapter = get_adapter()
    whole = floats(*SHAPE)
    weights = floats(*whole[index].shape) + 1
    found: list[CommDebugMode] = []

    def part(x: np.ndarray, placed: tuple) -> np.ndarray:
        return local_parts(x, get_layout(mesh, placed, SHAPE), np.random.default_rng(0))

    def loss(local: Any) -> Any:
        x = DTensor.from_local(local, mesh, placements, shape=SHAPE)
        with CommDebugMode() as comm:
            y = x[index]
        found.append(comm)
        w = DTensor.from_local(adapter.tensor(weights), mesh, (R,) * mesh.ndim)
        return adapter.weighted_sum(y, w).full_tensor(), y

    y, (grad,) = adapter.value_and_grads(loss, [part(whole, placements)])
    what = f"{index} of {placements}"
    same(adapter.numpy(y), whole[index], what)
    wanted = np.zeros_like(whole)
    wanted[index] = weights
    # The gradient of a summand is that of the sum.
    kept = tuple(R if p.is_partial() else p for p in placements)
    same(grad, part(wanted, kept), f"gradient of {what}")
    return found[0].get_bytes()


def cut_by(index: Any) -> set[int]:
    """Return the dimensions along which an index selects only a part."""
    items = index if isinstance(index, tuple) else (index,)
    if ... in items:
        at = items.index(...)
        items = (*items[:at], *(slice(None),) * (len(SHAPE) - len(items) + 1), *items[at + 1 :])
    items = tuple(item for item in items if item is not None)
    return {
        dim
        for dim, (item, size) in enumerate(zip(items, SHAPE, strict=False))
        if isinstance(item, int) or range(size)[item] != range(size)
    }


@spmd.on_mesh()
def taken(mesh: Any, placement: Any) -> None:
    for index in INDICES:
        sent = check(mesh, (placement,), index)
        size = int(np.empty(SHAPE, np.float32)[index].nbytes)
        if mesh.size() == 1 or placement is R or placement.dim not in cut_by(index):
            assert sent == {}, index
        elif size and 2 * size <= 4 * math.prod(SHAPE):
            assert list(sent.values()) == [size], f"{index} of {placement}: {sent}"
        else:
            assert len(sent) == 1, f"{index} of {placement}: {sent}"


@pytest.mark.parametrize("placement", [R, S0, S1, S2], ids=str)
@on_ranks(1, 2, 3, 4)
def test_taken(pool: Any, world_size: int, placement: Any) -> None:
    pool.run(world_size, taken, placement)


@spmd.on_mesh(2, 2)
def taken_on_two_dimensions(mesh: Any) -> None:
    """Check slices on a 2-D mesh: of a tensor that is also partial, and of sharded dimensions."""
    for placements in ((S0, Partial()), (Partial(), S1), (S0, S0), (S0, S1), (S1, S2), (R, S0)):
        for index in INDICES:
            check(mesh, placements, index)


def test_on_two_dimensions(pool: Any) -> None:
    pool.run(4, taken_on_two_dimensions)
