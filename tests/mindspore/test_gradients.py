"""Gradients on MindSpore: of networks, by DTensor inputs, of DTensor losses, and who shares which collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.common.api import _pynative_executor

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    coalesce_gradients,
    distribute_module,
    distribute_tensor,
    get_platform,
    parallelize_module,
)
from hyper_parallel.debug import CommDebugMode
from hyper_parallel.mindspore import grad, value_and_grad
from hyper_parallel.platform.mindspore.basics.private import AutogradFunction
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import loss_of, make_net, whole

linear = mint.nn.functional.linear
RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 8)).astype(np.float32)
WEIGHTS = RNG.standard_normal((3, 8, 8)).astype(np.float32)


def close(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=1e-4, atol=1e-5))


def attention_like(weights: Any) -> Any:
    """A function in which three linear layers read one activation."""

    def function(x: Any) -> Any:
        q, k, v = (linear(x, w) for w in weights)
        total = (q * k + v).sum()
        return total.full_tensor() if isinstance(total, DTensor) else total

    return function


def reference() -> np.ndarray:
    return ms.grad(attention_like([Tensor(w) for w in WEIGHTS]))(Tensor(X)).asnumpy()


def column_weights(mesh: Any) -> list[Any]:
    return [distribute_tensor(Tensor(w), mesh, [Shard(0)]) for w in WEIGHTS]


# ------------------------------------------------------------------ networks
@on_mesh()
def net_gradients(mesh: Any) -> list[str]:
    plain, net = make_net(), make_net(mesh)
    loss, wanted = ms.value_and_grad(loss_of(plain), None, plain.trainable_params())()
    value, got = value_and_grad(loss_of(net), None, net.trainable_params())()
    problems = [] if close(whole(value), loss.asnumpy()) else [f"loss {value}, wanted {loss}"]
    for p, g, w in zip(net.trainable_params(), got, wanted, strict=True):
        if isinstance(p, DTensor) and (not isinstance(g, DTensor) or g.placements != p.placements):
            problems.append(f"{p.name}: {type(g).__name__}")
        if not close(whole(g), w.asnumpy()):
            problems.append(f"{p.name}: got {whole(g)}, wanted {w}")
    local = ms.grad(loss_of(net), None, net.trainable_params())()
    for p, g in zip(net.trainable_params(), local, strict=True):
        if type(g) is not Tensor or (isinstance(p, DTensor) and tuple(g.shape) != tuple(p._layout.local_shape)):
            problems.append(f"mindspore.grad of {p.name}: {type(g).__name__} {g.shape}")
    return problems


@on_ranks(1, 2, 4, name="world")
def test_network(pool: Any, world: int) -> None:
    assert pool.run(world, net_gradients) == [[]] * world


@on_mesh()
def recomputed(mesh: Any) -> list[bool]:
    def make(mesh: Any) -> nn.Cell:
        net = nn.SequentialCell(nn.Dense(8, 8), nn.ReLU(), nn.Dense(8, 8))
        for i, p in enumerate(net.get_parameters()):
            p.set_data(Tensor(np.resize(WEIGHTS[i % 3], p.shape)))
        if mesh is not None:
            parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            net.recompute()
        return net

    nets = make(None), make(mesh)
    results = [
        value_and_grad(lambda x, net=net: (net(x) ** 2).sum(), 0, net.trainable_params())(Tensor(X)) for net in nets
    ]
    (wanted_x, wanted), (got_x, got) = results[0][1], results[1][1]
    return [close(whole(g), whole(w)) for g, w in zip((got_x, *got), (wanted_x, *wanted), strict=True)]


def test_recompute(pool: Any) -> None:
    assert pool.run(2, recomputed) == [[True] * 5] * 2


# ------------------------------------------------------------------ DTensor inputs and losses
@on_mesh()
def shared_collectives(mesh: Any, placement: Any, through: str) -> list[tuple]:
    """Counts of three runs with one input object, with an aborted run in between."""
    x = distribute_tensor(Tensor(X), mesh, [placement])
    layers = attention_like(column_weights(mesh))
    function = {
        "leaf": layers,
        "activation": lambda x: layers(x * 1.0),
        "gathered": lambda x: layers(x.redistribute(placements=[Replicate()])),
    }[through]

    def aborted(x: Any) -> Any:
        function(x)
        raise InterruptedError

    wanted = reference()[x._layout.cotangent.local_index()]
    results = []
    for i in range(3):
        if i == 2:
            with pytest.raises(InterruptedError):
                ms.grad(aborted)(x)
            _pynative_executor.clear_res()  # MindSpore itself takes the next gradient for one of second order
        with CommDebugMode() as counts:
            g = ms.grad(function)(x)
        results.append((dict(counts.get_comm_counts()), close(g.asnumpy(), wanted)))
    return results


@pytest.mark.parametrize(
    ("placement", "through", "counts"),
    [
        (Replicate(), "leaf", {"all_reduce": 2}),
        (Replicate(), "activation", {"all_reduce": 2}),
        (Shard(0), "gathered", {"all_gather": 1, "all_reduce": 1, "reduce_scatter": 1}),
    ],
)
def test_three_readers_share_one_backward_collective(pool: Any, placement: Any, through: str, counts: dict) -> None:
    assert pool.run(2, shared_collectives, placement, through) == [[(counts, True)] * 3] * 2


@on_mesh()
def constant_then_differentiated(mesh: Any) -> list[bool]:
    """Values cached while the input was a constant are not used when its gradient is wanted."""
    x, weights = distribute_tensor(Tensor(X), mesh, [Replicate()]), column_weights(mesh)
    by_weight = ms.grad(lambda w: linear(x, w).sum().full_tensor())(weights[0])
    rows = weights[0]._layout.local_index()[0]
    by_x = ms.grad(attention_like(weights))(x)
    return [close(by_weight.asnumpy(), np.tile(X.sum(0), (8, 1))[rows]), close(by_x.asnumpy(), reference())]


def test_constant_then_differentiated(pool: Any) -> None:
    assert pool.run(2, constant_then_differentiated) == [[True, True]] * 2


@on_mesh()
def nested(mesh: Any) -> list[bool]:
    x, weights = distribute_tensor(Tensor(X), mesh, [Replicate()]), column_weights(mesh)
    layers = attention_like(weights)

    def with_inner(x: Any) -> Any:
        first = layers(x)
        ms.grad(lambda s: (linear(x, weights[0]) * s).sum().full_tensor())(Tensor(2.0))
        return first + layers(x)

    plain = attention_like([Tensor(w) for w in WEIGHTS])
    wanted = ms.grad(lambda x: (ms.grad(plain)(x) ** 2).sum())(Tensor(X)).asnumpy()
    second = ms.grad(lambda x: (ms.grad(layers)(x) ** 2).sum())(x).asnumpy()
    return [close(ms.grad(with_inner)(x).asnumpy(), 2 * reference()), close(second, wanted)]


def test_nested_and_second_order(pool: Any) -> None:
    assert pool.run(2, nested) == [[True, True]] * 2


def test_second_order_through_other_objects() -> None:
    """A tensor object of its own for data that is not contiguous, made of an operation's result."""
    platform = get_platform()
    x = Tensor(X)

    def loss(through: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: (through(mint.sin(x).transpose(0, 1)) ** 3).sum()

    def squared_gradient(through: Callable[[Any], Any]) -> np.ndarray:
        return ms.grad(lambda x: (ms.grad(loss(through))(x) ** 2).sum())(x).asnumpy()

    assert close(squared_gradient(platform.alias), squared_gradient(lambda y: y))
    assert close(ms.grad(loss(platform.detach))(x).asnumpy(), np.zeros_like(X))


class Doubled(nn.Cell):
    """The sum of its input, with a gradient of its own: twice the right one, times the number of elements."""

    def __init__(self, bias: Any = None) -> None:
        super().__init__()
        self.bias = bias

    def construct(self, x: Any) -> Any:
        return x.sum() if self.bias is None else x.sum() + self.bias.sum()

    def bprop(self, x: Any, out: Any, dout: Any) -> tuple:
        return (ops.ones_like(x) * dout * 2 * x.size,)


@on_mesh()
def own_bprops(mesh: Any) -> list[Any]:
    found: list[Any] = []
    for function in (Doubled(), ops.nanmean, lambda x: ops.nanmean(x, 0).sum(), lambda x: Doubled()(x * 2)):
        wanted = ms.value_and_grad(function)(Tensor(X))
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(Tensor(X), mesh, [placement])
            value, gradient = value_and_grad(function)(x)
            found.append(close(whole(value), wanted[0].asnumpy()) and close(whole(gradient), wanted[1].asnumpy()))
    return found


def test_cells_with_a_bprop_of_their_own(pool: Any) -> None:
    """MindSpore hands its own recorded values to a bprop: it would see this rank's part."""
    assert pool.run(3, own_bprops) == [[True] * 12] * 3


@on_mesh()
def own_bprop_of_distributed_parameters(mesh: Any) -> str:
    bias = ms.Parameter(distribute_tensor(Tensor(X), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match="Doubled defines a bprop") as error:
        value_and_grad(Doubled(bias))(distribute_tensor(Tensor(X), mesh, [Shard(0)]))
    _pynative_executor.clear_res()
    return str(error.value)


def test_a_bprop_of_distributed_parameters_is_refused(pool: Any) -> None:
    for message in pool.run(2, own_bprop_of_distributed_parameters):
        assert "remove the bprop" in message


@on_mesh()
def distributed_loss(mesh: Any) -> list[bool]:
    """A DTensor as the loss, also a partial one, counts as its global value."""
    w = distribute_tensor(Tensor(WEIGHTS[0]), mesh, [Shard(0)])
    x = distribute_tensor(Tensor(X), mesh, [Replicate()])
    loss, g = value_and_grad(lambda x: linear(x, w).sum())(x)
    (gx, gw), (aux,) = grad(lambda x, w: (linear(x, w).sum(), x * 2), (0, 1), has_aux=True)(x, w)
    scaled = ms.ops.GradOperation(sens_param=True)(lambda x: x * 3)(x, Tensor(np.full((4, 8), 2.0, np.float32)))
    return [
        loss.placements == (Partial(),) and close(whole(loss), (X @ WEIGHTS[0].T).sum()),
        isinstance(g, DTensor) and close(whole(g), np.tile(WEIGHTS[0].sum(0), (4, 1))),
        close(whole(gx), whole(g)) and gw.placements == (Shard(0),) and close(whole(gw), np.tile(X.sum(0), (8, 1))),
        isinstance(aux, DTensor) and close(whole(aux), 2 * X),
        close(scaled.asnumpy(), np.full((4, 8), 6.0)),
    ]


def test_distributed_loss(pool: Any) -> None:
    assert pool.run(2, distributed_loss) == [[True] * 5] * 2


@on_mesh()
def loss_scaling(mesh: Any) -> list[Any]:
    """Mixed precision: all ranks see an overflow that one of them has, and all unscale in the same way."""
    scaler = ms.amp.StaticLossScaler(4.0)
    values = np.ones((4, 4), np.float32)
    values[3, 0] = np.inf
    good = distribute_tensor(Tensor(np.ones((4, 4), np.float32)), mesh, [Shard(0)])
    bad = distribute_tensor(Tensor(values), mesh, [Shard(0)])
    unscaled = scaler.unscale((good,))
    finite = [bool(ms.amp.all_finite((good, good))), bool(ms.amp.all_finite((good, bad)))]
    return [*finite, close(whole(unscaled[0]), 0.25)]


def test_loss_scaling(pool: Any) -> None:
    assert pool.run(2, loss_scaling) == [[True, False, True]] * 2


@on_mesh()
def empty_parts(mesh: Any) -> list[bool]:
    """Two rows over four ranks: ranks without rows take part in every collective and add nothing."""
    x, v = X[:2], X[0]
    plain = ms.grad(_all_kinds, (0, 1, 2))(Tensor(x), Tensor(WEIGHTS[0]), Tensor(v))
    xd = distribute_tensor(Tensor(x), mesh, [Shard(0)])
    wd, vd = (distribute_tensor(Tensor(t), mesh, [Replicate()]) for t in (WEIGHTS[0], v))
    got = grad(lambda *a: _all_kinds(*a).full_tensor(), (0, 1, 2))(xd, wd, vd)
    return [close(whole(g), p.asnumpy()) for g, p in zip(got, plain, strict=True)]


def _all_kinds(x: Any, w: Any, v: Any) -> Any:
    """Products, broadcasting, a norm, reductions, indexing."""
    y = linear(x, w, v) * v + v
    y = ops.LayerNorm(-1, -1, 1e-5)(y, v, v * 2)[0] / (2 + v * v)
    y = ops.softmax(mint.matmul(y, w), -1) - v
    y = mint.where(y > 0, y, v).reshape(-1, 2, 4).transpose(1, 2)
    return (y[..., 0] * 3).sum() + (y.expand(-1, 4, 2) * y).mean(-1).sum()


def test_empty_parts(pool: Any) -> None:
    assert pool.run(4, empty_parts) == [[True] * 3] * 4


# ------------------------------------------------------------------ gradients that are all-reduced together
class Affine(nn.Cell):
    """Two parameters, replicated where their input is sharded."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        values = np.random.default_rng(seed).standard_normal((2, 8)).astype(np.float32)
        self.scale, self.shift = (ms.Parameter(Tensor(v), name=n) for v, n in zip(values, "ab", strict=True))

    def construct(self, x: Any) -> Any:
        return mint.tanh(x * self.scale) + self.shift


def affine_net(mesh: Any = None) -> nn.Cell:
    net = nn.SequentialCell(Affine(1), Affine(2), Affine(3))
    return net if mesh is None else distribute_module(net, mesh)


def affine_loss(net: nn.Cell, kind: str, seen: list[np.ndarray]) -> Callable[[Any], Any]:
    """``kind``: further features of the gradients."""
    parameters = net.trainable_params()

    def plain(x: Any) -> Any:
        return (net(x) ** 2).sum()

    def also_whole(x: Any) -> Any:
        """A gradient that is not partial adds to one that is."""
        return plain(x) + (parameters[0] ** 2).sum() + (parameters[3] * parameters[0]).sum()

    def inner(x: Any, gradient: Any) -> Any:
        """A gradient within, which the function reads."""
        found = gradient(plain, None, parameters)(x)
        seen.append(np.stack([whole(g) for g in found]))
        return plain(x) * float(seen[-1][0].sum())

    return {
        "nothing": plain,
        "whole": also_whole,
        "inner": lambda x: inner(x, ms.grad),
        "inner, ours": lambda x: inner(x, grad),
    }[kind]


@on_mesh()
def delayed(mesh: Any, kind: str, frozen: int) -> tuple:
    """Return whether gradients are right, and how many all-reduces backward has, ours and MindSpore's own."""
    found, counts = [], []
    for where, differentiate in ((None, ms.value_and_grad), (mesh, value_and_grad), (mesh, ms.value_and_grad)):
        net, seen = affine_net(where), []
        x = Tensor(X) if where is None else distribute_tensor(Tensor(X), mesh, [Shard(0)])
        weights = net.trainable_params()[frozen:]
        loss = affine_loss(net, kind, seen)
        with CommDebugMode() as comm:
            loss(x)
        forward, _ = comm.get_comm_counts().get("all_reduce", 0), seen.clear()
        with CommDebugMode() as comm, coalesce_gradients():
            _, (of_x, gradients) = differentiate(loss, 0, [*weights, weights[0]])(x)
        counts.append(comm.get_comm_counts().get("all_reduce", 0) - forward)
        of_x = of_x if isinstance(of_x, DTensor) or where is None else DTensor.from_local(of_x, mesh, [Shard(0)])
        found.append([whole(of_x), *(whole(g) for g in gradients), *seen])
    right = all(close(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))
    return right, *counts[1:]


@pytest.mark.parametrize(
    ("kind", "frozen", "ours", "plain"),
    [
        ("nothing", 0, 1, 6),
        ("nothing", 2, 1, 4),
        ("whole", 0, 1, 6),
        ("inner", 0, 1, 6),
        ("inner, ours", 0, 1, 6),
    ],
)
def test_one_all_reduce_for_the_gradients_of_all(pool: Any, kind: str, frozen: int, ours: int, plain: int) -> None:
    assert pool.run(2, delayed, kind, frozen) == [(True, ours, plain)] * 2


# ---------------------------------------------------------------------- errors while gradients are recorded
class Interrupted(nn.Cell):
    """Raises an exception that is no error of an operation."""

    def construct(self, x: Any) -> Any:
        raise ArithmeticError(str((x * 2).shape))


@on_mesh()
def recorded_after_an_error(mesh: Any, kind: str) -> list[Any]:
    """One rank meets an error in the forward. Afterwards nothing is recorded, and all ranks compute the same."""
    weight = distribute_tensor(Tensor(WEIGHTS[0]), mesh, [Shard(0)])
    norm, cell = nn.LayerNorm([8]), Interrupted()
    failing = {
        "function": lambda x: Interrupted()(linear(DTensor.from_local(x, mesh), weight)),
        "cell": cell,
        "inner": lambda x: ms.grad(lambda z: cell(z * x))(x).sum(),
        "ours": lambda x: linear(x, weight),  # a plain tensor does not mix with DTensors
    }[kind]
    raised = 0
    for _ in range(2 if spmd.rank == 0 else 0):
        try:
            ms.value_and_grad(failing)(Tensor(X))
        except (ArithmeticError, TypeError, ValueError):
            raised += 1

    def loss(x: Any) -> Any:
        return (linear(DTensor.from_local(norm(x), mesh), weight)[-1] ** 2).sum().full_tensor()

    def plain(x: Any) -> Any:
        return (linear(norm(x), Tensor(WEIGHTS[0]))[-1] ** 2).sum()

    recording = _pynative_executor._executor.requires_grad()
    right = close(ms.grad(loss)(Tensor(X)).asnumpy(), ms.grad(plain)(Tensor(X)).asnumpy())
    return [raised, recording, cell.requires_grad, right]


@pytest.mark.parametrize("kind", ["function", "cell", "inner", "ours"])
def test_an_error_ends_the_recording(pool: Any, kind: str) -> None:
    """MindSpore would go on, and count the next one as the inner one of two gradients: ``x[-1]`` is an error there."""
    assert pool.run(2, recorded_after_an_error, kind) == [[2, False, False, True], [0, False, False, True]]


@on_mesh()
def what_is_taken(mesh: Any) -> list[str]:
    """The name of each way to take a part for which gradients of gradients differ. MindSpore fails at a number alone as
    an index there, so the reference takes slices."""
    ways: dict[str, tuple[Callable, Callable]] = {
        "[-1]": (lambda y: y[-1], lambda y: y[-1:]),
        "[0]": (lambda y: y[0], lambda y: y[:1]),
        "[0, 3]": (lambda y: y[0, 3], lambda y: y[:1, 3:4]),
        "[:, 3]": (lambda y: y[:, 3], lambda y: y[:, 3:4]),
        "[1:3]": (lambda y: y[1:3], lambda y: y[1:3]),
        "narrow": (lambda y: mint.narrow(y, 0, 1, 2), lambda y: y[1:3]),
        "of a product": (lambda y: (y * 2)[1], lambda y: (y * 2)[1:2]),
        "steps": (lambda y: y[:, ::4], lambda y: y[:, ::4]),
    }

    def of_gradient(x: Any, take: Callable, differentiate: Callable) -> np.ndarray:
        def total(y: Any) -> Any:
            return y.sum().full_tensor() if isinstance(y, DTensor) else y.sum()

        return whole(differentiate(lambda z: total(differentiate(lambda z: total(take(z) ** 3))(z)))(x))

    found = []
    for name, (take, take_plain) in ways.items():
        wanted = of_gradient(Tensor(X), take_plain, ms.grad)
        for placement in (Shard(0), Shard(1), Replicate()):
            if not close(of_gradient(distribute_tensor(Tensor(X), mesh, [placement]), take, grad), wanted):
                found.append(f"{name} of {placement}")
    return found


def test_what_is_taken_in_gradients_of_gradients(pool: Any) -> None:
    assert pool.run(2, what_is_taken) == [[]] * 2


class Straight(AutogradFunction):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return ops.sign(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


class Weighed(AutogradFunction):
    """Two results of saved tensors; backward needs the sizes of the whole tensors."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: float, y: Any) -> tuple:
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return x * y * scale, (x - x.mean()).abs().sum()

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> tuple:
        x, y = ctx.saved_tensors
        return g * y * ctx.scale + h * x.size, None, (g * x).cumsum(0)


class Written(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ops.assign_add(x, ops.ones_like(x))
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


def weighed(x: Any) -> Any:
    first, second = Weighed.apply(x * 2, 3.0, x + 1)
    return ops.square(first).sum() + second


@on_mesh()
def own_functions(mesh: Any) -> list[bool]:
    found = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        for function in (lambda x: (Straight.apply(x * 1) * x).sum(), weighed):
            wanted = ms.value_and_grad(function)(Tensor(X))
            value, gradient = value_and_grad(function)(distribute_tensor(Tensor(X), mesh, [placement]))
            found.append(close(whole(value), wanted[0].asnumpy()) and close(whole(gradient), wanted[1].asnumpy()))
        x = distribute_tensor(Tensor(X.copy()), mesh, [placement])
        plain = Tensor(X.copy())
        wanted = Written.apply(plain)
        found += [close(whole(Written.apply(x)), wanted.asnumpy()), close(whole(x), plain.asnumpy())]
    return found


def test_functions_with_a_backward_of_their_own(pool: Any) -> None:
    assert pool.run(3, own_functions) == [[True] * 12] * 3
