"""Ten steps of training with the features of loops besides an optimizer equal those of the unsharded network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import CommDebugMode, DTensor
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import VOCABULARY, batch, loss_of, make_net, on_first_rank, whole

STEPS = 10
OPTIMIZERS: dict[str, Callable[[list], Any]] = {
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01, weight_decay=0.01),
    "SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9, nesterov=True),
}


@dataclass(frozen=True)
class Features:
    """Options of a training loop.

    Attributes:
        clip: maximal global norm of the gradients.
        recompute: whether the feed-forward layers are computed again in backward.
        micro_batches: over how many gradients are accumulated.
        frozen: parameters whose name starts with one of these are frozen before the network is parallelized.
        schedule: learning rate at each step.
        scale: initial scale of a dynamic loss scaler; the loss of step 3 is infinite.
        reload: whether a new optimizer takes over the state in the middle.
        half: the part that computes in float16: "to_float" for the feed-forward layers, or a level of
            `auto_mixed_precision`.
    """

    clip: float | None = None
    recompute: bool = False
    micro_batches: int = 1
    frozen: tuple[str, ...] = ()
    schedule: Any = None
    scale: float | None = None
    reload: bool = False
    half: str = ""


FEATURES = {
    "recompute": Features(recompute=True, reload=True),
    "accumulation": Features(micro_batches=3, clip=0.3),
    "frozen": Features(frozen=("embedding", "down")),
    "schedule": Features(schedule=lambda: nn.WarmUpLR(0.02, 5)),
    "half precision, layers": Features(half="to_float", scale=64.0),
    "half precision, O2": Features(half="O2", scale=64.0),
    "half precision, O3": Features(half="O3"),
    "everything": Features(clip=0.3, recompute=True, micro_batches=2, frozen=("up.bias",), scale=16.0),
}


def build(mesh: Any, features: Features) -> Any:
    net = make_net(mesh, frozen=features.frozen)
    if features.recompute:
        net.up.recompute()
        net.down.recompute()
    if features.half == "to_float":
        net.up.to_float(ms.float16)
        net.down.to_float(ms.float16)
    elif features.half:
        net = ms.amp.auto_mixed_precision(net, features.half, ms.float16)
    return net


def train(net: Any, name: str, features: Features) -> list[float]:
    """Losses, summed over the micro batches of a step."""
    parameters = list(net.trainable_params())
    optimizer = OPTIMIZERS[name](parameters)
    if features.schedule:
        optimizer = nn.SGD(parameters, features.schedule(), momentum=0.9)
    scaler = ms.amp.DynamicLossScaler(features.scale or 1.0, 2, 100)
    losses = []
    for step in range(STEPS):
        if features.reload and step == STEPS // 2:
            state = {p.name: p for p in optimizer.get_parameters()}
            optimizer = OPTIMIZERS[name](parameters)
            assert ms.load_param_into_net(optimizer, state) == ([], [])
        total, gradients = 0.0, None
        for micro_batch in range(features.micro_batches):
            factor = float("inf") if features.scale and step == 3 else 1.0 / features.micro_batches

            def scaled(micro_batch: int = micro_batch, factor: float = factor) -> Any:
                loss = loss_of(net, micro_batch)() * factor
                return scaler.scale(loss) if features.scale else loss

            loss, new = value_and_grad(scaled, None, parameters)()
            gradients = new if gradients is None else tuple(a + b for a, b in zip(gradients, new, strict=True))
            total += float(whole(loss)) / (float(scaler.scale_value) if features.scale else 1.0)
        losses.append(total)
        if features.scale:
            gradients = scaler.unscale(gradients)
            finite = bool(ms.amp.all_finite(gradients))
            scaler.adjust(Tensor(finite))
            if not finite:
                continue
        if features.clip:
            gradients = ops.clip_by_global_norm(gradients, features.clip)
        optimizer(gradients)
    if features.scale:
        assert float(scaler.scale_value) == features.scale / 2
    return losses


@dataclass(frozen=True)
class Trained:
    """Losses of the steps, and the final value of each parameter."""

    losses: list[float]
    values: list[np.ndarray]


def trained(mesh: Any, name: str, features: Features) -> tuple[Any, Trained]:
    """A network after ten steps."""
    net = build(mesh, features)
    losses = train(net, name, features)
    return net, Trained(losses, [whole(p) for p in net.get_parameters()])


def differences(got: Trained, wanted: Trained, name: str, half: bool) -> list[str]:
    # Adam divides gradients by their size, and so makes rounding errors of the small ones large.
    tolerance = 1e-3 if not half else 5e-2 if name == "SGD" else 0.25
    problems = []
    if not np.allclose(got.losses, wanted.losses, rtol=5e-2 if half else 1e-4, atol=1e-5):
        problems.append(f"{name}: losses {got.losses} in place of {wanted.losses}")
    if abs(wanted.losses[0] - wanted.losses[-1]) < 1e-3:
        problems.append(f"{name}: nothing was trained")
    for p, a, b in zip(make_net().get_parameters(), got.values, wanted.values, strict=True):
        error, size = np.linalg.norm(a - b), np.linalg.norm(b - whole(p))
        if not error <= tolerance * size:
            problems.append(f"{name}: {p.name} {error} of {size}")
    return problems


@on_mesh()
def ten_steps(mesh: Any, what: str, names: tuple[str, ...] = tuple(OPTIMIZERS)) -> list[str]:
    features = FEATURES[what]
    problems = []
    for name in names:
        net, got = trained(mesh, name, features)
        wanted = on_first_rank(mesh, lambda name=name: trained(None, name, features)[1])
        found = differences(got, wanted, name, bool(features.half))
        if found:
            # MindSpore trains the plain network wrongly once in a great many runs; no rank waits for another here.
            found = differences(got, trained(None, name, features)[1], name, bool(features.half))
        problems += found
        nets = build(None, features), net, make_net()
        for p, q, old in zip(*(n.get_parameters() for n in nets), strict=True):
            frozen = p.name.startswith(features.frozen or "-")
            if p.requires_grad is not q.requires_grad or (frozen and (whole(q) != whole(old)).any()):
                problems.append(f"{name}: {p.name} is frozen")
            if "norm" not in p.name and not isinstance(q, DTensor):
                problems.append(f"{name}: {p.name} is not distributed any more")
    return problems


@pytest.mark.parametrize(
    "what", in_gate(FEATURES, ("accumulation", "schedule", "half precision, layers", "everything"))
)
def test_ten_steps(pool: Any, what: str) -> None:
    names = tuple(OPTIMIZERS) if everything() else ("AdamWeightDecay",)
    if FEATURES[what].schedule or FEATURES[what].half == "O3":
        names = ("SGD",)
    assert pool.run(2, ten_steps, what, names) == [[], []]


def test_ten_steps_on_uneven_shards(pool: Any) -> None:
    assert pool.run(3, ten_steps, "everything", ("AdamWeightDecay",)) == [[]] * 3


@on_mesh()
def clipping(mesh: Any) -> list[Any]:
    """One all-reduce for the norm, of gradients of distributed and of plain parameters together."""
    results = []
    for net in (make_net(), make_net(mesh)):
        gradients = value_and_grad(loss_of(net), None, net.trainable_params())()[1]
        with CommDebugMode() as comm:
            clipped = ops.clip_by_global_norm(gradients, 0.1)
        results.append([whole(g) for g in clipped])
        same = all(type(c) is type(g) for c, g in zip(clipped, gradients, strict=True))
    norm = float(np.sqrt(sum((g**2).sum() for g in results[1])))
    equal = all(np.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*results, strict=True))
    return [comm.get_comm_counts(), equal, same, round(norm, 5)]


def test_clipping(pool: Any) -> None:
    assert pool.run(2, clipping) == [[{"all_reduce": 1}, True, True, 0.1]] * 2


@on_mesh()
def recompute_of_a_function(mesh: Any) -> bool:
    ids, targets = batch()
    results = []
    for net in (make_net(), make_net(mesh)):

        def loss(net: Any = net) -> Any:
            return ops.cross_entropy(ms.recompute(net, ids).reshape(-1, VOCABULARY), targets)

        results.append(value_and_grad(loss, None, net.trainable_params())())
    (wanted, wanted_gradients), (got, gradients) = results
    pairs = zip((got, *gradients), (wanted, *wanted_gradients), strict=True)
    return all(np.allclose(whole(a), whole(b), rtol=1e-4, atol=1e-5) for a, b in pairs)


def test_recompute_of_a_function(pool: Any) -> None:
    assert pool.run(2, recompute_of_a_function) == [True, True]
