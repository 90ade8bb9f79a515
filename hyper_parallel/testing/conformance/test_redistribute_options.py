"""Asynchronous redistribution, in other dtypes, and to another mesh of the same ranks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    CommDebugMode,
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    compute_local_shape_and_global_offset,
    get_platform,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.platform.contract.collectives import CollectiveRole
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import local_parts, same
from hyper_parallel.testing.extent import on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def value_and_gradient(mesh: Any, source: tuple, shape: tuple[int, ...], change: Any) -> tuple:
    """Apply ``change`` to a tensor placed ``source``.

    Return the full result, the gradient of the local tensor, and the collectives in forward.
    """
    adapter, rng = get_adapter(), np.random.default_rng(0)
    x, weights = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    if source[0] in (Partial("max"), Partial("avg")):
        mine = x + (0.1 * mesh.get_local_rank() * np.sign(rng.standard_normal(shape))).astype(np.float32)
    else:
        mine = local_parts(x, get_layout(mesh, source, shape), rng)
    counts: dict[str, int] = {}

    def loss(local: Any) -> Any:
        with CommDebugMode() as comm:
            y = change(DTensor.from_local(local, mesh, source, shape=shape))
        counts.update(comm.get_comm_counts())
        layout = get_layout(y.device_mesh, y.placements, shape).cotangent
        local = y.to_local()
        cotangent = adapter.tensor(weights[layout.local_index()])
        return adapter.weighted_sum(get_platform().to_dtype(local, cotangent.dtype), cotangent), y

    y, (grad,) = adapter.value_and_grads(loss, [mine])
    return y, adapter.numpy(get_platform().to_dtype(y.full_tensor(), adapter.tensor(x).dtype)), grad, counts


class _Late:
    """A collective that runs when it is waited for."""

    def __init__(self, start: Any) -> None:
        self.start, self.waits = start, 0

    def wait(self) -> None:
        self.waits += 1
        self.start()


@spmd.on_mesh()
def under_way(mesh: Any, shape: tuple[int, ...]) -> None:
    """Check that values, gradients and collectives are the same as for a synchronous call.

    No rank waits before it uses the result.
    """
    platform = mesh.platform
    start, works = platform.start_collective, []
    starts_any = type(platform).start_collective is not CollectiveRole.start_collective

    def start_late(*args: Any) -> Any:
        works.append(_Late(lambda: start(*args).wait()))
        return works[-1]

    for source, target in itertools.product([R, P, Partial("avg"), S0, S1, Partial("max")], [R, S0, S1]):
        now = value_and_gradient(mesh, (source,), shape, lambda x, to=target: x.redistribute(placements=[to]))
        platform.start_collective = start_late if starts_any else start
        works.clear()
        waits: list[int] = []

        def change(x: Any, to: Any = target, waits: list[int] = waits) -> Any:
            y = x.redistribute(placements=[to], async_op=True)
            waits.append(sum(work.waits for work in works))
            return y

        try:
            later = value_and_gradient(mesh, (source,), shape, change)
        finally:
            del platform.start_collective
        assert later[0].placements == now[0].placements == (target,)
        same(later[1], now[1], f"{source} -> {target}")
        same(later[2], now[2], f"gradient of {source} -> {target}")
        assert later[3] == now[3]
        starts = mesh.size() > 1 and source is not target and (source is P or source is Partial("avg") or target is R)
        starts = starts and source not in (R, Partial("max"))
        uneven = {d for d in (0, 1) if shape[d] % mesh.size()}
        cut = [p.dim for p in (source, target) if isinstance(p, Shard)]
        kind = "all_gather" if isinstance(source, Shard) else "all_reduce" if target is R else "reduce_scatter"
        op = source.reduce_op if isinstance(source, Partial) else ""
        starts = starts and starts_any and platform.supports(kind, op, later[0].to_local())
        expected = int(starts and not uneven.intersection(cut))
        if not any(n == 0 for n in later[0].to_local().shape):
            seen = waits[0], len(works), sum(work.waits for work in works)
            assert seen == (0, expected, expected), (source, target, seen)
    adapter, ones = get_adapter(), np.ones(shape, np.float32)
    platform.start_collective = start_late if starts_any else start
    try:
        x = DTensor.from_local(adapter.tensor(ones), mesh, [P])
        copied = copy.deepcopy(x.redistribute(placements=[R], async_op=True))
    finally:
        del platform.start_collective
    same(adapter.numpy(copied.full_tensor()), ones * mesh.size(), "copy of a pending result")


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("shape", [(6, 12), (5, 7), (1, 6)], ids=str)
def test_waits_on_first_use(pool: Any, world_size: int, shape: tuple[int, ...]) -> None:
    pool.run(world_size, under_way, shape)


@spmd.on_mesh()
def in_other_dtypes(mesh: Any) -> None:
    adapter = get_adapter()
    half, single = (adapter.tensor(np.zeros(1, dtype)).dtype for dtype in (np.float16, np.float32))
    for source, target in itertools.product([R, P, S0, Partial("max")], [R, S0, S1]):
        exact = value_and_gradient(mesh, (source,), (5, 6), lambda x, to=target: x.redistribute(placements=[to]))
        for forward, backward in ((half, None), (None, half), (half, half), (half, single)):
            seen: list[Any] = []

            def change(x: Any, to: Any = target, f: Any = forward, b: Any = backward, seen: list = seen) -> Any:
                with CommDebugMode() as comm:
                    y = x.redistribute(placements=[to], forward_dtype=f, backward_dtype=b)
                seen.extend(event.dtype for event in comm.events)
                return y

            with CommDebugMode() as comm:
                rounded = value_and_gradient(mesh, (source,), (5, 6), change)
            back = [e.dtype for e in comm.events if e.direction == "backward"]
            wanted = single if forward is None else forward
            assert rounded[0].dtype == wanted and set(seen) <= {wanted}
            if source is not Partial("max"):  # whose backward depends on the values
                assert set(back) <= {single if backward is None else backward}, (source, target, back)
            assert rounded[3] == exact[3]
            np.testing.assert_allclose(rounded[1], exact[1], rtol=4e-3, atol=4e-3)
            np.testing.assert_allclose(rounded[2], exact[2], rtol=4e-3, atol=4e-3)


@on_ranks(1, 2)
def test_other_dtypes(pool: Any, world_size: int) -> None:
    pool.run(world_size, in_other_dtypes)


def to_another_mesh(shape: tuple[int, ...]) -> None:
    row, square = spmd.device_mesh(4), spmd.device_mesh(2, 2)
    crossed = DeviceMesh(None, [[0, 2], [1, 3]])
    on_row, on_square = [(R,), (P,), (S0,), (S1,)], [(R, R), (S0, S0), (S0, S1), (R, S0), (P, S1)]
    pairs = [(row, square, on_row, on_square), (square, row, on_square, on_row)]
    for here, there, sources, targets in [*pairs, (square, crossed, on_square, on_square)]:
        for source, target in itertools.product(sources, targets):
            if P in target:
                continue
            _, value, grad, counts = value_and_gradient(
                here, source, shape, lambda x, m=there, to=target: x.redistribute(m, to)
            )
            _, expected, wanted, _ = value_and_gradient(here, source, shape, lambda x: x)
            same(value, expected, f"{source} on {here} -> {target} on {there}")
            same(grad, wanted, f"gradient of {source} on {here} -> {target} on {there}")
            if (source, target) in (((S0,), (S0, S0)), ((S0, S0), (S0,))) and shape == (8, 4) and there is not crossed:
                assert counts == {}
    x = DTensor.from_local(get_adapter().tensor(np.ones((2, 2), np.float32)), row, [S0])
    for call, words in (
        (lambda: x.redistribute(spmd.device_mesh(2) or DeviceMesh(None, [0, 1]), [R]), "has different ranks"),
        (lambda: x.redistribute(square, [P, R]), "cannot make partial tensors"),
        (lambda: x.redistribute(square, [R, R], async_op=True), "does not support async_op"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("shape", [(8, 4), (5, 7)], ids=str)
def test_another_mesh(pool: Any, shape: tuple[int, ...]) -> None:
    pool.run(4, to_another_mesh, shape)


@spmd.on_mesh()
def parts(mesh: Any) -> Any:
    x = DTensor.from_local(get_adapter().tensor(np.ones((2, 3), np.float32)), mesh, [S0])
    mine = x._local_tensor
    assert not isinstance(mine, DTensor) and tuple(mine.shape) == (2, 3)
    with pytest.raises(AttributeError):
        x._local_tensor = mine
    assert compute_local_shape_and_global_offset((5, 3), mesh, [S0], skip_offset=True)[1] == ()
    return compute_local_shape_and_global_offset((5, 3), mesh, [S0])


def test_parts(pool: Any) -> None:
    assert pool.run(4, parts) == [((2, 3), (0, 0)), ((2, 3), (2, 0)), ((1, 3), (4, 0)), ((0, 3), (5, 0))]
