"""Operations without a sharding rule, rules that users add, `strict` and `implicit_replication`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    OpSharding,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    register_sharding,
    strict,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.modes import is_implicit_replication, is_strict
from hyper_parallel.core.operations import custom_ops, fallback
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats, local_parts, same
from hyper_parallel.testing.extent import on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Collect the warnings of the logger ``hyper_parallel`` inside this context."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, log = Handler(logging.WARNING), logging.getLogger("hyper_parallel")
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


def check(mesh: Any, operation: Callable[[Any], Any], whole: np.ndarray, placement: Any, result: Any) -> dict[str, int]:
    """Check value, gradient and placement of a unary operation; return its collectives in forward."""
    adapter = get_adapter()
    weights = floats(*whole.shape)[::-1].copy()
    counts: dict[str, int] = {}

    def reference(x: Any) -> Any:
        y = operation(x)
        return adapter.weighted_sum(y, adapter.tensor(weights)), y

    def sharded(x: Any) -> Any:
        x = DTensor.from_local(x, mesh, [placement], shape=whole.shape)
        with CommDebugMode() as comm:
            y = operation(x)
        counts.update(comm.get_comm_counts())
        assert y.placements == (result,)
        return adapter.weighted_sum(y, DTensor.from_local(adapter.tensor(weights), mesh)).full_tensor(), y

    wanted, (wanted_grad,) = adapter.value_and_grads(reference, [whole])
    layout = get_layout(mesh, (placement,), whole.shape)
    got, (grad,) = adapter.value_and_grads(sharded, [local_parts(whole, layout, np.random.default_rng(1))])
    same(adapter.numpy(got), adapter.numpy(wanted), f"value for {placement}", 1e-4)
    same(grad, wanted_grad[layout.cotangent.local_index()], f"gradient for {placement}", 1e-4)
    return counts


# ---------------------------------------------------------------------- operations without a rule


@spmd.on_mesh()
def without_a_rule(mesh: Any) -> None:
    adapter, many = get_adapter(), mesh.size() > 1
    whole = floats(5, 5) * 0.3 + 2 * np.eye(5, dtype=np.float32)
    fallback._WARNED.clear()
    with warnings_logged() as messages:
        assert check(mesh, adapter.unruled, whole, R, R) == {}
        assert messages == []  # nothing was gathered
        for placement, collective in ((S0, "all_gather"), (S1, "all_gather"), (P, "all_reduce")):
            assert check(mesh, adapter.unruled, whole, placement, R) == ({collective: 1} if many else {})
    assert len(messages) == 1, messages
    assert "no sharding rule" in messages[0]
    x = distribute_tensor(adapter.tensor(whole), mesh, [S0])
    replicated = x.redistribute(placements=[R])
    with strict():
        assert is_strict()
        with CommDebugMode() as comm, pytest.raises(ValueError, match=r"strict\(\) is on.*register_sharding"):
            adapter.unruled(x)
        assert comm.get_total_counts() == 0
        same(adapter.numpy(adapter.unruled(replicated)), np.linalg.inv(whole), "replicated under strict()", 1e-4)
    assert not is_strict()
    same(adapter.numpy(adapter.unruled(x)), np.linalg.inv(whole), "after strict()", 1e-4)
    with pytest.raises(ZeroDivisionError), strict():
        raise ZeroDivisionError
    assert not is_strict()


@on_ranks(1, 2, 3, 4)
def test_operation_without_a_rule(pool: Any, world_size: int) -> None:
    pool.run(world_size, without_a_rule)


@spmd.on_mesh()
def in_place_without_a_rule(mesh: Any) -> None:
    """Check that the backend writes a result back into the shards, or raises an error with a remedy."""
    adapter = get_adapter()
    whole = floats(4, 3) + 1
    x = distribute_tensor(adapter.tensor(whole), mesh, [S0])
    with pytest.raises((ValueError, TypeError)), strict():
        adapter.unruled_in_place(x)
    same(adapter.numpy(x), whole, "after the error")
    wanted = adapter.unruled_in_place(adapter.tensor(whole) * 1.0) if adapter.WRITES_BACK else None
    if adapter.WRITES_BACK:
        adapter.unruled_in_place(x)
        assert x.placements == (S0,)
        same(adapter.numpy(x), adapter.numpy(wanted), "written back")
    else:
        with pytest.raises(ValueError, match="writes in place and has no sharding rule"):
            adapter.unruled_in_place(x)
        same(adapter.numpy(x), whole, "after the error")


@on_ranks(1, 2, 3, 4)
def test_operation_that_writes_and_has_no_rule(pool: Any, world_size: int) -> None:
    pool.run(world_size, in_place_without_a_rule)


# ---------------------------------------------------------------------- register_sharding


@spmd.on_mesh()
def with_a_rule_of_ones_own(mesh: Any) -> None:
    adapter, many = get_adapter(), mesh.size() > 1
    whole = np.abs(floats(5, 7)) + 0.5
    counted: list[tuple] = []

    def rule(shapes: tuple, static_args: tuple) -> OpSharding:
        counted.append(tuple(shapes))
        labels = tuple(range(len(shapes[0])))
        return OpSharding(operands=(labels,), results=(labels,), result_shapes=(tuple(shapes[0]),))

    assert check(mesh, adapter.custom, whole, S0, R) == ({"all_gather": 1} if many else {})
    register_sharding(adapter.CUSTOM, rule)
    try:
        with strict():
            for placement in (R, S0, S1):
                assert check(mesh, adapter.custom, whole, placement, placement) == {}
            assert check(mesh, adapter.custom, whole, P, R) == ({"all_reduce": 1} if many else {})
        assert counted
        assert set(counted) == {((5, 7),)}
        with pytest.raises(ValueError, match="has a sharding rule already"):
            register_sharding(adapter.CUSTOM, rule)
    finally:
        custom_ops._CUSTOM.clear()
    assert check(mesh, adapter.custom, whole, S0, R) == ({"all_gather": 1} if many else {})


@on_ranks(1, 2, 3, 4)
def test_register_sharding(pool: Any, world_size: int) -> None:
    pool.run(world_size, with_a_rule_of_ones_own)


# ---------------------------------------------------------------------- implicit_replication


def mixing(adapter: Any, x: Any, weight: Any, bias: Any, scale: Any) -> Any:
    """Check three operations with two operands, of which all but the first are plain."""
    return scale * adapter.tanh(adapter.linear(x, weight) + bias)


def run_mixed(mesh_shape: tuple[int, ...], rows: int) -> None:
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return
    adapter = get_adapter()
    arrays = [floats(rows, 6), floats(7, 6), floats(7), floats(7) + 2]

    def reference(*xs: Any) -> Any:
        y = mixing(adapter, *xs)
        return adapter.sum(adapter.square(y)), y

    wanted, wanted_grads = adapter.value_and_grads(reference, arrays)
    placements_of_x = [(S0,), (S1,), (R,), (P,)] if mesh.ndim == 1 else [(S0, R), (S0, S0), (S0, S1), (P, S0)]
    for placements in placements_of_x:
        layout = get_layout(mesh, placements, arrays[0].shape)

        def sharded(x: Any, *plain: Any, placements: Any = placements) -> Any:
            x = DTensor.from_local(x, mesh, placements, shape=arrays[0].shape)
            with implicit_replication():
                y = mixing(adapter, x, *plain)
            return adapter.sum(adapter.square(y)).full_tensor(), y

        mine = local_parts(arrays[0], layout, np.random.default_rng(1))
        got, grads = adapter.value_and_grads(sharded, [mine, *arrays[1:]])
        same(adapter.numpy(got), adapter.numpy(wanted), f"value for {placements}")
        same(grads[0], wanted_grads[0][layout.cotangent.local_index()], f"gradient of x for {placements}")
        for name, grad, whole in zip(("weight", "bias", "scale"), grads[1:], wanted_grads[1:], strict=True):
            same(grad, whole, f"gradient of the plain {name} for {placements}")


@pytest.mark.parametrize("rows", [12, 5])
@pytest.mark.parametrize("mesh", [(1,), (2,), (3,), (4,), (2, 2)], ids=str)
def test_implicit_replication(pool: Any, mesh: tuple[int, ...], rows: int) -> None:
    pool.run(int(np.prod(mesh)), run_mixed, mesh, rows)


@spmd.on_mesh()
def scopes(mesh: Any) -> None:
    adapter = get_adapter()
    x = distribute_tensor(adapter.tensor(floats(4, 3)), mesh, [S0])
    plain = adapter.tensor(floats(4, 3))

    def refused() -> None:
        assert not is_implicit_replication()
        with pytest.raises(ValueError, match="implicit_replication"):
            x + plain

    refused()
    with implicit_replication():
        with implicit_replication():
            inner = x + plain
        outer = x + plain  # leaving the inner one does not end the outer one
    same(adapter.numpy(inner), 2 * floats(4, 3), "in the inner one")
    same(adapter.numpy(outer), 2 * floats(4, 3), "in the outer one")
    assert outer.placements == (S0,)
    refused()  # though a plan for this call is known now
    with pytest.raises(ZeroDivisionError), implicit_replication():
        raise ZeroDivisionError
    refused()
    with implicit_replication():
        with pytest.raises(ZeroDivisionError), implicit_replication():
            raise ZeroDivisionError
        same(adapter.numpy(x + plain), 2 * floats(4, 3), "after an exception inside")
        square = adapter.tensor(np.eye(4, dtype=np.float32))
        same(adapter.numpy(adapter.matmul(square, x)), floats(4, 3), "plain operand first")
    refused()


@on_ranks(1, 2, 3, 4)
def test_scope_of_implicit_replication(pool: Any, world_size: int) -> None:
    pool.run(world_size, scopes)
