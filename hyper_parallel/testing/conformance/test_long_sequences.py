"""Attention over a sequence that is cut: each way gives what a single device computes, and its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, Replicate, Shard
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.rules.sequence_cut import attention_method
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, same
from hyper_parallel.testing.extent import on_ranks

#: float64 and float32.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
#: (heads of queries, of keys, queries, keys, causal, mask: None, or the sizes of a mask before the scores)
SHAPES = [
    (12, 12, 7, 7, False, None),
    (12, 12, 7, 7, True, None),
    (4, 1, 1, 1, True, None),
    (4, 2, 24, 24, True, None),
    (5, 5, 2, 2, False, None),
    (4, 2, 7, 7, False, (1, 1)),
    (12, 12, 5, 5, False, (2, 1)),
    (4, 2, 7, 5, True, None),
]
MORE = [
    *(
        (heads, 1, length, length, causal, None)
        for heads in (1, 12)
        for length in (64, 1000)
        for causal in (False, True)
    ),
    (12, 12, 1000, 1000, True, None),
    (4, 2, 7, 5, False, (1, 4)),
    (4, 4, 7, 7, False, (2, 4)),
]


def check(mesh: Any, method: str | None, shape: tuple, dtype: str, placements: tuple = (Shard(2),)) -> dict[str, Any]:
    """Compare one call with that of a single device; gives the collectives in forward and in backward."""
    heads, shared, queries, keys, causal, masked = shape
    adapter, rng = get_adapter(), np.random.default_rng(0)
    sizes = [(2, heads, queries, 3), (2, shared, keys, 3), (2, shared, keys, 3)]
    arrays = [rng.standard_normal(size).astype(dtype) for size in sizes]
    weight = rng.standard_normal(sizes[0]).astype(dtype)
    if masked is not None:
        arrays.append(rng.standard_normal((*masked, queries, keys)).astype(dtype))
    counts: dict[str, Any] = {}

    def reference(*xs: Any) -> Any:
        y = adapter.scaled_attention(*xs, is_causal=causal)
        return adapter.weighted_sum(y, adapter.tensor(weight)), y

    wanted, wanted_grads = adapter.value_and_grads(reference, arrays)
    kinds = [placements] * 3 + [(Replicate(),) * mesh.ndim]
    layouts = [get_layout(mesh, kind, x.shape) for kind, x in zip(kinds, arrays, strict=False)]
    locals_ = [np.ascontiguousarray(x[layout.local_index()]) for x, layout in zip(arrays, layouts, strict=True)]

    def distributed(*xs: Any) -> Any:
        given = [
            DTensor.from_local(x, mesh, layout.placements, shape=layout.shape)
            for x, layout in zip(xs, layouts, strict=True)
        ]
        with attention_method(method), CommDebugMode() as comm:
            y = adapter.scaled_attention(*given, is_causal=causal)
        counts["forward"] = comm.get_comm_counts()
        assert y.placements == placements, y.placements
        mine = adapter.tensor(np.ascontiguousarray(weight[layouts[0].local_index()]))
        return adapter.weighted_sum(y.to_local(), mine), y

    with CommDebugMode() as comm:
        got, grads = adapter.value_and_grads(distributed, locals_)
    counts["backward"] = difference(comm.get_comm_counts(), counts["forward"])
    case, tolerance = f"{method} {shape} {dtype}", TOLERANCES[dtype]
    same(adapter.numpy(got), adapter.numpy(wanted), f"{case}: output", tolerance)
    for i, (grad, whole, layout) in enumerate(zip(grads, wanted_grads, layouts, strict=True)):
        same(grad, whole[layout.local_index()], f"{case}: gradient of operand {i}", tolerance)
    return counts


def fits(method: str, shape: tuple, ranks: int) -> bool:
    """Whether the method is possible."""
    heads, shared, queries, keys, _, masked = shape
    if method == "exchange":
        return queries != keys or (heads % ranks == shared % ranks == 0 and masked is None)
    return method == "gather" or masked is None or queries != keys


#: What each method sends, of one sequence without a mask.
COUNTS = {
    "gather": lambda n: ({"all_gather": 1}, {"reduce_scatter": 1}),
    "exchange": lambda n: ({"all_to_all": 4}, {"all_to_all": 4}),
    "ring": lambda n: ({"shift": n - 1}, {"shift": 2 * (n - 1)}),
}


@spmd.on_mesh()
def ways(mesh: Any, shapes: list[tuple], dtypes: tuple[str, ...]) -> int:
    count, ranks = 0, mesh.size()
    for method in COUNTS:
        for shape in shapes:
            if not fits(method, shape, ranks):
                continue
            for dtype in dtypes:
                counts = check(mesh, method, shape, dtype)
                forward, backward = COUNTS[method](ranks) if ranks > 1 else ({}, {})
                if shape[2] == shape[3] and shape[5] is None:
                    assert (counts["forward"], counts["backward"]) == (forward, backward), f"{method} {shape}: {counts}"
                count += 1
    for shape in shapes:
        check(mesh, None, shape, dtypes[0])
    return count


@on_ranks(1, 2, 3, 4)
def test_each_way(pool: Any, world_size: int) -> None:
    assert min(pool.run(world_size, ways, SHAPES, ("float64", "float32"))) > 20


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_longer_sequences(pool: Any, world_size: int) -> None:
    pool.run(world_size, ways, MORE, ("float64",))


@spmd.on_mesh(2, 2)
def two_dimensions(mesh: Any) -> None:
    """Heads on one mesh dimension and the sequence on the other; the sequence on both; samples and the sequence."""
    for shape in SHAPES[1:4]:
        for placements in ((Shard(1), Shard(2)), (Shard(2), Shard(1)), (Shard(2), Shard(2)), (Shard(0), Shard(2))):
            if Shard(1) not in placements or shape[1] % 2 == 0:
                check(mesh, None, shape, "float64", placements)


def test_two_mesh_dimensions(pool: Any) -> None:
    pool.run(4, two_dimensions)


@spmd.on_mesh()
def refused(mesh: Any) -> list[str]:
    found = []
    for method, shape in (("exchange", (4, 4, 6, 6, True, None)), ("ring", (3, 3, 6, 6, False, (1, 1)))):
        with CommDebugMode() as comm, pytest.raises(ValueError, match="over a sequence|in a ring") as error:
            check(mesh, method, shape, "float64")
        assert comm.get_total_counts() == 0
        found.append(str(error.value))
    return found


def test_a_method_that_is_not_possible(pool: Any) -> None:
    for exchange, ring in pool.run(3, refused):
        assert "4 heads of the queries and 4 of the keys over 3 ranks" in exchange
        assert "is_causal=True" in ring
