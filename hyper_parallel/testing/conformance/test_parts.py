"""Shards of unequal size in `local_map` and `DTensor.from_local`, and partial gradients that are not reduced."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    PackedShard,
    Partial,
    RankMismatchError,
    Replicate,
    Shard,
    StridedShard,
    parallelize_module,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.experimental import local_map
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, same
from hyper_parallel.testing.extent import everything, on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
#: Sizes of a dimension that is cut: parts that are equal, unequal and empty.
SIZES = (4, 5, 1, 0) if everything() else (5, 1)


def _compare_mapped(mesh: Any, shape: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    """Check a function with two results: the square of its shard, and twice the transpose."""
    adapter, x, weights = get_adapter(), floats(*shape), floats(*shape)
    layout = get_layout(mesh, placements, shape)
    turned = tuple(p.with_dim(1 - p.dim) if isinstance(p, Shard) else p for p in placements)

    @local_map(out_placements=(placements, turned, None), in_placements=(placements,))
    def both(a: Any) -> Any:
        return a * a, adapter.transpose(a, 0, 1) * 2.0, str(tuple(a.shape))

    def loss(a: Any) -> tuple[Any, Any]:
        y, z, local_shape = both(DTensor._of_part(a, layout))
        assert local_shape == str(tuple(layout.local_shape))
        assert (tuple(y.shape), y.placements) == (shape, placements)
        assert (tuple(z.shape), z.placements) == (shape[::-1], turned)
        total = y * DTensor.from_local(adapter.tensor(weights), mesh) + adapter.transpose(z, 0, 1)
        return total.sum().full_tensor(), (y.full_tensor(), z.full_tensor())

    (y, z), (grad,) = adapter.value_and_grads(loss, [x[layout.local_index()]])
    what = f"of {shape} placed {list(placements)}"
    same(adapter.numpy(y), x * x, f"square {what}", 1e-5)
    same(adapter.numpy(z), 2 * x.T, f"transposed {what}", 1e-5)
    same(grad, (2 * weights * x + 2)[layout.local_index()], f"gradient {what}", 1e-5)


@spmd.on_mesh()
def mapped_in_a_row(mesh: Any) -> None:
    for size in SIZES:
        for placement in (S0, S1):
            _compare_mapped(mesh, (size, 4) if placement is S0 else (4, size), (placement,))
    _compare_mapped(mesh, (9, 2), (PackedShard(0, (5, 4)),))


@spmd.on_mesh(2, 2)
def mapped_on_a_grid(mesh: Any) -> None:
    kinds = (R, S0, S1, StridedShard(0, 2)) if everything() else (S0, S1)
    for placements in itertools.product(kinds, kinds[:3]):
        if any(isinstance(p, StridedShard) for p in placements) and placements[1] is not S0:
            continue
        for size in SIZES:
            _compare_mapped(mesh, (size, 3), placements)


@on_ranks(1, 2, 3, 4)
def test_uneven_local_map(pool: Any, world_size: int) -> None:
    """Check that the global shape follows from the results of all ranks, and that gradients equal the single
    device's."""
    pool.run(world_size, mapped_in_a_row)
    if world_size >= 3:
        pool.run(4, mapped_on_a_grid)


@spmd.on_mesh()
def wrong_results(mesh: Any) -> list[str]:
    """Check results that do not form one tensor: every rank raises, and the ranks continue."""
    adapter, rank = get_adapter(), mesh.get_local_rank()
    x = DTensor.from_local(adapter.tensor(floats(2, 2)), mesh, [S0])

    def part(*shape: int) -> Any:
        return adapter.tensor(np.ones(shape, np.float32))

    results = {
        "the last rank has most": lambda a: part(1 + (rank == 2), 2),
        "a gap": lambda a: part(0 if rank == 1 else 2, 2),
        "another size elsewhere": lambda a: part(2, 2 + (rank == 1)),
        "dimensions": lambda a: part(2, 2) if rank else part(2, 2, 2),
        "no tensor": lambda a: part(2, 2) if rank else None,
        "too many": lambda a: part(2, 2) if rank else (part(2, 2), part(2, 2)),
        "no tensor on another rank": lambda a: None if rank == 1 else part(2, 2),
    }
    found = []
    for name, function in results.items():
        with pytest.raises((ValueError, TypeError)) as error:
            local_map(function, [S0])(x)
        found.append(f"{name}: {type(error.value).__name__} {error.value}")
    same(adapter.numpy(local_map(lambda a: a, [S0])(x)), np.tile(floats(2, 2), (3, 1)), "after errors", 0.0)
    return found


def test_wrong_results_of_local_map(pool: Any) -> None:
    first, *others = pool.run(3, wrong_results)
    assert first[:4] == others[0][:4] == others[1][:4]
    for text in first[:4]:
        assert "RankMismatchError result 0 of local_map(" in text
        assert "Pass shards with the sizes that distribute_tensor gives" in text
    assert "of shape (4, 2), where rank 0 has (2, 2) (rank 0: (1, 2); rank 1: (1, 2); rank 2: (2, 2))" in first[0]
    assert "TypeError" in first[4] and "ValueError" in first[5]
    assert "is wrong on rank 1: see the error of that rank" in first[6] and "TypeError" in others[0][6]
    for texts in others:
        for text in texts[4:6]:
            assert "RankMismatchError result 0 of local_map(" in text
            assert "is wrong on rank 0: see the error of that rank" in text


@spmd.on_mesh()
def wrong_parts(mesh: Any) -> list[str]:
    """Check a shard that does not fit on some ranks: all ranks raise, and continue."""
    adapter, rank = get_adapter(), mesh.get_local_rank()
    given: dict[str, tuple[tuple[int, ...], Any, tuple[int, ...]]] = {
        "a wrong part": ((2, 2 + rank), S1, (2, 7)),
        "another whole": ((2, 2), S1, (2, 6 + (rank == 0))),
        "other placements": ((2, 2), R if rank == 2 else S0, (2, 2) if rank == 2 else (6, 2)),
        "not whole": ((2 + rank, 2), R, (2, 2)),
        "all wrong": ((3, 3), S0, (4, 3)),
    }
    found = []
    for name, (part, placement, shape) in given.items():
        with pytest.raises(RankMismatchError) as error:
            DTensor.from_local(adapter.tensor(np.ones(part, np.float32)), mesh, [placement], shape=shape)
        found.append(f"{name}: {error.value}")
    with pytest.raises(ValueError, match=r"placed \[Shard\(dim=0\)\] on .* has local shape \(.*, 2\) on rank"):
        DTensor._of_part(adapter.tensor(np.ones((5, 2), np.float32)), get_layout(mesh, (S0,), (5, 2)))
    part = floats(5, 2)[get_layout(mesh, (S0,), (5, 2)).local_index()]
    whole = DTensor.from_local(adapter.tensor(part), mesh, [S0], shape=(5, 2))
    same(adapter.numpy(whole), floats(5, 2), "after errors", 0.0)
    return found


def test_wrong_parts(pool: Any) -> None:
    first, *others = pool.run(3, wrong_parts)
    assert others == [first, first]
    assert "differ in the problem found" in first[0] and "got (2, 4)" in first[0]
    assert "the global shape" in first[1] and "(2, 7)" in first[1]


# ---------------------------------------------------------------------- gradients left as summands
def _consumers(mesh: Any, placements: tuple[Any, ...]) -> dict[str, Any]:
    """Return functions of a full matrix, plain or distributed, with different placements of their gradients."""
    adapter = get_adapter()
    w = floats(4, 6)

    def other(layout: tuple[Any, ...]) -> Any:
        of = get_layout(mesh, layout, w.shape)
        return DTensor.from_local(adapter.tensor(w[of.local_index()]), mesh, layout, shape=w.shape)

    return {
        "parts": lambda x, on: adapter.matmul(x, other(placements) if on else adapter.tensor(w)),
        "whole": lambda x, on: adapter.matmul(x, other((R,) * mesh.ndim) if on else adapter.tensor(w)),
        "slice": lambda x, on: x.redistribute(placements=placements) * 3.0 if on else x * 3.0,
        "itself": lambda x, on: x * 1.0,
    }


def _compare_summands(mesh: Any, summed: tuple[Any, ...], placements: tuple[Any, ...], names: tuple[str, ...]) -> None:
    adapter, x = get_adapter(), floats(3, 4)
    consumers = [_consumers(mesh, placements)[name] for name in names]

    def loss(a: Any, on: bool) -> tuple[Any, Any]:
        given = DTensor.from_local(a, mesh, (R,) * mesh.ndim, grad_placements=summed) if on else a
        total = 0.0
        for i, consumer in enumerate(consumers):
            y = consumer(given, on)
            part = adapter.square(y).sum() * float(1 + i)
            total = total + (part.full_tensor() if on else part)
        return total, a

    _, (wanted,) = adapter.value_and_grads(lambda a: loss(a, False), [x])
    with CommDebugMode() as forward:
        loss(adapter.tensor(x), True)
    with CommDebugMode() as both:
        _, (grad,) = adapter.value_and_grads(lambda a: loss(a, True), [x])
    if all(p is P for p in summed):
        assert both.get_comm_counts() == forward.get_comm_counts(), (names, placements, both.get_comm_counts())
    for mesh_dim, p in enumerate(summed):
        if p is P:
            grad = adapter.numpy(mesh_sum(mesh, mesh_dim, grad))
    same(grad, wanted, f"sum of the gradients of {names}, placed {placements}, left as {summed}", 1e-4)


def mesh_sum(mesh: Any, mesh_dim: int, summand: np.ndarray) -> Any:
    placements = [P if d == mesh_dim else R for d in range(mesh.ndim)]
    return DTensor.from_local(get_adapter().tensor(summand), mesh, placements).full_tensor()


@spmd.on_mesh()
def summands_in_a_row(mesh: Any) -> None:
    kinds = ("parts", "whole", "slice", "itself")
    for names in [(k,) for k in kinds] + [kinds, ("parts", "parts")]:
        for placement in (S0, S1) if everything() else (S1,):
            _compare_summands(mesh, (P,), (placement,), names)


@spmd.on_mesh(2, 2)
def summands_on_a_grid(mesh: Any) -> None:
    for summed in ((P, P), (P, R), (R, P)):
        for placements in ((S0, S1), (S1, R), (R, S1), (S1, S1)):
            if everything() or placements == (S0, S1):
                _compare_summands(mesh, summed, placements, ("parts", "whole", "slice"))


@on_ranks(1, 3)
def test_gradients_left_as_summands(pool: Any, world_size: int) -> None:
    """Check ``grad_placements=[Partial()]``: each rank keeps its partial gradient, and backward does not
    communicate."""
    pool.run(world_size, summands_in_a_row)
    if world_size == 3:
        pool.run(4, summands_on_a_grid)


@spmd.on_mesh()
def summands_of_a_style(mesh: Any) -> tuple[np.ndarray, dict[str, int]]:
    """Check a column-parallel layer whose input has ``grad_placements=[Partial()]``, also on its fast path.

    Each rank keeps the partial gradient from its own output features.
    """
    adapter, x = get_adapter(), floats(3, 4)
    layer = adapter.load(adapter.linear_module(4, 6), np.random.default_rng(1))
    parallelize_module(layer, mesh, ColwiseParallel())

    def loss(a: Any) -> tuple[Any, Any]:
        y = adapter.call(layer, DTensor.from_local(a, mesh, [R], grad_placements=[P]))
        return adapter.square(y).sum(), a

    found = []
    for _ in range(2):
        with CommDebugMode() as comm:
            _, (grad,) = adapter.value_and_grads(loss, [x])
        found.append(grad)
    same(found[0], found[1], "the second call", 0.0)
    single = adapter.load(adapter.linear_module(4, 6), np.random.default_rng(1))

    def alone(a: Any) -> tuple[Any, Any]:
        return adapter.square(adapter.call(single, a)).sum(), a

    _, (wanted,) = adapter.value_and_grads(alone, [x])
    same(adapter.numpy(mesh_sum(mesh, 0, found[1])), wanted, "sum of the gradients", 1e-4)
    assert np.abs(found[1] - wanted).max() > 0.01
    return grad, comm.get_comm_counts()


def test_a_style_leaves_summands(pool: Any) -> None:
    for _, counts in pool.run(2, summands_of_a_style):
        assert counts == {}
