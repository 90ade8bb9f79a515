"""Experts with different tokens on each rank: values, gradients and collectives against the single device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    CommDebugMode,
    DeviceMesh,
    DTensor,
    ExpertParallel,
    RankMismatchError,
    Replicate,
    Shard,
    distribute_tensor,
    explain,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.core.communication.collectives import exchange_rows
from hyper_parallel.core.modes import SUMMED_OVER
from hyper_parallel.planning import expert_shares
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, same
from hyper_parallel.testing.conformance.checks import needs_gradients

FEATURES, HIDDEN, VOCABULARY = 4, 6, 11
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


def best(k: int) -> Callable[[np.ndarray], np.ndarray]:
    """Choose the k experts with the largest logits."""
    return lambda logits: np.ascontiguousarray(np.argsort(-logits, -1, kind="stable")[:, :k]).astype(np.int64)


def only(*experts: int) -> Callable[[np.ndarray], np.ndarray]:
    """Choose the same experts for each token."""
    return lambda logits: np.tile(np.array(experts, np.int64), (len(logits), 1))


#: Experts, tokens of each rank as shares of 12, how they are chosen.
CASES = {
    "even": (4, (3, 3, 3, 3), best(2)),
    "uneven": (5, (5, 1, 4, 2), best(2)),
    "fewer experts than ranks": (3, (2, 5, 3, 2), best(1)),
    "one expert has all": (4, (3, 2, 4, 3), only(2)),
    "every expert has all": (3, (2, 2, 1, 3), best(3)),
    "an empty batch on some ranks": (4, (0, 3, 0, 2), best(2)),
    "an empty batch on all ranks": (3, (0, 0, 0, 0), best(2)),
    "fewer tokens than ranks": (5, (0, 1, 0, 0), best(1)),
    **{f"{k} experts of 5 for each token": (5, (2, 1, 0, 3), best(k)) for k in range(1, 6)},
}

#: Of how many experts each rank has tokens, and for which: rank, expert -> number.
ALONE = {
    "ranks without tokens": (5, {(1, 0): 2, (1, 3): 1, (3, 3): 2, (0, 0): 0}),
    "experts of one rank": (4, {(0, 3): 2, (1, 3): 1, (2, 3): 3, (3, 3): 1}),
    "batch of DTensors": (3, {(0, 0): 3, (1, 2): 2, (1, 1): 1, (2, 2): 3, (3, 0): 1, (3, 1): 2}),
    "fewer experts than ranks": (2, {(0, 0): 2, (1, 1): 1, (2, 0): 1, (3, 1): 3}),
    "one token": (5, {(1, 4): 1}),
    "no token": (3, {}),
}


def build(count: int, by_index: bool, choose: Any, dtype: Any) -> Any:
    adapter = get_adapter()
    model = adapter.Mixture(VOCABULARY, count, FEATURES, HIDDEN, by_index)
    model.choose = choose
    return adapter.load(model, np.random.default_rng(5), dtype)


def parts_of(shares: Sequence[int], mesh: Any) -> tuple[np.ndarray, slice]:
    """Return the ids of all ranks, and the slice of this rank's ids."""
    shares = shares[: mesh.size()]
    end = np.cumsum(shares)[mesh.get_local_rank()]
    ids = np.random.default_rng(7).integers(0, VOCABULARY, sum(shares)).astype(np.int64)
    return ids, slice(end - shares[mesh.get_local_rank()], end)


def around(model: Any, mesh: Any, how: str) -> Any:
    """Apply data parallelism to the model on the ranks that have the experts."""
    return replicate(model, mesh) if how == "replicate" else fully_shard(model, mesh=mesh)


@spmd.on_mesh()
def mixture(mesh: Any, case: str, by_index: bool, how: str, dtype: Any = np.float64) -> Any:
    """Run one step of a model. Return None if the framework has no embedding of so few tokens."""
    count, shares, choose = CASES[case]
    if min(shares[: mesh.size()]) < get_adapter().TRAINING_LIMITS.get("least", 0):
        return None
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
        by_index, how = world_size % 2 == 0, "replicate" if case == "even" else "fully_shard"
        for counts in pool.run(world_size, mixture, case, by_index, how):
            # Ranks that know that none has a token send none.
            sent = 0 if world_size == 1 or not any(CASES[case][1][:world_size]) else 2
            if counts is not None:
                assert counts["forward"].get("all_to_all", 0) == counts["backward"].get("all_to_all", 0) == sent, case


def test_mixture_in_float32(pool: Any) -> None:
    pool.run(2, mixture, "uneven", False, "fully_shard", np.float32)


@spmd.on_mesh()
def experts_alone(mesh: Any, case: str, by_index: bool, one_loss: bool, dtype: Any = np.float64) -> None:
    adapter, ranks, me, tolerance = get_adapter(), mesh.size(), mesh.get_local_rank(), TOLERANCE[dtype]
    count, numbers = ALONE[case]
    counts = np.array([[numbers.get((rank, e), 0) for e in range(count)] for rank in range(ranks)])
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
            elif case == "batch of DTensors" and module is sharded:
                given = (DTensor.from_local(t, mesh, [Shard(0)]) for t in (x, adapter.tensor(counts)))
                y = adapter.call(module, *given)
                assert y.placements == (Shard(0),)
                y = y.to_local()
            else:
                y = adapter.call(module, x, counts=adapter.tensor(counts))
            return adapter.weighted_sum(y, adapter.tensor(weights)) / share, y

        return run

    share = 1 if one_loss else ranks
    if len(whole):
        y, grad, grads = adapter.model_value_and_grads(single, function(single, counts.sum(0), weights, share), whole)
    else:  # which not all frameworks compute; zeros are no different by any loss
        y, grad = adapter.tensor(whole), whole
        grads = {key: adapter.tensor(np.zeros(getattr(single, key).shape, dtype)) for key in ("gate_up", "down")}
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
            one_loss = case == "batch of DTensors" or by_index is (world_size == 2)
            pool.run(world_size, experts_alone, case, by_index, one_loss)


@spmd.on_mesh(2, 2, names=("rest", "ep"))
def one_tensor(mesh: Any, by_index: bool) -> None:
    """Check one program for all ranks.

    Its tensors are sharded over both mesh dimensions, or over the dimension of the experts.
    """
    adapter, count, ep = get_adapter(), 3, mesh["ep"]
    rng, numbers = np.random.default_rng(9), np.array([4, 0, 3])
    x, weights = (rng.standard_normal((7, FEATURES)) for _ in range(2))
    kind = adapter.RoutedExperts if by_index else adapter.SortedExperts
    single, sharded = (
        adapter.load(kind(count, FEATURES, HIDDEN), np.random.default_rng(5), np.float64) for _ in range(2)
    )
    parallelize_module(sharded, ep, ExpertParallel())

    def given(x: Any, put: Callable[[Any], Any]) -> Any:
        if by_index:
            places = np.repeat(np.arange(count), numbers).reshape(-1, 1)
            return x, put(adapter.tensor(places)), put(adapter.tensor(np.full(places.shape, 0.5)))
        return x, put(adapter.tensor(numbers))

    def reference(x: Any) -> Any:
        y = adapter.call(single, *given(x, lambda t: t))
        return adapter.weighted_sum(y, adapter.tensor(weights)), y

    y, grad, grads = adapter.model_value_and_grads(single, reference, x)
    for on, placements in (
        (ep, [Shard(0)]),
        (ep, [Replicate()]),
        (mesh, [Replicate(), Shard(1)]),
        (mesh, [Shard(0), Replicate()]),
    ):

        def distributed(x: Any, on: Any = on, placements: Any = placements) -> Any:
            put = lambda t: DTensor.from_local(t, on)  # noqa: E731
            y = adapter.call(sharded, *given(put(x).redistribute(placements=placements), put))
            loss = adapter.weighted_sum(y, put(adapter.tensor(weights)))
            return loss.redistribute(placements=[Replicate()] * on.ndim).to_local(), y

        got_y, got_grad, got = adapter.model_value_and_grads(sharded, distributed, x)
        what = f"{placements} on {on}, {by_index=}"
        same(adapter.numpy(got_y), adapter.numpy(y), f"{what}: output", 1e-12)
        same(got_grad, grad, f"{what}: gradient of the tokens", 1e-12)
        for name, g in grads.items():
            same(adapter.numpy(got[name]), adapter.numpy(g), f"{what}: gradient of {name}", 1e-12)
    dp = mesh["rest", "ep"]._flatten("dp")
    args = (distribute_tensor(t, dp, [Shard(0)]) for t in given(adapter.tensor(x), lambda t: t))
    refused(lambda: adapter.call(sharded, *args), ValueError, "gradients would not be summed over all ranks")


@pytest.mark.parametrize("by_index", [False, True])
def test_one_tensor(pool: Any, by_index: bool) -> None:
    pool.run(4, one_tensor, by_index)


@spmd.on_mesh(2, 2, names=("rest", "ep"))
def beside_rest(mesh: Any, how: str) -> None:
    """Check data parallelism on a mesh (rest, ep): experts over rest, all other parameters over both dimensions."""
    adapter, count = get_adapter(), 3
    dp = mesh["rest", "ep"]._flatten("dp")
    ids, mine = parts_of((3, 2, 4, 1), dp)
    single, sharded = (build(count, False, best(2), np.float64) for _ in range(2))
    parallelize_module(sharded, mesh["ep"], {"experts": ExpertParallel()})
    apply = {"replicate": replicate, "fully_shard": lambda m, on: fully_shard(m, mesh=on)}[how]
    with pytest.raises(ValueError, match="has only some ranks"):
        apply(sharded, dp)
    apply(sharded.experts, mesh["rest"])
    apply(sharded, dp)
    weights = np.random.default_rng(6).standard_normal((len(ids), FEATURES))

    def reference(x: Any) -> Any:
        y = adapter.call(single, x)
        return adapter.weighted_sum(y, adapter.tensor(weights)) / dp.size(), y

    def distributed(x: Any) -> Any:
        y = adapter.call(sharded, x)
        return adapter.weighted_sum(y, adapter.tensor(weights[mine])), y

    y, _, grads = adapter.model_value_and_grads(single, reference, ids)
    got_y, _, got = adapter.model_value_and_grads(sharded, distributed, ids[mine])
    same(adapter.numpy(got_y), adapter.numpy(y)[mine], "output", 1e-12)
    for name, g in grads.items():
        same(adapter.numpy(got[name]), adapter.numpy(g), f"{how}: gradient of {name}", 1e-12)


@pytest.mark.parametrize("how", ["replicate", "fully_shard"])
def test_experts_on_a_part_of_the_data_parallel_ranks(pool: Any, how: str) -> None:
    pool.run(4, beside_rest, how)


def refused(call: Any, kind: type[Exception], match: str) -> None:
    """Raise AssertionError unless ``call`` is refused on this rank before any token is sent."""
    with CommDebugMode() as comm, pytest.raises(kind, match=match):
        call()
    assert "all_to_all" not in comm.get_comm_counts()


@spmd.on_mesh()
def wrong_calls(mesh: Any) -> None:
    adapter, first = get_adapter(), mesh.get_local_rank() == 0
    count = 3
    by_count, by_index = (
        adapter.load(kind(count, FEATURES, HIDDEN), np.random.default_rng(5))
        for kind in (adapter.SortedExperts, adapter.RoutedExperts)
    )
    for module in (by_count, by_index):
        parallelize_module(module, mesh, ExpertParallel())

    def x(rows: int, width: int = FEATURES) -> Any:
        return adapter.tensor(np.ones((rows, width), np.float32))

    def of(*numbers: int) -> Any:
        return adapter.tensor(np.array(numbers, np.int64))

    def sent(*numbers: int, width: int = FEATURES) -> Any:
        return lambda: adapter.call(by_count, x(3, width), of(*(numbers if first else (1, 1, 1))))

    def routed(indices: Any, rows: int = 2, k: int = 1) -> Any:
        places = np.array(indices if first else [[0] * k] * 2, np.int64)
        weights = adapter.tensor(np.ones((2, k), np.float32))
        return lambda: adapter.call(by_index, x(rows if first else 2), adapter.tensor(places), weights)

    # One rank is wrong, and all say so.
    refused(sent(1, 1, 2), ValueError, "rank 0, the token counts sum to 4, but there are 3 tokens")
    refused(sent(1, 2), ValueError, "token counts for 2 experts")
    refused(sent(-1, 2, 2), ValueError, "a token count is -1")
    refused(routed([[0], [3]]), ValueError, "indices of experts go from 0 to 3")
    refused(routed([[0], [1]], rows=3), ValueError, "indices for 2 tokens, but 3 tokens")
    refused(routed([[0, 1], [1, 2]]), ValueError, "neither")
    refused(lambda: adapter.call(by_count, x(3), x(3)), ValueError, "neither")
    if mesh.size() > 1:
        refused(sent(1, 1, 1, width=2 if first else FEATURES), RankMismatchError, "features of a token")
    whole = adapter.tensor(np.ones((4, FEATURES), np.float32))
    refused(
        lambda: adapter.call(by_count, distribute_tensor(whole, mesh, [Shard(0)]), of(1, 1, 1)),
        ValueError,
        "with tensors of different placements",
    )
    refused(
        lambda: adapter.call(by_count, distribute_tensor(whole, mesh, [Shard(0)]), 3),
        ValueError,
        "neither",
    )
    for numbers, match in (((1, 1, 1), "token counts sum to"), ((-1, 2, 3), "a token count is -1")):
        given = [distribute_tensor(t, mesh, [Replicate()]) for t in (whole, of(*numbers))]
        refused(lambda given=given: adapter.call(by_count, *given), ValueError, match)


def _first_expert(module: Any, x: Any, *_: Any) -> Any:
    """Send every token to the first expert, which needs no values of counts and indices."""
    return get_adapter().matmul(x, module.down[0])


def _few_rows(module: Any, x: Any, *_: Any) -> Any:
    return x[:0]


def _as_counted(module: Any, x: Any, counts: Any) -> Any:
    assert int(get_adapter().numpy(counts).sum()) == x.shape[0]
    return x


def module_with(forward: Any) -> Any:
    """Return a module of experts with equal inner and outer features, and with this forward."""
    kind = get_adapter().SortedExperts
    return type("Changed", (kind,), {"forward": forward, "construct": forward})(3, FEATURES, FEATURES)


@spmd.on_mesh()
def wrong_uses(mesh: Any) -> None:
    adapter = get_adapter()
    x, counts = adapter.tensor(np.ones((3, FEATURES), np.float32)), adapter.tensor(np.array([1, 1, 1], np.int64))
    module = module_with(_few_rows)
    del module.num_experts  # which nothing asks for
    parallelize_module(module, mesh, ExpertParallel())
    with pytest.raises(ValueError, match="a row for each token"):
        adapter.call(module, x, counts)
    # Each rank's number fits 8 bits. Their sum does not.
    counting = parallelize_module(module_with(_as_counted), mesh, ExpertParallel())
    many = adapter.tensor(np.ones((200, FEATURES), np.float32))
    counts_of_8_bits = adapter.tensor(np.array([200, 0, 0], np.uint8))
    same(adapter.numpy(adapter.call(counting, many, counts_of_8_bits)), adapter.numpy(many), "tokens")
    token = SUMMED_OVER.set(mesh)
    try:
        refused(lambda: adapter.call(module, x, counts), ValueError, "plain tokens in a model whose batch is a DTensor")
    finally:
        SUMMED_OVER.reset(token)


@spmd.on_mesh()
def rows_of_dtypes(mesh: Any) -> None:
    """Check that rows of any dtype can be sent, even if the backend has no native collective for it."""
    adapter, me, size = get_adapter(), mesh.get_local_rank(), mesh.size()
    counts = np.arange(size * size).reshape(size, size) % 3
    for dtype in (np.float32, np.int16, np.bool_, np.float16):
        sent = [np.arange(n * 2).reshape(n, 2) + 10 * me + j for j, n in enumerate(counts[me])]
        with mesh.platform.no_dispatch():
            got = exchange_rows(adapter.tensor(np.concatenate(sent).astype(dtype)), mesh, 0, counts)
        wanted = [np.arange(n * 2).reshape(n, 2) + 10 * i + me for i, n in enumerate(counts[:, me])]
        np.testing.assert_array_equal(adapter.numpy(got), np.concatenate(wanted).astype(dtype))


def test_rows_of_dtypes(pool: Any) -> None:
    pool.run(3, rows_of_dtypes)


def outside() -> None:
    mesh = spmd.device_mesh(2)
    part = DeviceMesh(None, np.arange(2))
    module = parallelize_module(get_adapter().SortedExperts(3, FEATURES, HIDDEN), part, ExpertParallel())
    if mesh is None:
        with pytest.raises(ValueError, match="is not part of"):
            get_adapter().call(module, None)


def test_foreseen() -> None:
    """Check that a dry run assumes equal numbers of tokens for all experts."""
    needs_gradients()
    adapter = get_adapter()
    x, places = adapter.tensor(np.ones((8, FEATURES), np.float32)), adapter.tensor(np.zeros((8, 2), np.int64))
    weights, counts = adapter.tensor(np.ones((8, 2), np.float32)), adapter.tensor(np.array([8, 0, 0], np.int64))
    size = FEATURES * 4
    for inputs, rows in (((x, counts), 8), ((x, places, weights), 16)):
        seen = explain(module_with(_first_expert), 2, ExpertParallel(), *inputs).collectives
        there, back = (c for c in seen if c.kind == "all_to_all" and c.direction == "forward")
        assert there.bytes == rows * size, inputs
        assert back.bytes > 0
        assert [c.bytes for c in seen if c.kind == "all_gather" and c.direction == "forward"] == [(1 + 3) * 4]

    # All to the first expert, which is the described rank's: what comes there goes back.
    for shares, rows in (([2, 0, 0], 16), ([1, 0, 1], 8)):
        with expert_shares(shares):
            seen = explain(module_with(_first_expert), 2, ExpertParallel(), x, counts).collectives
        there, back = (c for c in seen if c.kind == "all_to_all" and c.direction == "forward")
        assert (there.bytes, back.bytes) == (8 * size, rows * size), shares
    with (
        expert_shares([1, 1]),
        pytest.raises(ValueError, match="2 numbers, but a module has 3 experts: pass one number"),
    ):
        explain(module_with(_first_expert), 2, ExpertParallel(), x, counts)
    for wrong in ([], [0, 0], [-1, 2]):
        with pytest.raises(ValueError, match="one number for each expert"), expert_shares(wrong):
            raise AssertionError("was taken")

    def whole(module: Any, x: Any, counts: Any) -> Any:
        mesh = module.inner.down.device_mesh
        return module.inner(*(DTensor.from_local(t, mesh) for t in (x, counts))).to_local()

    around = type("Around", (adapter.Module,), {"forward": whole, "construct": whole})()
    around.inner = module_with(_first_expert)
    seen = explain(around, 2, {"inner": ExpertParallel()}, x, counts).collectives
    assert next(c for c in seen if c.kind == "all_to_all").bytes == 4 * size


@spmd.on_mesh()
def wrong_plans(mesh: Any) -> None:
    adapter, odd = get_adapter(), mesh.get_local_rank() == 0
    with pytest.raises(ValueError, match="None for different tokens on each rank, Shard"):
        ExpertParallel(input_layout=Shard(1))
    with pytest.raises(ValueError, match="must be \\(experts"):
        parallelize_module(adapter.Projection(4, 6), mesh, ExpertParallel())
    with pytest.raises(ValueError, match="below has the parameter"):
        module = adapter.SortedExperts(2, FEATURES, HIDDEN)
        module.inner = adapter.linear_module(2, 2)
        parallelize_module(module, mesh, ExpertParallel())
    with pytest.raises(ValueError, match=r"has the buffers \['scale'\]"):
        module = adapter.SortedExperts(2, FEATURES, HIDDEN)
        module.register_buffer("scale", adapter.tensor(np.ones(2, np.float32)))
        parallelize_module(module, mesh, ExpertParallel())
    if mesh.size() > 1:
        with pytest.raises(RankMismatchError, match="number of experts"):
            parallelize_module(adapter.SortedExperts(2 + odd, FEATURES, HIDDEN), mesh, ExpertParallel())


@pytest.mark.parametrize("world_size", [1, 4])
def test_refusals(pool: Any, world_size: int) -> None:
    pool.run(world_size, wrong_calls)
    pool.run(world_size, wrong_plans)
    pool.run(world_size, wrong_uses)


def test_outside_of_the_mesh(pool: Any) -> None:
    pool.run(4, outside)
