"""Experts for tokens of each rank's own: values, gradients and collectives against the single device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hyper_parallel import CommDebugMode, ExpertParallel, Shard, fully_shard, parallelize_module, replicate
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, same

FEATURES, HIDDEN, VOCABULARY = 4, 6, 11
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


def best(k: int) -> Callable[[np.ndarray], np.ndarray]:
    """The k experts with the largest logits."""
    return lambda logits: np.ascontiguousarray(np.argsort(-logits, -1, kind="stable")[:, :k]).astype(np.int64)


def only(*experts: int) -> Callable[[np.ndarray], np.ndarray]:
    """The same experts for each token."""
    return lambda logits: np.tile(np.array(experts, np.int64), (len(logits), 1))


#: Experts, tokens of each rank as shares of 12, how they are chosen.
CASES = {
    "even": (4, (3, 3, 3, 3), best(2)),
    "uneven": (5, (5, 1, 4, 2), best(2)),
    "fewer experts than ranks": (3, (2, 5, 3, 2), best(1)),
    "one expert has all": (4, (3, 2, 4, 3), only(2)),
    "every expert has all": (3, (2, 2, 1, 3), best(3)),
}

#: Of how many experts each rank has tokens, and for which: rank, expert -> number.
ALONE = {
    "ranks without tokens": (5, {(1, 0): 2, (1, 3): 1, (3, 3): 2, (0, 0): 0}),
    "experts of one rank": (4, {(0, 3): 2, (1, 3): 1, (2, 3): 3, (3, 3): 1}),
    "fewer experts than ranks": (2, {(0, 0): 2, (1, 1): 1, (2, 0): 1, (3, 1): 3}),
}


def build(count: int, by_index: bool, choose: Any, dtype: Any) -> Any:
    adapter = get_adapter()
    model = adapter.Mixture(VOCABULARY, count, FEATURES, HIDDEN, by_index)
    model.choose = choose
    return adapter.load(model, np.random.default_rng(5), dtype)


def parts_of(shares: Sequence[int], mesh: Any) -> tuple[np.ndarray, slice]:
    """The ids of all ranks, and where this rank's are."""
    shares = shares[: mesh.size()]
    end = np.cumsum(shares)[mesh.get_local_rank()]
    ids = np.random.default_rng(7).integers(0, VOCABULARY, sum(shares)).astype(np.int64)
    return ids, slice(end - shares[mesh.get_local_rank()], end)


def around(model: Any, mesh: Any, how: str) -> Any:
    """The model under data parallelism on the ranks that have the experts."""
    return replicate(model, mesh) if how == "replicate" else fully_shard(model, mesh=mesh)


@spmd.on_mesh()
def mixture(mesh: Any, case: str, by_index: bool, how: str, dtype: Any = np.float64) -> Any:
    count, shares, choose = CASES[case]
    ids, mine = parts_of(shares, mesh)
    adapter, tolerance = get_adapter(), TOLERANCE[dtype]
    single, sharded = (build(count, by_index, choose, dtype) for _ in range(2))
    parallelize_module(sharded, mesh, {"experts": ExpertParallel()})
    around(sharded, mesh, how)
    weights = np.random.default_rng(6).standard_normal((len(ids), FEATURES)).astype(dtype)

    def reference(x: Any) -> Any:
        y = adapter.call(single, x)
        return adapter.weighted_sum(y, adapter.tensor(weights)) / mesh.size(), y

    counts: dict[str, Any] = {}

    def distributed(x: Any) -> Any:
        with CommDebugMode() as comm:
            y = adapter.call(sharded, x)
        counts["forward"] = comm.get_comm_counts()
        return adapter.weighted_sum(y, adapter.tensor(weights[mine])), y

    y, _, grads = adapter.model_value_and_grads(single, reference, ids)
    with CommDebugMode() as comm:
        got_y, _, got = adapter.model_value_and_grads(sharded, distributed, ids[mine])
    counts["backward"] = difference(comm.get_comm_counts(), counts["forward"])
    what = f"{case}, {by_index=}, {how}"
    same(adapter.numpy(got_y), adapter.numpy(y)[mine], f"{what}: output", tolerance)
    assert set(got) == set(grads)
    for name, g in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(g), f"{what}: gradient of {name}", tolerance)
    return counts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_mixture(pool: Any, world_size: int) -> None:
    for case in CASES:
        pool.run(world_size, mixture, case, world_size % 2 == 0, "replicate")


@spmd.on_mesh()
def experts_alone(mesh: Any, case: str, by_index: bool, one_loss: bool, dtype: Any = np.float64) -> None:
    adapter, ranks, me, tolerance = get_adapter(), mesh.size(), mesh.get_local_rank(), TOLERANCE[dtype]
    count, numbers = ALONE[case]
    counts = np.array([[numbers.get((rank, e), 0) for e in range(count)] for rank in range(ranks)])
    if not counts.sum():
        counts[0, 0] = 1
    rng = np.random.default_rng(9)
    rows = [[rng.standard_normal((n, FEATURES)).astype(dtype) for n in row] for row in counts]
    whole = np.concatenate([rows[rank][e] for e in range(count) for rank in range(ranks)])
    weights = rng.standard_normal(whole.shape).astype(dtype)
    # Where this rank's rows are among all.
    starts = np.concatenate([[0], np.cumsum(counts.T.ravel())[:-1]]).reshape(count, ranks)
    mine = np.concatenate([np.arange(starts[e, me], starts[e, me] + counts[me, e]) for e in range(count)]).astype(int)
    kind = adapter.RoutedExperts if by_index else adapter.SortedExperts
    single, sharded = (adapter.load(kind(count, FEATURES, HIDDEN), np.random.default_rng(5), dtype) for _ in range(2))
    style = ExpertParallel(input_layout=Shard(0)) if one_loss else ExpertParallel()
    parallelize_module(sharded, mesh, style)

    def function(module: Any, counts: np.ndarray, weights: np.ndarray, share: int) -> Any:
        def run(x: Any) -> Any:
            if by_index:
                places = np.repeat(np.arange(count), counts).reshape(-1, 1)
                y = adapter.call(module, x, adapter.tensor(places), adapter.tensor(np.full(places.shape, 0.5, dtype)))
            else:
                y = adapter.call(module, x, counts=adapter.tensor(counts))
            return adapter.weighted_sum(y, adapter.tensor(weights)) / share, y

        return run

    share = 1 if one_loss else ranks
    y, grad, grads = adapter.model_value_and_grads(single, function(single, counts.sum(0), weights, share), whole)
    run = function(sharded, counts[me], weights[mine], 1)
    got_y, got_grad, got = adapter.model_value_and_grads(sharded, run, whole[mine])
    what = f"{case}, {by_index=}, {one_loss=}"
    same(adapter.numpy(got_y), adapter.numpy(y)[mine], f"{what}: output", tolerance)
    same(got_grad, grad[mine] * share, f"{what}: gradient of the tokens", tolerance)
    for name, g in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(g), f"{what}: gradient of {name}", tolerance)


@pytest.mark.parametrize("world_size", [2, 4])
def test_experts_alone(pool: Any, world_size: int) -> None:
    for case in ALONE:
        for by_index in (False, True):
            pool.run(world_size, experts_alone, case, by_index, by_index is (world_size == 2))
