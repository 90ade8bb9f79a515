"""Largest and smallest elements: NaN on one rank, and ties within ranks and between them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.extent import in_gate, on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
NAN = np.float32("nan")
MESHES = [(1,), (2,), (3,), (4,), (2, 2)]
#: Those of the gate.
GATE = [(3,), (2, 2)]
SIGN = {"max": 1, "min": -1}


def whole() -> np.ndarray:
    """Return an array with many ties, because it has few different values."""
    x = np.random.default_rng(5).integers(0, 4, (10, 8)).astype(np.float32)
    x[:, 2] = 7  # all tie
    x[:, 3] = np.arange(10)  # none does
    return x


def extremes(adapter: Any, op: str) -> list[tuple[str, Any, Any]]:
    """Return the calls: name, function, axis."""
    along, every = (adapter.amax, adapter.max) if op == "max" else (adapter.amin, adapter.min)
    return [("rows", lambda x: along(x, 0), 0), ("columns", lambda x: along(x, 1), 1), ("all", every, None)]


def norms(adapter: Any, op: str) -> list[tuple[str, Any, Any]]:
    """Return norms of infinite order as calls, which have the values and gradients of the extremes of `whole`."""
    return [
        (f"norm along {axis}", lambda x, axis=axis: adapter.max_norm(x, axis) * SIGN[op], axis) for axis in (0, 1, None)
    ]


def shared(x: np.ndarray, axis: int | None, op: str) -> np.ndarray:
    """Return each element's part of the gradient: all tied elements get equal parts."""
    chosen = x == getattr(np, op)(x, axis=axis, keepdims=True)
    return (chosen / chosen.sum(axis=axis, keepdims=True)).astype(np.float32)


def run_ties(mesh_shape: tuple[int, ...], op: str) -> None:
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter, x = get_adapter(), whole() * SIGN[op]
    weights = np.arange(1, 11, dtype=np.float32)
    for placements in itertools.product((R, S0, S1), repeat=len(mesh_shape)):
        layout = get_layout(mesh, placements, x.shape)
        mine = np.ascontiguousarray(x[layout.local_index()])
        for name, function, axis in (*extremes(adapter, op), *norms(adapter, op)):
            value = getattr(np, op)(x, axis=axis)
            w = weights[: value.size].reshape(value.shape)

            def loss(x: Any, placements: Any = placements, function: Any = function, w: Any = w) -> Any:
                y = function(DTensor.from_local(x, mesh, placements, shape=(10, 8)))
                return adapter.weighted_sum(y, DTensor.from_local(adapter.tensor(w), mesh)).full_tensor(), y

            y, (grad,) = adapter.value_and_grads(loss, [mine])
            same(adapter.numpy(y), value, f"{op} of {name}, {placements}", 0.0)
            wanted = shared(x, axis, op) * (w if axis is None else np.expand_dims(w, axis))
            same(grad, wanted[layout.local_index()], f"gradient of {op} of {name}, {placements}")


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("mesh", in_gate(MESHES, GATE), ids=str)
def test_ties_share_the_gradient(pool: Any, mesh: tuple[int, ...], op: str) -> None:
    pool.run(int(np.prod(mesh)), run_ties, mesh, op)


def run_nan(mesh_shape: tuple[int, ...], op: str, dtype: str) -> None:
    """Check NaN at the end and in the middle, which not every kernel propagates."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter = get_adapter()
    for place, placements in itertools.product(
        ((9, 7), (4, 3)), itertools.product((R, S0, S1), repeat=len(mesh_shape))
    ):
        x = whole()
        x[place] = NAN
        x[6, 6] = np.inf * -SIGN[op]
        x[:, 5] = np.inf * -SIGN[op]  # the stand-in for "no number" must not be taken for a number
        x = x.astype(dtype)
        layout = get_layout(mesh, placements, x.shape)
        mine = np.ascontiguousarray(x[layout.local_index()])
        for name, function, axis in extremes(adapter, op):
            compared = any(mesh.shape[d] > 1 for d, p in enumerate(placements) if p in _reduced(axis))
            numbers = [getattr(np, op)(x, axis=axis)]
            if not compared:  # the result of the framework on one device
                numbers = [adapter.numpy(function(adapter.tensor(x)))]
            with CommDebugMode() as comm:
                y = function(DTensor.from_local(adapter.tensor(mine), mesh, placements, shape=(10, 8))).full_tensor()
            np.testing.assert_array_equal(adapter.numpy(y), numbers[0], f"{op} of {name}, NaN at {place}, {placements}")
            assert comm.get_total_counts() <= 2 * mesh.ndim, placements


def _reduced(axis: int | None) -> tuple[Any, ...]:
    return (S0, S1) if axis is None else (S0, S1)[axis : axis + 1]


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("mesh", in_gate(MESHES, GATE), ids=str)
def test_nan_is_kept(pool: Any, mesh: tuple[int, ...], op: str) -> None:
    pool.run(int(np.prod(mesh)), run_nan, mesh, op, "float32")


@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_is_kept_in_half_precision(pool: Any, op: str) -> None:
    pool.run(2, run_nan, (2,), op, "float16")


@spmd.on_mesh()
def partial_values(mesh: Any, op: str, dtype: str) -> None:
    """Check partial values with NaN on each rank in turn, and on two ranks."""
    adapter, size, rank = get_adapter(), mesh.size(), mesh.get_local_rank()
    worst = -np.inf * SIGN[op]
    for bad in [{i} for i in range(size)] + [{0, size - 1}]:
        parts = np.random.default_rng(1).standard_normal((size, 2, 3)).astype(dtype)
        parts[:, 1] = worst
        for i in bad:
            parts[i, :, 1] = NAN
        wanted = getattr(np, op)(parts, axis=0)
        assert np.isnan(wanted).sum() == 2
        assert np.isinf(wanted).sum() == 2
        weights = np.arange(1, 7, dtype=np.float32).reshape(2, 3)

        def loss(x: Any, weights: Any = weights) -> Any:
            with CommDebugMode() as comm:
                y = DTensor.from_local(x, mesh, [Partial(op)]).redistribute(placements=[R])
            assert comm.get_total_counts() == (2 if size > 1 else 0)
            return adapter.weighted_sum(y, DTensor.from_local(adapter.tensor(weights), mesh)).full_tensor(), y

        if dtype != "float32":
            y = DTensor.from_local(adapter.tensor(parts[rank]), mesh, [Partial(op)]).full_tensor()
            np.testing.assert_array_equal(adapter.numpy(y), wanted)
            continue
        y, (grad,) = adapter.value_and_grads(loss, [parts[rank]])
        np.testing.assert_array_equal(adapter.numpy(y), wanted)
        chosen = (parts == wanted) | (np.isnan(parts) & np.isnan(wanted))
        np.testing.assert_allclose(grad, (chosen / chosen.sum(0))[rank] * weights, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("op", ["max", "min"])
@on_ranks(1, 2, 3, 4)
def test_nan_among_partial_values(pool: Any, world_size: int, op: str, dtype: str) -> None:
    pool.run(world_size, partial_values, op, dtype)


def run_places(mesh_shape: tuple[int, ...]) -> None:
    """Check values with indices, and indices alone, against the framework on one device."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter = get_adapter()
    for place, placements in itertools.product((None, (4, 3)), itertools.product((R, S0, S1), repeat=len(mesh_shape))):
        x = whole()
        if place is not None:
            x[place] = NAN
        layout = get_layout(mesh, placements, x.shape)
        mine = np.ascontiguousarray(x[layout.local_index()])
        for name, function in adapter.EXTREMES_WITH_PLACES.items():
            for axis in (0, 1):
                wanted = function(adapter.tensor(x), axis)
                got = function(DTensor.from_local(adapter.tensor(mine), mesh, placements, shape=(10, 8)), axis)
                wanted, got = (y if isinstance(y, (tuple, list)) else (y,) for y in (wanted, got))
                assert len(got) == len(wanted)
                for a, b in zip(got, wanted, strict=True):
                    what = f"{name} along {axis} of {placements}, NaN at {place}"
                    np.testing.assert_array_equal(adapter.numpy(a), adapter.numpy(b), what)


@pytest.mark.parametrize("mesh", in_gate(MESHES, GATE), ids=str)
def test_values_with_their_places(pool: Any, mesh: tuple[int, ...]) -> None:
    pool.run(int(np.prod(mesh)), run_places, mesh)
