"""MindSpore's ways to put other parameters and data into a parallelised network: right, or refused."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import error_of, whole

PLAN: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Mlp(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.up, self.down = nn.Dense(6, 12), mint.nn.Linear(12, 6)
        for p in self.get_parameters():
            p.set_data(Tensor(rng.standard_normal(p.shape).astype(np.float32)))

    def construct(self, x: Any) -> Any:
        return self.down(ms.ops.relu(self.up(x)))


def both(mesh: Any) -> tuple[Mlp, Mlp]:
    return Mlp(), parallelize_module(Mlp(), mesh, PLAN)


def values(*shape: int, seed: int = 0) -> Tensor:
    return Tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(whole(got), whole(wanted), rtol=1e-4, atol=1e-5)


@on_mesh()
def exchanged(mesh: Any) -> None:
    x = values(3, 6)
    _, sharded = both(mesh)
    sharded.up.weight = Parameter(values(12, 6), name="w")
    with CommDebugMode() as comm:
        message = error_of(lambda: sharded(x))
    assert "'weight'" in message and "'up'" in message and "distribute_tensor" in message, message
    assert comm.get_total_counts() == 0

    # New values by MindSpore's own means, whole: each rank takes its part, or all refuse.
    single, sharded = both(mesh)
    for net in (single, sharded):
        ms.load_param_into_net(net, {"up.weight": Parameter(values(12, 6), name="up.weight")})
    close(sharded(x), single(x))
    for net in (single, sharded):
        net.up.weight.set_data(values(12, 6, seed=7))
        net.down.weight.assign_value(values(6, 12, seed=8))
    assert sharded.down.weight.placements == (Shard(1),)
    close(sharded(x), single(x))
    message = error_of(lambda: sharded.up.weight.assign_value(values(5, 6)))
    assert "'up.weight'" in message or "(5, 6)" in message, message

    # And a parallel value into a plain network.
    message = error_of(lambda: Mlp().up.weight.set_data(sharded.up.weight))
    assert "full_tensor()" in message, message


def test_exchanged(pool: Any) -> None:
    """Assignment, `load_param_into_net`, `set_data`, `assign_value`."""
    for world_size in (2, 3):
        pool.run(world_size, exchanged)


@on_mesh()
def optimizer_from_before(mesh: Any) -> None:
    net = Mlp()
    optimizer = nn.Adam(net.trainable_params(), 0.1)
    parallelize_module(net, mesh, PLAN)
    gradients = ms.grad(lambda x: net(x).sum(), None, net.trainable_params())(values(3, 6))
    message = error_of(lambda: optimizer(gradients))
    assert "'moment1.up.weight'" in message and "after parallelize_module" in message, message
    nn.Adam(net.trainable_params(), 0.1)(gradients)


def test_optimizer_from_before(pool: Any) -> None:
    """Moments that were made before parameters were sharded."""
    pool.run(2, optimizer_from_before)


@on_mesh()
def sparse(mesh: Any) -> None:
    indices, numbers = Tensor([[0, 1], [1, 2]], ms.int32), Tensor([1.0, 2.0])
    coo = ms.COOTensor(indices, numbers, (4, 6))
    csr = ms.CSRTensor(Tensor([0, 1, 2, 2, 2], ms.int32), Tensor([1, 2], ms.int32), numbers, (4, 6))
    d = distribute_tensor(values(4, 6), mesh, [Shard(0)])
    for value in (coo, csr):
        for call in (
            lambda value=value: distribute_tensor(value, mesh, [Shard(0)]),
            lambda value=value: DTensor.from_local(value, mesh, [Shard(0)]),
            lambda value=value: d + value,
        ):
            with CommDebugMode() as comm, pytest.raises((TypeError, ValueError), match=type(value).__name__):
                call()
            assert comm.get_total_counts() == 0


def test_sparse(pool: Any) -> None:
    """Sparse tensors are refused before communication."""
    pool.run(2, sparse)


@on_mesh()
def loaded(mesh: Any) -> None:
    plain, parallel = Mlp(), Mlp()
    parallelize_module(parallel, mesh, PLAN)
    message = error_of(lambda: ms.load_param_into_net(plain, parallel.parameters_dict()))
    assert "'up.weight'" in message and "full_tensor()" in message, message
    state = {name: Parameter(values(*p.shape) * 2, name=name) for name, p in plain.parameters_dict().items()}
    ms.load_param_into_net(parallel, state)
    ms.load_param_into_net(plain, state)
    x = values(3, 6)
    np.testing.assert_allclose(parallel(x).asnumpy(), plain(x).asnumpy(), rtol=1e-5, atol=1e-5)
    ms.load_param_into_net(parallel, {name: Parameter(p.astype(ms.float16), name=name) for name, p in state.items()})
    assert parallel.up.weight.dtype == ms.float32
    parts = {
        name: Parameter(DTensor.from_local(p.to_local() * 3, mesh, p.placements, shape=p.shape), name=name)
        for name, p in parallel.parameters_dict().items()
    }
    before = parallel.up.weight.full_tensor().asnumpy()
    ms.load_param_into_net(parallel, parts)
    np.testing.assert_allclose(parallel.up.weight.full_tensor().asnumpy(), 3 * before)


def test_load_param_into_net(pool: Any) -> None:
    """Whole values go into distributed parameters, and parts that say so; no parallel ones into plain ones."""
    for world_size in (2, 3):
        pool.run(world_size, loaded)
