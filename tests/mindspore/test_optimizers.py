"""Optimizers on distributed parameters: ten steps equal those of the unsharded network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import ColwiseParallel, DTensor, Shard, distribute_tensor, parallelize_module
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import everything, in_gate, on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import FEATURES, error_of, loss_of, make_net, on_first_rank, rows_of, whole

#: Each kind of gradient at least twice, and a schedule of learning rates on its way.
STEPS = 5 if everything() else 4
optim = ms.experimental.optim

#: Those that work on CPU with plain parameters.
OPTIMIZERS: dict[str, Callable[[list], Any]] = {
    "SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
    "Adam": lambda p: nn.Adam(p, 0.01),
    "Adam, amsgrad": lambda p: nn.Adam(p, 0.01, use_amsgrad=True),
    "Adam, nesterov": lambda p: nn.Adam(p, 0.01, use_nesterov=True),
    "Adam, lazy": lambda p: nn.Adam(p, 0.01, use_lazy=True),
    "Adam, offload": lambda p: nn.Adam(p, 0.01, use_offload=True),
    "LazyAdam": lambda p: nn.LazyAdam(p, 0.01),
    "AdamOffload": lambda p: nn.AdamOffload(p, 0.01),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01, weight_decay=0.01),
    "groups, schedule": lambda p: nn.Adam(
        [{"params": p[:3], "weight_decay": 0.01}, {"params": p[3:], "lr": 0.02}],
        nn.cosine_decay_lr(0.001, 0.02, 10, 5, 2),
    ),
    "Adagrad": lambda p: nn.Adagrad(p, 0.1),
    "ProximalAdagrad": lambda p: nn.ProximalAdagrad(p, learning_rate=0.1, l1=0.001),
    "Adadelta": lambda p: nn.Adadelta(p, 1.0),
    "AdaMax": lambda p: nn.AdaMax(p, 0.01),
    "ASGD": lambda p: nn.ASGD(p, 0.1),
    "FTRL": lambda p: nn.FTRL(p, learning_rate=0.1),
    "RMSProp": lambda p: nn.RMSProp(p, 0.01, centered=True),
    "Rprop": lambda p: nn.Rprop(p, 0.01),
    "experimental SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "experimental Adam": lambda p: optim.Adam(p, 0.01),
    "experimental AdamW": lambda p: optim.AdamW(p, 0.01),
    "experimental Adadelta": lambda p: optim.Adadelta(p, 1.0),
    "experimental Adagrad": lambda p: optim.Adagrad(p, 0.1),
    "experimental Adamax": lambda p: optim.Adamax(p, 0.01),
    "experimental ASGD": lambda p: optim.ASGD(p, 0.1),
    "experimental NAdam": lambda p: optim.NAdam(p, 0.01),
    "experimental RAdam": lambda p: optim.RAdam(p, 0.01),
    "experimental RMSprop": lambda p: optim.RMSprop(p, 0.01),
    "experimental Rprop": lambda p: optim.Rprop(p, 0.01),
}


class TrustRatio(nn.Optimizer):
    """An optimizer of a user's own, which looks at norms of whole parameters."""

    def __init__(self, params: Any, learning_rate: float) -> None:
        super().__init__(learning_rate, params)
        self.momentum = self.parameters.clone(prefix="momentum", init="zeros")

    def construct(self, gradients: Any) -> Any:
        lr = self.get_lr()
        for p, m, g in zip(self.parameters, self.momentum, gradients, strict=True):
            ratio = ops.sqrt(ops.square(p).sum()) / (ops.sqrt(ops.square(g).sum()) + 1e-6)
            ops.assign(m, m * 0.9 + g * ratio)
            ops.assign(p, p - lr * m)
        return True


class HalvedAdam(nn.Adam):
    """A class of a user's own, whose parent's step is compiled."""

    def construct(self, gradients: Any) -> Any:
        return super().construct(tuple(g / 2 for g in gradients))


#: Those that look at more than an element, or may.
COUPLED: dict[str, Callable[[list], Any]] = {
    "AdaFactor": lambda p: nn.AdaFactor(p),
    "AdaFactor, learning rate": lambda p: nn.AdaFactor(
        p, 0.03, scale_parameter=False, relative_step=False, weight_decay=0.1, beta1=0.0
    ),
    "one's own": lambda p: TrustRatio(p, 0.01),
    "derived": lambda p: HalvedAdam(p, 0.01, weight_decay=0.01),
}


# ---------------------------------------------------------------------- the same gradients
@on_mesh()
def same_gradients(mesh: Any, name: str, steps: int = 3) -> list[bool]:
    """Steps with the unsharded network's gradients, as DTensors and as plain local tensors in turn: the same bits."""
    reference, net = make_net(), make_net(mesh)
    started = [whole(p).copy() for p in reference.get_parameters()]
    params, wanted_params = list(net.trainable_params()), list(reference.trainable_params())
    make = {**OPTIMIZERS, **COUPLED}[name]
    optimizer, wanted_optimizer = make(params), make(wanted_params)
    for step in range(steps):
        gradients = ms.grad(loss_of(reference), None, reference.trainable_params())()
        parts = []
        for p, g in zip(params, gradients, strict=True):
            if not isinstance(p, DTensor):
                parts.append(g)
            elif step % 2:
                parts.append(rows_of(g.asnumpy(), p._layout))
            else:
                parts.append(distribute_tensor(g, mesh, p.placements))
        wanted_optimizer(gradients)
        optimizer(tuple(parts))
    moments = [p for p in optimizer.get_parameters() if p.name.endswith("up.weight") and len(p.shape) == 2]
    equal = np.array_equal if name in OPTIMIZERS else lambda a, b: np.allclose(a, b, rtol=1e-5, atol=1e-6)
    return [
        all(equal(whole(p), whole(q)) for p, q in zip(params, wanted_params, strict=True)),
        any(not np.array_equal(whole(p), old) for p, old in zip(reference.get_parameters(), started, strict=True)),
        all(isinstance(m, DTensor) and m.shape == (2 * FEATURES, FEATURES) for m in moments),
    ]


@pytest.mark.parametrize(
    "name",
    in_gate(
        ["SGD", "AdamWeightDecay", "experimental AdamW", "AdaFactor", "one's own"],
        ["AdamWeightDecay", "experimental AdamW", "AdaFactor"],
    ),
)
def test_same_gradients(pool: Any, name: str) -> None:
    assert pool.run(2, same_gradients, name) == [[True] * 3] * 2


# ---------------------------------------------------------------------- training
def trained(net: Any, name: str) -> tuple[list[float], list[np.ndarray]]:
    """Train with the network's own gradients, by turns of the library's function and of MindSpore's.

    Returns:
        The losses, and by how much each parameter has changed.
    """
    started = [whole(p).copy() for p in net.trainable_params()]
    optimizer = {**OPTIMIZERS, **COUPLED}[name](list(net.trainable_params()))
    steps = [f(loss_of(net), None, net.trainable_params()) for f in (value_and_grad, ms.value_and_grad)]
    losses = []
    for i in range(STEPS):
        loss, gradients = steps[i % 2]()
        losses.append(float(whole(loss)))
        optimizer(gradients)
    return losses, [whole(p) - s for p, s in zip(net.trainable_params(), started, strict=True)]


@on_mesh()
def several_steps(mesh: Any, name: str) -> list[str]:
    """Each network with its own gradients, DTensors and plain local ones in turn. The result lists the parameters that
    are far from the reference, measured by the way that it went."""
    net = make_net(mesh)
    reference, found = on_first_rank(mesh, lambda: trained(make_net(), name)), trained(net, name)
    losses, ways = zip(reference, found, strict=True)
    problems = [] if np.allclose(*losses, rtol=1e-4, atol=1e-5) else [f"losses {losses}"]
    if abs(losses[0][0] - losses[0][-1]) < 1e-3:
        problems.append("nothing was trained")
    for p, wanted, got in zip(net.trainable_params(), *ways, strict=True):
        if not np.linalg.norm(got - wanted) <= 1e-3 * np.linalg.norm(wanted):
            problems.append(f"{p.name}: {np.linalg.norm(got - wanted)} of {np.linalg.norm(wanted)}")
    return problems


#: One of each kind of kernel and of state; the others are nightly.
KINDS = (
    *("SGD", "Adam, amsgrad", "AdamWeightDecay", "groups, schedule", "Adagrad", "FTRL", "RMSProp"),
    *("experimental AdamW", "experimental NAdam", "AdaFactor, learning rate", "one's own", "derived"),
)


@pytest.mark.parametrize("name", in_gate([*OPTIMIZERS, *COUPLED], KINDS))
def test_several_steps(pool: Any, name: str) -> None:
    assert pool.run(2, several_steps, name) == [[], []]


@pytest.mark.parametrize("name", in_gate(["AdaFactor", "one's own"], ["AdaFactor"]))
def test_several_steps_on_uneven_shards(pool: Any, name: str) -> None:
    assert pool.run(3, several_steps, name) == [[]] * 3


@on_mesh()
def steps_on_empty_shards(mesh: Any, name: str) -> list[bool]:
    """A matrix and a vector of fewer rows than ranks, of which MindSpore makes no state by itself."""

    def changes(where: Any) -> list[np.ndarray]:
        rng = np.random.default_rng(2)
        net = mint.nn.Linear(4, mesh.size() - 1)
        for p in net.get_parameters():
            p.set_data(Tensor(rng.standard_normal(p.shape).astype(np.float32)))
        if where is not None:
            net = parallelize_module(net, mesh, ColwiseParallel())
        params = list(net.trainable_params())
        started = [whole(p).copy() for p in params]
        optimizer = OPTIMIZERS[name](params)
        for _ in range(3):
            gradients = [Tensor(rng.standard_normal(p.shape).astype(np.float32)) for p in params]
            if where is not None:
                gradients = [distribute_tensor(g, mesh, [Shard(0)]) for g in gradients]
            optimizer(tuple(gradients))
        return [whole(p) - s for p, s in zip(params, started, strict=True)]

    ways = on_first_rank(mesh, lambda: changes(None)), changes(mesh)
    return [bool(a.any()) and np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*ways, strict=True)]


#: Their kernels fail without elements.
NEED_ELEMENTS = ("Adam, offload", "AdamOffload", "Adagrad")


#: Those of `KINDS` that step without elements in the gate.
EMPTY = ("SGD", "Adam", "AdamWeightDecay", "FTRL", "RMSProp", "experimental AdamW")


@on_ranks(2, 4, gate=(2,), name="world")
@pytest.mark.parametrize(
    "name", in_gate([n for n in OPTIMIZERS if n not in ("groups, schedule", *NEED_ELEMENTS)], EMPTY)
)
def test_steps_on_empty_shards(pool: Any, name: str, world: int) -> None:
    assert pool.run(world, steps_on_empty_shards, name) == [[True] * 2] * world


def refused_on_empty_shards(name: str) -> str:
    return error_of(steps_on_empty_shards, name)


@pytest.mark.parametrize("name", NEED_ELEMENTS)
def test_refused_on_empty_shards(pool: Any, name: str) -> None:
    """All ranks refuse, not only the one without elements."""
    assert all(
        "does not support parameters with empty shards" in error for error in pool.run(2, refused_on_empty_shards, name)
    )


class ScaledDescent(nn.Optimizer):
    """An optimizer whose step takes more than gradients."""

    def construct(self, gradients: Any, factor: Any, losses: Any) -> Any:
        for p, g in zip(self.parameters, gradients, strict=True):
            ops.assign(p, p - g * factor * sum(losses))
        return True


@on_mesh()
def more_than_gradients(mesh: Any) -> list[bool]:
    """Plain local gradients are known by their number; a factor and losses are whole on every rank."""
    steps = []
    for net in (make_net(), make_net(mesh)):
        started = [whole(p).copy() for p in net.trainable_params()]
        gradients = ms.grad(loss_of(net), None, net.trainable_params())()
        ScaledDescent(0.1, net.trainable_params())(gradients, Tensor(0.5), [Tensor(1.0), Tensor(2.0)])
        steps.append([whole(p) - s for p, s in zip(net.trainable_params(), started, strict=True)])
    equal = [np.allclose(a, b, rtol=1e-4, atol=1e-6) and a.any() for a, b in zip(*steps, strict=True)]
    reference = make_net()
    wanted = ms.grad(loss_of(reference), None, reference.trainable_params())()
    by_hand = [np.allclose(a, -1.5 * g.asnumpy(), rtol=1e-4, atol=1e-6) for a, g in zip(steps[0], wanted, strict=True)]
    return [bool(b) for b in (*equal, *by_hand)]


def test_a_step_that_takes_more_than_gradients(pool: Any) -> None:
    assert pool.run(2, more_than_gradients) == [[True] * 14] * 2


# ---------------------------------------------------------------------- unsupported optimizers
@on_mesh()
def needs_whole_parameters(mesh: Any) -> list[str]:
    net = make_net(mesh)
    parameters, gradients = net.trainable_params(), ms.grad(loss_of(net), None, net.trainable_params())()
    centralised = nn.SGD([{"params": parameters, "grad_centralization": True}], 0.01)
    errors = [error_of(optimizer, gradients) for optimizer in (nn.Lamb(parameters, 0.01), centralised)]
    return [*errors, error_of(nn.DistributedGradReducer, parameters)]


def test_optimizers_with_norms_are_refused(pool: Any) -> None:
    for lamb, centralised, reducer in pool.run(2, needs_whole_parameters):
        assert lamb.startswith("TypeError: Lamb needs unsharded parameters")
        assert centralised.startswith("TypeError: SGD subtracts means over the last dimensions of gradients, but 'down")
        assert reducer.startswith("ValueError: nn.DistributedGradReducer adds gradients of ranks 0, 1")


@on_mesh(2, 2, names=("dp", "tp"))
def reduced_over_other_ranks(mesh: Any) -> list[bool]:
    """A reducer over ranks that hold the same shard is data parallelism of MindSpore's own, with a plan."""
    net = make_net(mesh["tp"])
    weights = net.trainable_params()
    reducer = nn.DistributedGradReducer(weights, True, 2, group=mesh["dp"].get_group())
    local = ms.grad(loss_of(net), None, weights)()
    found = reducer(tuple(g * float(1 + 2 * mesh["dp"].get_local_rank()) for g in local))
    return [bool(np.allclose(a.asnumpy(), 2 * b.asnumpy(), rtol=1e-4)) for a, b in zip(found, local, strict=True)]


def test_reducers_with_tensor_parallelism(pool: Any) -> None:
    for equal in pool.run(4, reduced_over_other_ranks):
        assert all(equal)


@on_mesh()
def too_few_gradients(mesh: Any) -> list[str]:
    """Plain gradients, whose parameters are unknown; DTensors, which the optimizer takes or does not."""
    net = make_net(mesh)
    optimizer = TrustRatio(net.trainable_params(), 0.01)
    plain = ms.grad(loss_of(net), None, net.trainable_params())()
    _, distributed = value_and_grad(loss_of(net), None, net.trainable_params())()
    sharded = [g for g in distributed if isinstance(g, DTensor)]
    return [error_of(optimizer, plain[:1]), error_of(optimizer, tuple(sharded[:1]))]


def test_too_few_gradients(pool: Any) -> None:
    for of_plain, of_distributed in pool.run(2, too_few_gradients):
        assert of_plain.startswith("ValueError: TrustRatio has 7 parameters but got 1 plain tensors: pass one")
        assert of_distributed == "ValueError: zip() argument 3 is shorter than arguments 1-2"


#: Results of MindSpore 2.10 with plain parameters on CPU: these are not ours to support.
BROKEN: dict[str, tuple[Callable[[list], Any], str]] = {
    "Lamb": (lambda p: nn.Lamb(p, 0.01), "error"),
    "LARS": (lambda p: nn.LARS(nn.Momentum(p, 0.1, 0.9)), "error"),
    "mint AdamW": (lambda p: mint.optim.AdamW(p, 0.01), "error"),
    "mint FusedAdamW": (lambda p: mint.optim.FusedAdamW(p, 0.01), "error"),
    "mint Adam": (lambda p: mint.optim.Adam(p, 0.01), "no change"),
    "mint SGD": (lambda p: mint.optim.SGD(p, 0.1), "no change"),
}


def plain_outcomes() -> dict[str, str]:
    outcomes = {}
    for name, (make, _) in BROKEN.items():
        net = make_net()
        params = list(net.trainable_params())
        before = [whole(p).copy() for p in params]
        try:
            make(params)(tuple(ops.ones_like(Tensor(p.asnumpy())) for p in params))
            changed = any(not np.array_equal(whole(p), b) for p, b in zip(params, before, strict=True))
            outcomes[name] = "works" if changed else "no change"
        except Exception:
            outcomes[name] = "error"
    return outcomes


@pytest.mark.skipif(not ms.__version__.startswith("2.10"), reason="checks MindSpore 2.10")
def test_what_mindspore_itself_does_not_do_on_cpu(pool: Any) -> None:
    assert pool.run(1, plain_outcomes) == [{name: outcome for name, (_, outcome) in BROKEN.items()}]
