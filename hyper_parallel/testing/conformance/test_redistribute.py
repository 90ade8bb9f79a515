"""Every transition on 1-D and 2-D meshes, with even and uneven shards: values, gradients, collectives."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, DTensor, PackedShard, Partial, Replicate, Shard
from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.redistribute import redistribution_cost, redistribution_steps
from hyper_parallel.core.communication.shard_steps import Gather
from hyper_parallel.core.communication.transitions import one_summand
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.platform.contract.programs import STEPS
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import local_parts, same
from hyper_parallel.testing.extent import on_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)

# Collectives of (forward, backward) on a 1-D mesh: those of hand-written code.
EXPECTED = {
    (S0, R): ({"all_gather": 1}, {}),
    (R, S0): ({}, {"all_gather": 1}),
    (P, R): ({"all_reduce": 1}, {}),
    (P, S0): ({"reduce_scatter": 1}, {"all_gather": 1}),
    (S0, S1): ({"all_to_all": 1}, {"all_to_all": 1}),
    (S1, S0): ({"all_to_all": 1}, {"all_to_all": 1}),
    (S1, R): ({"all_gather": 1}, {}),
    (R, S1): ({}, {"all_gather": 1}),
    (P, S1): ({"reduce_scatter": 1}, {"all_gather": 1}),
    (R, R): ({}, {}),
    (S0, S0): ({}, {}),
    (S1, S1): ({}, {}),
    (P, P): ({}, {}),
}


@spmd.on_mesh()
def listed_steps(mesh: Any) -> None:
    steps: list[Any] = [one_summand(mesh, 0), one_summand(mesh, 0).back]
    for source, target in ((S0, R), (R, S0), (P, R), (P, S0), (S0, S1)):
        (step,) = redistribution_steps(get_layout(mesh, (source,), (4, 4)), get_layout(mesh, (target,), (4, 4)))
        steps += [step, step.for_parts] if isinstance(step, Gather) else [step]
    found = {step.verb: step.back.verb for step in steps}
    assert {**found, "read_for_parts": "sum"} == {name: verb.back for name, verb in STEPS.items()}


def test_steps_are_those_of_the_list(pool: Any) -> None:
    """Check core's steps against `STEPS`, from which compilers read the step of each cotangent."""
    pool.run(1, listed_steps)


def run_transition(mesh_shape: tuple[int, ...], shape: tuple[int, ...], source: Any, target: Any) -> Any:
    """Redistribute a tensor. Check value, placements and the gradient of the local tensor; return the collectives."""
    mesh = spmd.device_mesh(*mesh_shape)
    if mesh is None:
        return None
    adapter = get_adapter()
    rng = np.random.default_rng(0)
    x, weights = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    layout = get_layout(mesh, source, shape)
    goal = get_layout(mesh, target, shape)
    mine = local_parts(x, layout, rng)
    cotangent = weights[tuple(goal.cotangent.local_index())]
    counts = {}

    def loss(local: Any) -> Any:
        with CommDebugMode() as comm:
            y = DTensor.from_local(local, mesh, source, shape=shape).redistribute(placements=target)
        counts["forward"] = comm.get_comm_counts()
        assert y.placements == goal.placements
        return adapter.weighted_sum(y.to_local(), adapter.tensor(cotangent)), y

    with CommDebugMode() as both:
        y, (grad,) = adapter.value_and_grads(loss, [mine])
    counts["backward"] = {
        k: n - counts["forward"].get(k, 0) for k, n in both.get_comm_counts().items() if n > counts["forward"].get(k, 0)
    }
    same(adapter.numpy(y), x, "value")
    same(grad, weights[layout.cotangent.local_index()], "gradient of the local tensor")
    return counts


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [(12, 24), (5, 7), (1, 3)], ids=str)
def test_one_dimensional_mesh(pool: Any, world_size: int, shape: tuple[int, ...]) -> None:
    for source, target in EXPECTED:
        for counts in pool.run(world_size, run_transition, (world_size,), shape, (source,), (target,)):
            forward, backward = EXPECTED[source, target] if world_size > 1 else ({}, {})
            assert counts == {"forward": forward, "backward": backward}, (source, target)


# Between packed and other shards of one dimension the whole tensor is needed.
PACKED = {
    ("packed", R): ({"all_gather": 1}, {}),
    (R, "packed"): ({}, {"all_gather": 1}),
    (P, "packed"): ({"reduce_scatter": 1}, {"all_gather": 1}),
    (S1, "packed"): ({"all_gather": 1}, {"all_gather": 1}),
    ("packed", S0): ({"all_gather": 1}, {"all_gather": 1}),
    ("packed", "packed"): ({}, {}),
}


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sizes", [(8, 2, 2), (4, 4, 4), (3, 1, 1), (0, 2)], ids=str)
def test_packed_shards(pool: Any, world_size: int, sizes: tuple[int, ...]) -> None:
    packed = PackedShard(0, sizes)
    for pair, expected in PACKED.items():
        source, target = (packed if p == "packed" else p for p in pair)
        for counts in pool.run(world_size, run_transition, (world_size,), (sum(sizes), 6), (source,), (target,)):
            forward, backward = expected if world_size > 1 else ({}, {})
            assert counts == {"forward": forward, "backward": backward}, (source, target)


def test_packed_shards_on_two_dimensional_mesh(pool: Any) -> None:
    packed = PackedShard(1, (4, 3))
    pairs = [((R, packed), (S0, R)), ((S0, packed), (R, R)), ((P, packed), (S0, packed)), ((packed, S0), (R, packed))]
    pool.run(4, run_transitions, (2, 2), (5, 7), pairs)


TWO_DIMENSIONAL = [
    (source, target)
    for source in itertools.product([R, P, S0, S1], repeat=2)
    for target in itertools.product([R, S0, S1], repeat=2)
]


@pytest.mark.parametrize("shape", [(8, 12), (5, 7)], ids=str)
@pytest.mark.parametrize("chunk", range(4))
def test_two_dimensional_mesh(pool: Any, shape: tuple[int, ...], chunk: int) -> None:
    pool.run(4, run_transitions, (2, 2), shape, TWO_DIMENSIONAL[chunk::4])


@spmd.on_mesh()
def prices(mesh: Any) -> None:
    """Check the cost of a step, by which strategies are compared: moved elements, plus one per collective."""
    n = mesh.size()
    shards = get_layout(mesh, (S0,), (12, 8))
    summands = get_layout(mesh, (P,), (12, 8))
    local = 96 / n
    for source, target, price in (
        (shards, R, 1 + local * (n - 1)),
        (shards, S1, 1 + local * (n - 1) / n),
        (shards.with_placements([R]), S0, 0.25 * 96 * (n - 1) / n),  # free now, an all-gather in backward
        (summands, R, 1 + 2 * 96 * (n - 1) / n),
        (summands, S0, 1 + 96 * (n - 1) / n),
    ):
        got = redistribution_cost(source, source.with_placements([target]))
        assert got == pytest.approx(price, abs=0.1), f"{source.placements} to {target}"


@on_ranks(2, 3, 4)
def test_prices(pool: Any, world_size: int) -> None:
    pool.run(world_size, prices)


@spmd.on_mesh()
def broadcasts(mesh: Any) -> None:
    """Check broadcasts by the backend's own collective, and by an all-gather on a backend without broadcast."""
    adapter, platform, called = get_adapter(), mesh.platform, []
    supports, native = platform.supports, platform.broadcast
    mine = np.full((2, 3), mesh.get_local_rank(), np.float32)
    for supported in {supports("broadcast", "", adapter.tensor(mine)), False}:
        called.clear()
        platform.supports = lambda verb, op, x, own=supported: supports(verb, op, x) if verb != "broadcast" else own
        platform.broadcast = lambda *args: called.append(1) or native(*args)
        try:
            with CommDebugMode() as comm:
                got = collectives.broadcast(adapter.tensor(mine), mesh, 0, mesh.size() - 1)
        finally:
            del platform.supports, platform.broadcast
        same(adapter.numpy(got), np.full((2, 3), mesh.size() - 1, np.float32), f"supported: {supported}", 0.0)
        assert len(called) == (supported and mesh.size() > 1)
        assert comm.get_comm_counts() == ({"broadcast": 1} if mesh.size() > 1 else {})


@on_ranks(1, 2, 4)
def test_broadcast(pool: Any, world_size: int) -> None:
    pool.run(world_size, broadcasts)


def run_transitions(mesh_shape: tuple[int, ...], shape: tuple[int, ...], pairs: list) -> None:
    for source, target in pairs:
        try:
            run_transition(mesh_shape, shape, source, target)
        except Exception as error:
            raise AssertionError(f"{source} -> {target}") from error


@pytest.mark.parametrize("op", ["avg", "max", "min", "product"])
def test_other_reductions(pool: Any, op: str) -> None:
    pool.run(3, reduce_with, op)


def reduce_with(op: str) -> None:
    mesh = spmd.device_mesh()
    if mesh is None:
        return
    adapter = get_adapter()
    rng = np.random.default_rng(1)
    parts = rng.standard_normal((mesh.size(), 4, 3)).astype(np.float32)
    weights = rng.standard_normal((4, 3)).astype(np.float32)
    combine = {"avg": np.mean, "max": np.max, "min": np.min, "product": np.prod}[op]
    rank = mesh.get_local_rank()
    grads = {
        "avg": weights / mesh.size(),
        "max": weights * (parts[rank] == parts.max(0)),
        "min": weights * (parts[rank] == parts.min(0)),
        "product": weights * parts.prod(0) / parts[rank],
    }

    for target in (R, S0):

        def loss(local: Any, target: Any = target) -> Any:
            y = DTensor.from_local(local, mesh, [Partial(op)]).redistribute(placements=[target])
            mine = weights[get_layout(mesh, (target,), (4, 3)).local_index()]
            return adapter.weighted_sum(y.to_local(), adapter.tensor(mine)), y

        y, (grad,) = adapter.value_and_grads(loss, [parts[rank]])
        same(adapter.numpy(y), combine(parts, axis=0), f"value to {target}")
        same(grad, grads[op], f"gradient to {target}")
