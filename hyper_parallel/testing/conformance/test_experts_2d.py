"""Experts with tensor parallelism: sharded sequences, tokens that ranks share, and experts that are sharded inside."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    ExpertParallel,
    PackedShard,
    RankMismatchError,
    Replicate,
    Shard,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import difference, same
from hyper_parallel.testing.conformance.test_experts import FEATURES, HIDDEN, refused
from hyper_parallel.testing.extent import in_gate

COUNT = 3
#: Tokens of each expert in the batch of each data-parallel rank, sorted by expert.
NUMBERS = np.array([[2, 0, 3], [1, 1, 2]])
INSIDE = {"gate_up": PackedShard(2, 2), "down": Shard(1)}


class Way(NamedTuple):
    """Placements of experts and tokens on the mesh ("dp", "tp").

    Attributes:
        over: mesh dimensions that shard the experts; several are flattened.
        style: arguments of the style.
        around: function that applies data parallelism over dp, or None.
        shards: whether a rank has a shard of the tokens of its data-parallel rank.
        sent: number of exchanges in forward, and of all-reduces in forward and in backward.
    """

    over: tuple[str, ...]
    style: dict[str, Any] = {}  # noqa: RUF012 - read only
    around: Callable[..., Any] | None = None
    shards: bool = False
    sent: tuple[int, int, int] = (2, 0, 0)


WHOLE = {"input_layout": Replicate(), "tp_dim": "tp"}
WAYS = {
    "shards of a sequence": Way(("dp", "tp"), {"input_layout": Shard(0), "tp_dim": "tp"}, shards=True),
    "tokens in common": Way(("dp", "tp"), WHOLE),
    "experts cut inside": Way(("dp",), {**WHOLE, "inside": INSIDE}, sent=(2, 1, 2)),
    "tokens and experts in common": Way(("dp",)),
    "experts over tp": Way(("tp",), {"input_layout": Replicate()}, fully_shard),
    "experts over tp, named": Way(("tp",), WHOLE, replicate),
    "experts over tp, shards": Way(("tp",), {"input_layout": Shard(0)}, fully_shard, shards=True),
}


def experts_of(by_index: bool) -> Any:
    adapter = get_adapter()
    kind = adapter.RoutedExperts if by_index else adapter.SortedExperts
    return adapter.load(kind(COUNT, FEATURES, HIDDEN), np.random.default_rng(5), np.float64)


def called(module: Any, x: Any, numbers: np.ndarray, by_index: bool, put: Callable[[Any], Any]) -> Any:
    """Return the result of the module for tokens ``x``. ``numbers`` has the number of tokens of each expert."""
    adapter = get_adapter()
    if not by_index:
        return adapter.call(module, x, put(adapter.tensor(numbers)))
    places = np.repeat(np.arange(COUNT), numbers).reshape(-1, 1)
    return adapter.call(module, x, put(adapter.tensor(places)), adapter.sigmoid(x[:, :1]))


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def beside_tp(mesh: Any, name: str, by_index: bool) -> Any:
    """Check separate plain batches of data-parallel ranks, and one batch of DTensors."""
    adapter, way = get_adapter(), WAYS[name]
    mesh["dp", "tp"]._flatten("ep")
    rng = np.random.default_rng(9)
    # A single device has the batches one after the other: by index in any order, else in that of the experts.
    rows = [rng.standard_normal((n.sum(), FEATURES)) for n in NUMBERS]
    weights = [rng.standard_normal(x.shape) for x in rows]
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    single = experts_of(by_index)

    def reference(x: Any) -> Any:
        first, total, outputs = 0, None, []
        for numbers, weight in zip(NUMBERS, weights, strict=True):
            last = first + int(numbers.sum())
            y = called(single, x[first:last], numbers, by_index, lambda t: t)
            first = last
            loss = adapter.weighted_sum(y, adapter.tensor(weight)) * 0.5
            total = loss if total is None else total + loss
            outputs.append(y)
        return total, outputs

    y, grad, grads = adapter.model_value_and_grads(single, reference, np.concatenate(rows))
    wanted, first = adapter.numpy(y[dp]), NUMBERS[:dp].sum()
    wanted_grad = grad[first : first + NUMBERS[dp].sum()] * 2
    numbers, mine = NUMBERS[dp], slice(None)
    if way.shards:
        mine = slice(3 * tp, 3 * tp + 3)  # of five tokens, or four: shards differ in size
        places = np.repeat(np.arange(COUNT), numbers)[mine]
        numbers = np.bincount(places, minlength=COUNT)
    sharded = experts_of(by_index)
    parallelize_module(sharded, mesh["ep" if len(way.over) > 1 else way.over[0]], ExpertParallel(**way.style))
    if way.around is fully_shard:
        fully_shard(sharded, mesh=mesh["dp"])
    elif way.around is not None:
        replicate(sharded, mesh["dp"])
    counts: dict[str, Any] = {}

    def distributed(x: Any) -> Any:
        with CommDebugMode() as comm:
            y = called(sharded, x, numbers, by_index, lambda t: t)
        counts["forward"] = comm.get_comm_counts()
        return adapter.weighted_sum(y, adapter.tensor(weights[dp][mine])), y

    with CommDebugMode() as comm:
        got_y, got_grad, got = adapter.model_value_and_grads(sharded, distributed, rows[dp][mine])
    counts["backward"] = difference(comm.get_comm_counts(), counts["forward"])
    what = f"{name}, {by_index=}"
    same(adapter.numpy(got_y), wanted[mine], f"{what}: output", 1e-12)
    same(got_grad, wanted_grad[mine], f"{what}: gradient of the tokens", 1e-12)
    for key, g in grads.items():
        same(adapter.numpy(got[key]), adapter.numpy(g), f"{what}: gradient of {key}", 1e-12)
    if way.around is not None or not by_index:
        return counts
    # One batch of all, of which the losses are summed.
    for on in (mesh, *([] if way.shards else [mesh["dp"]])):
        placements = [Replicate(), Shard(0)][: on.ndim]
        all_numbers = NUMBERS.sum(0)

        def one_batch(x: Any, on: Any = on, placements: Any = placements, numbers: Any = all_numbers) -> Any:
            put = lambda t: DTensor.from_local(t, on)  # noqa: E731
            y = called(sharded, put(x).redistribute(placements=placements), numbers, True, put)
            total = adapter.weighted_sum(y, put(adapter.tensor(np.concatenate(weights))))
            return total.redistribute(placements=[Replicate()] * on.ndim).to_local(), y

        def alone(x: Any, numbers: Any = all_numbers) -> Any:
            y = called(single, x, numbers, True, lambda t: t)
            return adapter.weighted_sum(y, adapter.tensor(np.concatenate(weights))), y

        y, grad, grads = adapter.model_value_and_grads(single, alone, np.concatenate(rows))
        got_y, got_grad, got = adapter.model_value_and_grads(sharded, one_batch, np.concatenate(rows))
        what = f"{name}, one batch on {on}"
        same(adapter.numpy(got_y), adapter.numpy(y), f"{what}: output", 1e-12)
        same(got_grad, grad, f"{what}: gradient of the tokens", 1e-12)
        for key, g in grads.items():
            same(adapter.numpy(got[key]), adapter.numpy(g), f"{what}: gradient of {key}", 1e-12)
    return counts


@pytest.mark.parametrize(
    ("way", "by_index"),
    # In the gate each way calls its experts in one of two ways.
    in_gate(product(WAYS, [False, True]), [(way, bool(i % 2)) for i, way in enumerate(WAYS)], unpack=True),
)
def test_experts_and_tensor_parallelism(pool: Any, way: str, by_index: bool) -> None:
    exchanges, forward, backward = WAYS[way].sent
    for counts in pool.run(4, beside_tp, way, by_index):
        assert counts["forward"]["all_to_all"] == counts["backward"]["all_to_all"] == exchanges, counts
        if WAYS[way].around is None:
            # The weights of a router come with their gradients too.
            wanted = backward if by_index else backward // 2
            assert (counts["forward"].get("all_reduce", 0), counts["backward"].get("all_reduce", 0)) == (
                forward,
                wanted,
            ), counts


@spmd.on_mesh(2, 1, 2, names=("rest", "ep", "tp"))
def cut_three_times(mesh: Any) -> None:
    """Check experts that are sharded over ep, inside over tp, and by `fully_shard` over rest."""
    adapter = get_adapter()
    single, sharded = experts_of(True), experts_of(True)
    parallelize_module(sharded, mesh["ep"], ExpertParallel(**WAYS["experts cut inside"].style))
    fully_shard(sharded, mesh=mesh["rest"])
    x = np.random.default_rng(9).standard_normal((NUMBERS.sum(), FEATURES))
    rank = mesh["rest"].get_local_rank()
    mine = slice(0, NUMBERS[0].sum()) if rank == 0 else slice(NUMBERS[0].sum(), None)

    def loss_of(module: Any, numbers: np.ndarray, share: float) -> Any:
        def loss(x: Any) -> Any:
            y = called(module, x, numbers, True, lambda t: t)
            return adapter.sum(y * y) * share, y

        return loss

    totals: dict[str, Any] = {}
    for i, rows in enumerate((x[: NUMBERS[0].sum()], x[NUMBERS[0].sum() :])):
        _, _, grads = adapter.model_value_and_grads(single, loss_of(single, NUMBERS[i], 0.5), rows)
        totals = {name: totals.get(name, 0) + adapter.numpy(g) for name, g in grads.items()}
    _, _, got = adapter.model_value_and_grads(sharded, loss_of(sharded, NUMBERS[rank], 1.0), x[mine])
    for name, g in totals.items():
        assert got[name].device_mesh.ndim == 3
        same(adapter.numpy(got[name]), g, f"gradient of {name}", 1e-12)


def test_experts_that_are_cut_three_times(pool: Any) -> None:
    pool.run(4, cut_three_times)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def wrong_plans(mesh: Any) -> None:
    adapter = get_adapter()
    ep = mesh["dp", "tp"]._flatten("ep")
    for arguments, match in (
        ({"tp_dim": "tp"}, "with input_layout"),
        ({"inside": INSIDE}, "need the same tokens"),
        ({"inside": INSIDE, "tp_dim": "tp", "input_layout": Shard(0)}, "need the same tokens"),
        ({**WHOLE, "inside": {"down": Shard(0)}}, "along a dimension other than the first"),
        ({**WHOLE, "inside": {"down": Replicate()}}, "along a dimension other than the first"),
    ):
        with pytest.raises(ValueError, match=match):
            ExpertParallel(**arguments)
    for on, arguments, match in (
        (ep, {**WHOLE, "tp_dim": "cp"}, "has no dimension 'cp'"),
        (mesh["dp"], WHOLE, "which lacks 'tp'"),
        (ep, {**WHOLE, "inside": INSIDE}, "which has the dimension 'tp'"),
        (mesh["dp"], {**WHOLE, "inside": {"down": Shard(1)}}, "inside names \\['down'\\]"),
        (mesh["dp"], {**WHOLE, "inside": {"down": Shard(1), "gate_up": Shard(3)}}, "Shard"),
    ):
        with pytest.raises(ValueError, match=match):
            parallelize_module(experts_of(True), on, ExpertParallel(**arguments))
    with pytest.raises(ValueError, match="without elements of 'gate_up'"):
        narrow = adapter.RoutedExperts(COUNT, FEATURES, 1)
        parallelize_module(narrow, mesh["dp"], ExpertParallel(**WHOLE, inside=INSIDE))
    # Ranks of tensor parallelism that are given different tokens; and calls without what a call needs.
    module = parallelize_module(experts_of(True), ep, ExpertParallel(**WHOLE))
    number = adapter.tensor(np.array(1.0))
    refused(lambda: adapter.call(module, number), ValueError, "neither")
    refused(lambda: adapter.call(module, 3), ValueError, "neither")
    module = parallelize_module(experts_of(True), ep, ExpertParallel(**WHOLE))  # of which a first call is compared
    x = np.full((3, FEATURES), float(mesh.get_rank()))
    refused(
        lambda: called(module, adapter.tensor(x), np.array([1, 1, 1]), True, lambda t: t), RankMismatchError, "differ"
    )


def test_refusals(pool: Any) -> None:
    pool.run(4, wrong_plans)
