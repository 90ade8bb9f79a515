"""Losses of logits that are sharded over their classes: values and gradients equal the single device's.

The logits are never gathered. The collectives are the same as in hand-written code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_replication,
    loss_parallel,
    parallelize_module,
    vocab_parallel_cross_entropy,
)
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.modes import is_loss_parallel
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.extent import in_gate, on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
IGNORED = -100

#: shape before the classes, shape behind them, reduction, label smoothing, class weights, probabilities as target
CASES = [
    ((6,), (), "mean", 0.0, None, False),
    ((6,), (), "none", 0.1, "plain", False),
    ((6,), (), "sum", 0.0, "sharded", False),
    ((), (), "mean", 0.1, None, False),
    ((2,), (3,), "mean", 0.1, "plain", False),
    ((2,), (3,), "none", 0.0, "replicated", False),
    ((6,), (), "mean", 0.1, "plain", True),
    ((2,), (3,), "none", 0.0, None, True),
    ((), (), "sum", 0.0, "sharded", True),
]


def floats(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def logits_of(*shape: int) -> np.ndarray:
    return floats(*shape) * 3


def classes_for(shape: tuple[int, ...], vocabulary: int, ignored: bool = True) -> np.ndarray:
    target = np.random.default_rng(4).integers(0, vocabulary, shape).astype(np.int32)
    if ignored and target.size > 1:
        target.reshape(-1)[1] = IGNORED
    return target


def probabilities_for(shape: tuple[int, ...], dim: int) -> np.ndarray:
    p = np.exp(floats(*shape, seed=5))
    return p / p.sum(dim, keepdims=True)


def as_target(array: np.ndarray) -> np.ndarray:
    """Return targets in the framework's dtype: int64 for torch, int32 for MindSpore."""
    return array.astype(get_adapter().TARGET_DTYPE) if array.dtype == np.int32 else array


def part_of(array: np.ndarray, mesh: Any, *placements: Any) -> np.ndarray:
    return np.ascontiguousarray(array[get_layout(mesh, placements, array.shape).local_index()])


def weighted(y: Any, like: np.ndarray) -> Any:
    """Return a weighted sum of the elements of ``y``, which every rank has in full."""
    adapter = get_adapter()
    return adapter.weighted_sum(y, adapter.tensor(floats(*like.shape, seed=6)))


def count(comm: CommDebugMode) -> int:
    found = comm.get_comm_counts()
    assert set(found) <= {"all_reduce"}, found
    return found.get("all_reduce", 0)


@spmd.on_mesh()
def cross_entropy(mesh: Any, vocabulary: int) -> list[tuple[int, int, int]]:
    """Check all cases.

    Return for each case three numbers of collectives: in forward, in forward and backward, and in the function form.
    """
    adapter, counts = get_adapter(), []
    for before, behind, reduction, smoothing, weights, soft in CASES:
        what = f"{before} {behind} {reduction} {smoothing} {weights} {soft}"
        shape, dim = (*before, vocabulary, *behind), len(before)
        x = logits_of(*shape)
        target = probabilities_for(shape, dim) if soft else as_target(classes_for((*before, *behind), vocabulary))
        weight = None if weights is None else np.abs(floats(vocabulary, seed=8)) + 0.5
        values: list[np.ndarray] = []

        def single(x: Any) -> Any:
            w = None if weight is None else adapter.tensor(weight)  # noqa: B023
            y = adapter.loss(x, adapter.tensor(target), w, reduction, smoothing)  # noqa: B023
            values.append(adapter.numpy(y))  # noqa: B023
            return weighted(y, values[-1]), y  # noqa: B023

        _, (wanted,) = adapter.value_and_grads(single, [x])
        forward = []

        def sharded(local: Any) -> Any:
            logits = DTensor.from_local(local, mesh, [Shard(dim)], shape=shape)  # noqa: B023
            w, t = None, adapter.tensor(target)  # noqa: B023
            if weight is not None:  # noqa: B023
                w = adapter.tensor(weight)  # noqa: B023
                if weights != "plain":  # noqa: B023
                    w = adapter.tensor(part_of(weight, mesh, S0)) if weights == "sharded" else w  # noqa: B023
                    placed = [S0] if weights == "sharded" else [R]  # noqa: B023
                    w = DTensor.from_local(w, mesh, placed, shape=weight.shape)  # noqa: B023
            if soft:  # noqa: B023
                t = adapter.tensor(part_of(target, mesh, Shard(dim)))  # noqa: B023
                t = DTensor.from_local(t, mesh, [Shard(dim)], shape=shape)  # noqa: B023
            with CommDebugMode() as comm, loss_parallel():
                y = adapter.loss(logits, t, w, reduction, smoothing)  # noqa: B023
            forward.append(count(comm))  # noqa: B023
            assert y.placements == (R,)
            return weighted(y.to_local(), values[0]), y  # noqa: B023

        local = part_of(x, mesh, Shard(dim))
        with CommDebugMode() as both:
            y, (got,) = adapter.value_and_grads(sharded, [local])
        same(adapter.numpy(y), values[0], f"{what}: value")
        same(got, part_of(wanted, mesh, Shard(dim)), f"{what}: gradient")

        def by_function(local: Any) -> Any:
            y = vocab_parallel_cross_entropy(
                local,
                adapter.tensor(part_of(target, mesh, Shard(dim)) if soft else target),  # noqa: B023
                mesh,
                vocab_size=vocabulary,
                weight=None if weight is None else adapter.tensor(weight),  # noqa: B023
                reduction=reduction,  # noqa: B023
                label_smoothing=smoothing,  # noqa: B023
            )
            assert not isinstance(y, DTensor)
            return weighted(y, values[0]), y  # noqa: B023

        with CommDebugMode() as comm:
            y, (got,) = adapter.value_and_grads(by_function, [local])
        same(adapter.numpy(y), values[0], f"{what}: value of the function")
        same(got, part_of(wanted, mesh, Shard(dim)), f"{what}: gradient of the function")
        counts.append((forward[0], count(both), count(comm)))
    return counts


@pytest.mark.parametrize("vocabulary", [8, 5])
@on_ranks(1, 2, 3, 4)
def test_cross_entropy(pool: Any, world_size: int, vocabulary: int) -> None:
    # The largest logit, and all sums together; backward: none.
    many = 2 if world_size > 1 else 0
    for counts in pool.run(world_size, cross_entropy, vocabulary):
        assert counts == [(many, many, many)] * len(CASES)


#: name -> (function of log-probabilities or logits and of target, collectives in forward, and in backward)
CONSUMERS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "log_softmax, nll_loss": (lambda adapter, x, t: adapter.nll(adapter.log_softmax(x, 1), t), 3, 1),
    "log_softmax, nll_loss sum": (lambda adapter, x, t: adapter.nll(adapter.log_softmax(x, 1), t, None, "sum"), 3, 1),
    "log_softmax, nll_loss none": (
        lambda adapter, x, t: adapter.sum(adapter.nll(adapter.log_softmax(x, 1), t, None, "none")),
        3,
        1,
    ),
    "exp of log_softmax": (
        lambda adapter, x, t: adapter.sum(adapter.square(adapter.exp(adapter.log_softmax(x, 1)))),
        3,
        1,
    ),
    "negative entropy": (lambda adapter, x, t: adapter.sum(adapter.softmax(x, 1) * adapter.log_softmax(x, 1)), 5, 2),
    "softmax": (lambda adapter, x, t: adapter.sum(adapter.square(adapter.softmax(x, 1))), 3, 1),
    "logsumexp": (lambda adapter, x, t: adapter.sum(adapter.square(adapter.logsumexp(x, 1))), 2, 0),
    "two losses": (
        lambda adapter, x, t: adapter.loss(x, t) + adapter.sum(adapter.square(adapter.logsumexp(x, 1))),
        4,
        0,
    ),
}


@spmd.on_mesh()
def consumers(mesh: Any, vocabulary: int) -> list[tuple[int, int]]:
    adapter, counts = get_adapter(), []
    x, target = floats(4, vocabulary), as_target(classes_for((4,), vocabulary))
    for name, (function, _, _) in CONSUMERS.items():

        def single(x: Any) -> Any:
            y = function(adapter, x, adapter.tensor(target))  # noqa: B023
            return y, y

        value, (wanted,) = adapter.value_and_grads(single, [x])
        forward = []

        def sharded(local: Any) -> Any:
            logits = DTensor.from_local(local, mesh, [S1], shape=x.shape)
            with CommDebugMode() as comm, loss_parallel():
                y = function(adapter, logits, adapter.tensor(target)).full_tensor()  # noqa: B023
            forward.append(count(comm))  # noqa: B023
            return y, y

        with CommDebugMode() as both:
            y, (got,) = adapter.value_and_grads(sharded, [part_of(x, mesh, S1)])
        same(adapter.numpy(y), adapter.numpy(value), name, tolerance=1e-4)  # MindSpore's own log_softmax is not better
        same(got, part_of(wanted, mesh, S1), f"{name}: gradient", tolerance=1e-4)
        counts.append((forward[0], count(both) - forward[0]))
    return counts


@pytest.mark.parametrize(
    ("world_size", "vocabulary"), in_gate([(1, 5), (2, 8), (3, 8), (4, 5)], [(1, 5), (2, 8), (4, 5)], unpack=True)
)
def test_other_consumers(pool: Any, world_size: int, vocabulary: int) -> None:
    wanted = [(forward, backward) if world_size > 1 else (0, 0) for _, forward, backward in CONSUMERS.values()]
    for counts in pool.run(world_size, consumers, vocabulary):
        assert counts == wanted


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def two_dimensional(mesh: Any, samples: int, vocabulary: int, reduction: str, given: str) -> int:
    """Check samples sharded over dp and classes over tp. The target is plain and full, plain and sharded, or a
    DTensor."""
    adapter = get_adapter()
    x, target = logits_of(samples, vocabulary), as_target(classes_for((samples,), vocabulary))

    def single(x: Any) -> Any:
        y = adapter.loss(x, adapter.tensor(target), None, reduction, 0.1)
        return adapter.sum(y) * 2.0, y

    value, (wanted,) = adapter.value_and_grads(single, [x])
    mine = adapter.tensor(part_of(target, mesh, S0, R))
    forward = []

    def sharded(local: Any) -> Any:
        logits = DTensor.from_local(local, mesh, [S0, S1], shape=x.shape)
        distributed = DTensor.from_local(mine, mesh, [S0, R], shape=target.shape)
        t = {"whole": adapter.tensor(target), "mine": mine, "distributed": distributed}[given]
        with CommDebugMode() as comm, loss_parallel():
            y = adapter.loss(logits, t, None, reduction, 0.1)
        forward.append(count(comm))
        return (adapter.sum(y) * 2.0).full_tensor(), y

    y, (got,) = adapter.value_and_grads(sharded, [part_of(x, mesh, S0, S1)])
    same(adapter.numpy(y), adapter.numpy(value), "value")
    same(got, part_of(wanted, mesh, S0, S1), "gradient")
    return forward[0]


@pytest.mark.parametrize(
    "sizes", in_gate([(6, 8), (3, 5), (1, 5)], [(6, 8), (1, 5)]), ids=["even", "uneven", "one sample"]
)
def test_samples_and_classes_sharded(pool: Any, sizes: tuple[int, int]) -> None:
    # A mean needs the number of all samples: one collective of one number.
    for reduction, given, wanted in [("mean", "mine", 3), ("sum", "whole", 2), ("none", "distributed", 2)]:
        # Of no samples nothing is reduced over the classes.
        lower = wanted if sizes[0] > 1 else wanted - 2
        assert pool.run(4, two_dimensional, *sizes, reduction, given) == [wanted, wanted, lower, lower]


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def all_differentiated(mesh: Any, samples: int, vocabulary: int) -> None:
    """Check gradients of probabilities and of class weights, for DTensors and for the function."""
    adapter = get_adapter()
    arrays = [logits_of(samples, vocabulary), probabilities_for((samples, vocabulary), 1), np.abs(floats(vocabulary))]

    def single(*xs: Any) -> Any:
        return (adapter.loss(*xs, "mean", 0.1),) * 2

    value, wanted = adapter.value_and_grads(single, arrays)
    placements = [(S0, S1), (S0, S1), (R, S0)]

    def sharded(*xs: Any) -> Any:
        given = [
            DTensor.from_local(x, mesh, placed, shape=whole.shape)
            for x, placed, whole in zip(xs, placements, arrays, strict=True)
        ]
        return (adapter.loss(*given, "mean", 0.1).full_tensor(),) * 2

    parts = [part_of(x, mesh, *placed) for x, placed in zip(arrays, placements, strict=True)]
    y, found = adapter.value_and_grads(sharded, parts)
    same(adapter.numpy(y), adapter.numpy(value), "value")
    for got, whole, placed in zip(found, wanted, placements, strict=True):
        same(got, part_of(whole, mesh, *placed), f"gradient placed {placed}")

    def by_function(x: Any, t: Any, w: Any) -> Any:
        options = {"vocab_size": vocabulary, "weight": w, "label_smoothing": 0.1}
        return (vocab_parallel_cross_entropy(x, t, mesh["tp"], **options),) * 2

    y, found = adapter.value_and_grads(by_function, [*(part_of(x, mesh["tp"], S1) for x in arrays[:2]), arrays[2]])
    same(adapter.numpy(y), adapter.numpy(value), "value of the function")
    for got, whole, placed in zip(found, wanted, (S1, S1, R), strict=True):
        same(got, part_of(whole, mesh["tp"], placed), f"gradient of the function placed {placed}")


@pytest.mark.parametrize("sizes", [(3, 5), (1, 5)], ids=["uneven", "one sample"])
def test_gradients_of_targets_and_class_weights(pool: Any, sizes: tuple[int, int]) -> None:
    pool.run(4, all_differentiated, *sizes)


@spmd.on_mesh(2, 2)
def classes_over_both(mesh: Any, vocabulary: int) -> int:
    """Check classes that are sharded over both mesh dimensions."""
    adapter = get_adapter()
    x, target = logits_of(4, vocabulary), as_target(classes_for((4,), vocabulary))
    value, (wanted,) = adapter.value_and_grads(lambda x: (adapter.loss(x, adapter.tensor(target)),) * 2, [x])

    def sharded(local: Any) -> Any:
        with loss_parallel():
            y = adapter.loss(DTensor.from_local(local, mesh, [S1, S1], shape=x.shape), adapter.tensor(target))
        assert y.placements == (R, R)
        return y.to_local(), y

    with CommDebugMode() as comm:
        y, (got,) = adapter.value_and_grads(sharded, [part_of(x, mesh, S1, S1)])
    same(adapter.numpy(y), adapter.numpy(value), "value")
    same(got, part_of(wanted, mesh, S1, S1), "gradient")
    return count(comm)


@pytest.mark.parametrize("vocabulary", in_gate([8, 5], [5]))
def test_classes_over_two_mesh_dimensions(pool: Any, vocabulary: int) -> None:
    assert pool.run(4, classes_over_both, vocabulary) == [4] * 4


@spmd.on_mesh()
def gradients_of_gradients(mesh: Any, vocabulary: int) -> None:
    adapter = get_adapter()
    x, target = floats(3, vocabulary) * 0.5, as_target(classes_for((3,), vocabulary, ignored=False))
    chosen = np.eye(vocabulary, dtype=np.float32)[target]

    def log_p(x: Any) -> Any:  # in elementary operations: MindSpore has no second derivative of its own softmax
        return x - adapter.log(adapter.sum(adapter.exp(x), 1, True))

    plain = {
        "cross_entropy": lambda x: adapter.sum(adapter.square(adapter.sum(log_p(x) * adapter.tensor(chosen), 1, True))),
        "softmax": lambda x: adapter.sum(adapter.square(adapter.exp(log_p(x)))),
        "log_softmax": lambda x: adapter.sum(log_p(x) * adapter.square(log_p(x))),
        "logsumexp": lambda x: adapter.sum(adapter.square(adapter.log(adapter.sum(adapter.exp(x), 1, True)))),
    }
    distributed = {
        "cross_entropy": lambda x: adapter.sum(adapter.square(adapter.loss(x, adapter.tensor(target), None, "none"))),
        "softmax": lambda x: adapter.sum(adapter.square(adapter.softmax(x, 1))),
        "log_softmax": lambda x: adapter.sum(adapter.log_softmax(x, 1) * adapter.square(adapter.log_softmax(x, 1))),
        "logsumexp": lambda x: adapter.sum(adapter.square(adapter.logsumexp(x, 1))),
    }

    def whole(local: Any) -> Any:
        return DTensor.from_local(local, mesh, [S1], shape=x.shape)

    for name in plain:

        def sharded(local: Any) -> Any:
            with loss_parallel():
                return distributed[name](whole(local)).full_tensor()  # noqa: B023

        (wanted,) = adapter.second_order(plain[name], lambda g: adapter.sum(g * g), [x])
        (got,) = adapter.second_order(
            sharded, lambda g: adapter.sum(whole(g) * whole(g)).full_tensor(), [part_of(x, mesh, S1)]
        )
        same(got, part_of(wanted, mesh, S1), f"{name}: second-order gradient", tolerance=1e-4)


@pytest.mark.parametrize(("world_size", "vocabulary"), in_gate([(2, 8), (4, 5)], [(4, 5)], unpack=True))
def test_gradients_of_gradients(pool: Any, world_size: int, vocabulary: int) -> None:
    pool.run(world_size, gradients_of_gradients, vocabulary)


@spmd.on_mesh()
def extremes(mesh: Any) -> None:
    """Check huge logits, and classes masked with minus infinity, even all classes of one rank.

    The reference is NumPy's, because MindSpore gives no number for infinite logits.
    """
    adapter = get_adapter()
    x = logits_of(4, 8)
    x[0] += 1e4
    x[1] -= 1e4
    x[2, 1] = 1e4
    x[3, 4:] = -np.inf
    target = as_target(np.array([1, 7, 2, 0], np.int32))
    exact = x.astype(np.float64) - x.max(1, keepdims=True)
    log_p = exact - np.log(np.exp(exact).sum(1, keepdims=True))
    value = -log_p[np.arange(4), target].mean()
    wanted = (np.exp(log_p) - np.eye(8)[target]) / 4

    def sharded(local: Any) -> Any:
        y = vocab_parallel_cross_entropy(local, adapter.tensor(target), mesh)
        return y, y

    y, (got,) = adapter.value_and_grads(sharded, [part_of(x, mesh, S1)])
    assert np.isfinite(adapter.numpy(y)) and np.isfinite(got).all()
    same(adapter.numpy(y), value, "value")
    same(got, part_of(wanted, mesh, S1), "gradient")


def test_extremes(pool: Any) -> None:
    pool.run(2, extremes)


@spmd.on_mesh()
def nothing_counts(mesh: Any, vocabulary: int) -> None:
    """Check targets that are all ignored: the mean is NaN, as on a single device, and the gradient is zero."""
    adapter = get_adapter()
    x, target = logits_of(3, vocabulary), as_target(np.full(3, IGNORED, np.int32))
    weight = np.abs(floats(vocabulary, seed=8)) + 0.5

    def of_logits(local: Any, weighted: bool, smoothing: float) -> Any:
        w = adapter.tensor(weight) if weighted else None
        with loss_parallel():
            logits = DTensor.from_local(local, mesh, [S1], shape=x.shape)
            return adapter.loss(logits, adapter.tensor(target), w, "mean", smoothing).to_local()

    def of_function(local: Any, weighted: bool, smoothing: float) -> Any:
        w = adapter.tensor(weight) if weighted else None
        options = {"vocab_size": vocabulary, "weight": w, "label_smoothing": smoothing}
        return vocab_parallel_cross_entropy(local, adapter.tensor(target), mesh, **options)

    def of_log_softmax(local: Any, weighted: bool, smoothing: float) -> Any:
        w = adapter.tensor(weight) if weighted else None
        with loss_parallel():
            logits = DTensor.from_local(local, mesh, [S1], shape=x.shape)
            return adapter.nll(adapter.log_softmax(logits, 1), adapter.tensor(target), w).to_local()

    for weighted in (False, True):
        for smoothing in (0.0, 0.1):
            for loss in (of_logits, of_function, of_log_softmax):
                value, (got,) = adapter.value_and_grads(
                    lambda local: (loss(local, weighted, smoothing),) * 2,  # noqa: B023
                    [part_of(x, mesh, S1)],
                )
                what = f"{loss.__name__} {weighted} {smoothing}"
                assert np.isnan(adapter.numpy(value)), what
                np.testing.assert_array_equal(got, np.zeros_like(got), what)


def test_all_targets_ignored(pool: Any) -> None:
    pool.run(3, nothing_counts, 5)


@spmd.on_mesh()
def head(mesh: Any, vocabulary: int) -> int:
    """Check a column-parallel head with sharded output, and the loss module. Backward runs outside the context."""
    adapter = get_adapter()
    x, target = floats(4, 6), as_target(classes_for((4,), vocabulary))
    single, sharded = (adapter.load(adapter.linear_module(6, vocabulary), np.random.default_rng(5)) for _ in range(2))
    parallelize_module(sharded, mesh, ColwiseParallel(use_local_output=False))
    module = adapter.loss_module(reduction="mean", label_smoothing=0.1)

    def reference(x: Any) -> Any:
        return (adapter.call(module, adapter.call(single, x), adapter.tensor(target)),) * 2

    def distributed(x: Any) -> Any:
        logits = adapter.call(sharded, x)
        with loss_parallel():
            return (adapter.call(module, logits, adapter.tensor(target)).full_tensor(),) * 2

    value, grad, grads = adapter.model_value_and_grads(single, reference, x)
    with CommDebugMode() as comm:
        got, got_grad, got_grads = adapter.model_value_and_grads(sharded, distributed, x)
    same(adapter.numpy(got), adapter.numpy(value), "value")
    same(got_grad, grad, "gradient of the input")
    for name in grads:
        same(adapter.numpy(got_grads[name]), adapter.numpy(grads[name]), name)
    with CommDebugMode() as reading:
        adapter.numpy(got_grads["weight"])
    assert reading.get_comm_counts() == {"all_gather": 1}
    return count(comm)


@pytest.mark.parametrize("vocabulary", [8, 5])
def test_head_and_loss(pool: Any, vocabulary: int) -> None:
    # Two for the loss, one for the gradient of the input.
    assert pool.run(4, head, vocabulary) == [3] * 4


@spmd.on_mesh()
def last_dimension(mesh: Any, vocabulary: int) -> None:
    """Check logits of shape (batch, sequence, vocabulary)."""
    adapter = get_adapter()
    x, target = logits_of(2, 3, vocabulary), as_target(classes_for((2, 3), vocabulary))
    weight = np.abs(floats(vocabulary, seed=8)) + 0.5

    def single(x: Any) -> Any:
        flat = adapter.reshape(x, (6, vocabulary))
        return (adapter.loss(flat, adapter.tensor(target.reshape(-1)), adapter.tensor(weight), "mean", 0.1),) * 2

    value, (wanted,) = adapter.value_and_grads(single, [x])

    def sharded(local: Any) -> Any:
        return (
            vocab_parallel_cross_entropy(
                local,
                adapter.tensor(target),
                mesh,
                dim=-1,
                vocab_size=vocabulary,
                weight=adapter.tensor(weight),
                label_smoothing=0.1,
            ),
        ) * 2

    y, (got,) = adapter.value_and_grads(sharded, [part_of(x, mesh, Shard(2))])
    same(adapter.numpy(y), adapter.numpy(value), "value")
    same(got, part_of(wanted, mesh, Shard(2)), "gradient")


@pytest.mark.parametrize(("world_size", "vocabulary"), [(2, 8), (4, 5)])
def test_classes_in_the_last_dimension(pool: Any, world_size: int, vocabulary: int) -> None:
    pool.run(world_size, last_dimension, vocabulary)


@spmd.on_mesh()
def context(mesh: Any) -> None:
    """Check the effect of the context, nested contexts, and the state after an exception."""
    adapter = get_adapter()
    x, target = logits_of(4, 8), adapter.tensor(as_target(classes_for((4,), 8)))
    logits = distribute_tensor(adapter.tensor(x), mesh, [S1])
    wanted = adapter.numpy(adapter.loss(adapter.tensor(x), target))

    def refused() -> None:
        with pytest.raises(ValueError, match="plain tensor"):
            adapter.loss(logits, target)

    refused()
    with loss_parallel():
        with loss_parallel():
            same(adapter.numpy(adapter.loss(logits, target)), wanted, "nested")
        same(adapter.numpy(adapter.loss(logits, target)), wanted, "after the inner one")
        with pytest.raises(ValueError, match="plain tensor"):
            _ = logits + adapter.tensor(x)
    assert not is_loss_parallel()
    refused()  # whatever is cached by now
    with pytest.raises(ZeroDivisionError), loss_parallel():
        raise ZeroDivisionError
    assert not is_loss_parallel()
    with implicit_replication():
        same(adapter.numpy(adapter.loss(logits, target)), wanted, "implicit replication")
    refused()
    placed = DTensor.from_local(target, mesh, [R])
    with CommDebugMode() as comm:
        same(adapter.numpy(adapter.loss(logits, placed)), wanted, "outside")
    assert count(comm) == 2


def test_context(pool: Any) -> None:
    pool.run(2, context)


@spmd.on_mesh()
def mistakes(mesh: Any) -> None:
    adapter = get_adapter()
    x, good = adapter.tensor(floats(4, 3)), as_target(classes_for((4,), 6, ignored=False))
    target = adapter.tensor(good)

    def refuses(error: type[Exception], words: str, *args: Any, **options: Any) -> None:
        with CommDebugMode() as comm, pytest.raises(error, match=words):
            vocab_parallel_cross_entropy(*args, **options)
        assert comm.get_total_counts() == 0

    refuses(
        ValueError, r"reduction must be one of 'none', 'mean', 'sum', got 'median'", x, target, mesh, reduction="median"
    )
    refuses(ValueError, "label_smoothing must be between 0 and 1, got 1.5", x, target, mesh, label_smoothing=1.5)
    refuses(ValueError, r"the target has shape \(2,\)", x, adapter.tensor(good[:2]), mesh)
    refuses(
        ValueError,
        r"weight must have one entry for each of 6 classes, got shape \(3,\)",
        x,
        target,
        mesh,
        weight=adapter.tensor(floats(3)),
    )
    refuses(ValueError, r"vocab_size=", x, target, mesh, vocab_size=7)
    # Ranks compare their arguments once; each looks at its own part always.
    vocab_parallel_cross_entropy(x, target, mesh, vocab_size=6)
    refuses(ValueError, "holds 3 of 6 classes", adapter.tensor(floats(4, 2)), target, mesh, vocab_size=6)
    refuses(ValueError, r"floating point", target, target, mesh)
    refuses(TypeError, "must be a plain local tensor", distribute_tensor(x, mesh, [S1]), target, mesh)
    refuses(TypeError, "must be a tensor, got int", x, 3, mesh)
    for wrong in (6, -1):
        bad = good.copy()
        bad[0] = wrong
        logits, placed = DTensor.from_local(x, mesh, [S1]), adapter.tensor(bad)
        losses = [
            lambda t=placed: vocab_parallel_cross_entropy(x, t, mesh),
            lambda t=placed, logits=logits: adapter.loss(logits, t),
            lambda t=placed, logits=logits: adapter.nll(adapter.log_softmax(logits, 1), t),
        ]
        for loss in losses:
            if mesh.device_type == "cpu":
                with pytest.raises(IndexError, match="between 0 and 5"), loss_parallel():
                    loss()
            else:  # looking would make the host wait for the device
                with loss_parallel():
                    assert np.isnan(adapter.numpy(loss()))
    for options in ({"reduction": "median"}, {"smoothing": 1.5}):
        if options == {"smoothing": 1.5} and not adapter.REFUSES_SMOOTHING:
            continue  # the framework's own function takes any number
        with pytest.raises((ValueError, RuntimeError, TypeError)), loss_parallel():
            adapter.loss(logits, target, **options)


def test_mistakes(pool: Any) -> None:
    pool.run(2, mistakes)


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def mesh_of_two(mesh: Any) -> None:
    adapter = get_adapter()
    x, target = adapter.tensor(floats(4, 3)), adapter.tensor(as_target(classes_for((4,), 6)))
    with pytest.raises(ValueError, match=r"a 1-D mesh.*mesh\['tp'\]"):
        vocab_parallel_cross_entropy(x, target, mesh)
    assert vocab_parallel_cross_entropy(x, target, mesh["tp"]).shape == ()


def test_mesh_with_two_dimensions(pool: Any) -> None:
    pool.run(4, mesh_of_two)


@spmd.on_mesh()
def differs(mesh: Any) -> None:
    """Check unequal shards without vocab_size: every rank raises in the first call."""
    from hyper_parallel.core.rules.class_shards import _COMPARED

    _COMPARED.pop(mesh, None)
    adapter = get_adapter()
    target = adapter.tensor(as_target(np.zeros(4, np.int32)))
    with pytest.raises(ValueError, match=r"vocab_size="):
        vocab_parallel_cross_entropy(adapter.tensor(floats(4, 3 - mesh.get_local_rank())), target, mesh)


def test_unequal_parts_without_their_sum(pool: Any) -> None:
    pool.run(2, differs)
