"""MindSpore's losses of sharded classes, under all their names: as on plain tensors, without gathering the logits."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import ColwiseParallel, CommDebugMode, DTensor, Shard, loss_parallel, parallelize_module
from hyper_parallel.testing.spmd import on_mesh

SAMPLES, CLASSES = 4, 6
TARGET = np.array([1, 5, -100, 0], np.int32)
ALL_COUNT = np.array([1, 5, 3, 0], np.int32)
WEIGHT = np.linspace(0.5, 2.0, CLASSES).astype(np.float32)

#: a loss on DTensors, the same on plain tensors (mint's have no kernel on CPU), its target, and its all-reduces
LOSSES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any], np.ndarray, int]] = {
    "mint.nn.functional.cross_entropy": (
        lambda x, t: mint.nn.functional.cross_entropy(x, t, label_smoothing=0.1),
        lambda x, t: ops.cross_entropy(x, t, label_smoothing=0.1),
        TARGET,
        2,
    ),
    "mint.nn.CrossEntropyLoss": (
        lambda x, t: mint.nn.CrossEntropyLoss(weight=Tensor(WEIGHT))(x, t),
        lambda x, t: ops.cross_entropy(x, t, Tensor(WEIGHT)),
        TARGET,
        2,
    ),
    "keywords": (
        lambda x, t: ops.cross_entropy(input=x, target=t, reduction="sum", ignore_index=5),
        lambda x, t: ops.cross_entropy(x, t, reduction="sum", ignore_index=5),
        ALL_COUNT,
        2,
    ),
    "nn.SoftmaxCrossEntropyWithLogits, sparse": (
        lambda x, t: nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")(x, t),
        lambda x, t: nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")(x, t),
        ALL_COUNT,
        2,
    ),
    "nn.SoftmaxCrossEntropyWithLogits": (
        lambda x, t: nn.SoftmaxCrossEntropyWithLogits()(x, t),
        lambda x, t: nn.SoftmaxCrossEntropyWithLogits()(x, t),
        np.eye(CLASSES, dtype=np.float32)[ALL_COUNT],
        2,
    ),
    "nn.NLLLoss": (
        lambda x, t: nn.NLLLoss(weight=Tensor(WEIGHT))(nn.LogSoftmax(1)(x), t),
        lambda x, t: nn.NLLLoss(weight=Tensor(WEIGHT))(nn.LogSoftmax(1)(x), t),
        TARGET,
        4,
    ),
    "mint.nn.functional.nll_loss": (
        lambda x, t: mint.nn.functional.nll_loss(ops.log_softmax(x, 1), t, reduction="none"),
        lambda x, t: ops.nll_loss(ops.log_softmax(x, 1), t, reduction="none"),
        TARGET,
        3,
    ),
    "Tensor.logsumexp": (
        lambda x, t: x.logsumexp(1),
        lambda x, t: ops.logsumexp(x, 1),
        TARGET,
        2,
    ),
}


def value_and_grad(function: Callable[[Any], Any], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values = []

    def scalar(x: Any) -> Any:
        y = function(x)
        values.append(y.asnumpy())
        return (y * y).sum()

    grad = ms.grad(scalar)(Tensor(x))
    return values[-1], grad.asnumpy()


@on_mesh()
def losses(mesh: Any, dtype: type) -> list[str]:
    problems = []
    tolerance = 1e-4 if dtype is np.float32 else 5e-3
    x = np.random.default_rng(0).standard_normal((SAMPLES, CLASSES)).astype(dtype)
    half = CLASSES // 2
    mine = slice(half * mesh.get_local_rank(), half * mesh.get_local_rank() + half)
    for name, (distributed, plain, target, wanted_count) in LOSSES.items():
        wanted, wanted_grad = value_and_grad(lambda x: plain(x, Tensor(target)), x.astype(np.float32))  # noqa: B023
        counts = []

        def sharded(local: Any) -> Any:
            with CommDebugMode() as comm, loss_parallel():
                y = distributed(DTensor.from_local(local, mesh, [Shard(1)]), Tensor(target))  # noqa: B023
            counts.append(comm.get_comm_counts())  # noqa: B023
            return y.to_local()

        got, got_grad = value_and_grad(sharded, np.ascontiguousarray(x[:, mine]))
        if counts != [{"all_reduce": wanted_count}]:
            problems.append(f"{name}: {counts}")
        if got.dtype != dtype or not np.allclose(got, wanted, atol=tolerance, rtol=tolerance):
            problems.append(f"{name}: {got}, wanted {wanted}")
        if not np.allclose(got_grad, wanted_grad[:, mine], atol=tolerance, rtol=tolerance):
            problems.append(f"{name}: gradient {got_grad}, wanted {wanted_grad[:, mine]}")
    return problems


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_losses(pool: Any, dtype: type) -> None:
    assert pool.run(2, losses, dtype) == [[]] * 2


@on_mesh()
def elsewhere(mesh: Any) -> None:
    """Logits that were not computed with a head are not its part, even if they have as many classes."""
    x, target = Tensor(np.ones((SAMPLES, 4), np.float32)), Tensor(TARGET)
    head, other = parallelize_module(Headed(), mesh, {"head": ColwiseParallel()}), nn.Dense(4, CLASSES)
    parameters = ms.ParameterTuple([*head.trainable_params(), *other.trainable_params()])

    def loss(of_head: bool) -> Any:
        mine, theirs = head(x), other(x)
        return ops.cross_entropy(mine.astype(ms.float32) * theirs if of_head else theirs, target)

    with pytest.raises(ValueError, match="shard of the 12 output features of 'head'"):
        ops.cross_entropy(other(x), target)  # nothing is recorded
    for _ in range(2):
        assert np.isfinite(ms.value_and_grad(loss, None, parameters)(False)[0].asnumpy())
        with pytest.raises(ValueError, match="shard of the 12 output features of 'head'"):
            ms.value_and_grad(loss, None, parameters)(True)


def jitted(head: Any) -> Callable:
    @ms.jit
    def function(x: Any) -> Any:
        return head(x) * 2

    function(Tensor(np.ones((SAMPLES, 4), np.float32)))
    return function


@on_mesh()
def compiled_before(mesh: Any) -> None:
    """A head that was compiled counts while the program has it, or a function that calls it, and no longer."""
    logits, target = Tensor(np.ones((SAMPLES, CLASSES), np.float32)), Tensor(TARGET)
    for keep in ("head", "function"):
        net = parallelize_module(Headed(), mesh, {"head": ColwiseParallel()})
        function, alive = jitted(net), weakref.ref(net.head)
        held = {"head": net.head, "function": function}[keep]
        del net, function
        with pytest.raises(ValueError, match="shard of the 12 output features of 'head'"):
            ops.cross_entropy(logits, target)
        del held
        gc.collect()
        assert alive() is None, f"the {keep} is kept"
        assert np.isfinite(ops.cross_entropy(logits, target).asnumpy())


class Headed(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Dense(4, 2 * CLASSES)

    def construct(self, x: Any) -> Any:
        return self.head(x)


def test_logits_from_elsewhere(pool: Any) -> None:
    pool.run(2, elsewhere)


def test_heads_that_were_compiled_before(pool: Any) -> None:
    pool.run(2, compiled_before)


@ms.jit
def compiled(x: Any, t: Any) -> Any:
    return ops.cross_entropy(x, t)


@on_mesh()
def graphs(mesh: Any) -> None:
    """The functions that are replaced still compile, and are one object under every name."""
    x, t = Tensor(np.zeros((2, 4), np.float32)), Tensor(np.array([0, 3], np.int32))
    assert compiled(x, t).asnumpy() == pytest.approx(np.log(4))
    functional = importlib.import_module("mindspore.ops.functional")
    assert functional.cross_entropy is ops.cross_entropy is ops.function.nn_func.cross_entropy
    assert ops.cross_entropy.__name__ == "cross_entropy" and ops.cross_entropy.__doc__


def test_graphs(pool: Any) -> None:
    pool.run(1, graphs)
