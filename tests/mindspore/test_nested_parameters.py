"""Parameters that tensor parallelism has cut first and data parallelism then: optimizers, clipping, initialisation."""

from __future__ import annotations

import copy
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    PackedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_parameter,
    distribute_tensor,
    manual_seed,
)
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.platform.mindspore.gradients.local_gradients import LocalGradients
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import rows_of, whole
from tests.mindspore.test_optimizers import OPTIMIZERS

#: Uneven, empty on some ranks, packed; on ("dp", "tp").
PLACED: list[tuple[tuple[int, ...], tuple]] = [
    ((5, 3), (StridedShard(0, 2), Shard(0))),
    ((3, 7), (StridedShard(1, 2), Shard(1))),
    ((6, 4), (StridedShard(0, 2), PackedShard(0, (2, 4)))),
    ((4, 7), (PackedShard(1, (3, 4)), Shard(1))),
    ((7,), (StridedShard(0, 2), Shard(0))),
    ((3, 2), (Shard(0), Replicate())),
]


def cells(mesh: Any) -> list[Any]:
    """Plain parameters, and the same ones distributed."""
    found = []
    for distributed in (False, True):
        cell, rng = nn.Cell(), np.random.default_rng(1)
        for i, (shape, placements) in enumerate(PLACED):
            value = Tensor(rng.standard_normal(shape).astype(np.float32))
            setattr(cell, f"p{i}", Parameter(value, name=f"p{i}"))
            if distributed:
                distribute_parameter(cell, f"p{i}", mesh, placements)
        found.append(cell)
    return found


@on_mesh(2, 2, names=("dp", "tp"))
def steps(mesh: Any, name: str) -> None:
    plain, net = cells(mesh)
    params = [list(cell.trainable_params()) for cell in (plain, net)]
    optimizers = [OPTIMIZERS[name](some) for some in params]
    rng = np.random.default_rng(2)
    for step in range(3):
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape, _ in PLACED]
        parts = [
            distribute_tensor(Tensor(a), mesh, p.placements) if step % 2 else rows_of(a, p._layout)
            for a, p in zip(arrays, params[1], strict=True)
        ]
        optimizers[0](tuple(map(Tensor, arrays)))
        optimizers[1](tuple(parts))
    for p, q, (_, placements) in zip(*params, PLACED, strict=True):
        assert isinstance(q, DTensor) and q.placements == placements
        np.testing.assert_array_equal(whole(q), whole(p), f"{name}: {p.name}")
    for moment in optimizers[1].get_parameters():
        known = next((q for q in params[1] if moment.name.endswith(q.name) and moment.shape == q.shape), None)
        assert known is None or moment._layout is known._layout, f"{name}: {moment.name}"


@pytest.mark.parametrize("name", ["SGD", "AdamWeightDecay", "experimental AdamW", "RMSProp"])
def test_steps(pool: Any, name: str) -> None:
    pool.run(4, steps, name)


CLIPS: dict[str, Any] = {
    "norm of all": lambda gs: ops.clip_by_norm(gs, 0.1),
    "largest of all": lambda gs: ops.clip_by_norm(gs, 0.02, float("inf")),
    "global norm": lambda gs: ops.clip_by_global_norm(gs, 0.1),
    "each norm": lambda gs: [ops.clip_by_norm(g, 0.01) for g in gs],
}


@on_mesh(2, 2, names=("dp", "tp"))
def clipped(mesh: Any, name: str) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape, _ in PLACED]
    LocalGradients.forget()  # of the test before, which parts of gradients may have come from
    wanted = CLIPS[name](tuple(Tensor(a) for a in arrays))
    gradients = [distribute_tensor(Tensor(a), mesh, at) for a, (_, at) in zip(arrays, PLACED, strict=True)]
    # Those of the tensors that tensor parallelism leaves whole are on the mesh of data parallelism alone.
    gradients[-1] = distribute_tensor(Tensor(arrays[-1]), mesh["dp"], [Shard(0)])
    with CommDebugMode() as comm:
        got = CLIPS[name](tuple(gradients))
    assert name not in ("norm of all", "largest of all") or comm.get_comm_counts() == {"all_reduce": 2}
    for a, b, given in zip(got, wanted, gradients, strict=True):
        assert a._layout is given._layout
        np.testing.assert_allclose(whole(a), whole(b), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CLIPS)
def test_clipped(pool: Any, name: str) -> None:
    pool.run(4, clipped, name)


@on_mesh(2, 2, names=("dp", "tp"))
def initialised(mesh: Any) -> None:
    """Parameters whose data are drawn after they were distributed have the numbers of the single device."""
    for shape, placements in PLACED:
        parts = []
        for distributed in (False, True):
            cell = nn.Cell()
            cell.p = Parameter(ops.zeros(shape), name="p")
            if distributed:
                distribute_parameter(cell, "p", mesh, placements)
            manual_seed(5, mesh)
            cell.p.set_data(initializer(Normal(1.0), shape, ms.float32).init_data())
            parts.append(cell.p)
        np.testing.assert_array_equal(whole(parts[1]), whole(parts[0]))
        assert parts[1].placements == placements
        other = copy.deepcopy(parts[1])
        assert other._layout is parts[1]._layout
        np.testing.assert_array_equal(whole(other), whole(parts[0]))


def test_initialised(pool: Any) -> None:
    pool.run(4, initialised)


@on_mesh(2, 2, names=("dp", "tp"))
def trained(mesh: Any) -> None:
    """A layer whose weight is cut twice gives values and gradients of the single device."""
    x = Tensor(np.random.default_rng(4).standard_normal((4, 5)).astype(np.float32))
    plain, net = (linear(), linear())
    for name in ("weight", "bias"):
        distribute_parameter(net, name, mesh, [StridedShard(0, 2), Shard(0)])
    wanted, gradients = value_and_grad(lambda: ops.square(plain(x)).sum(), None, plain.trainable_params())()
    given = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    got, found = value_and_grad(lambda: ops.square(net(given)).sum(), None, net.trainable_params())()
    np.testing.assert_allclose(whole(got), whole(wanted), rtol=1e-5)
    for p, g, h in zip(net.trainable_params(), found, gradients, strict=True):
        assert g._layout is p._layout
        np.testing.assert_allclose(whole(g), whole(h), rtol=1e-4, atol=1e-5)


def linear() -> Any:
    layer, rng = mint.nn.Linear(5, 7), np.random.default_rng(5)
    for p in layer.get_parameters():
        p.set_data(Tensor(rng.standard_normal(p.shape).astype(np.float32)))
    return layer


def test_trained(pool: Any) -> None:
    pool.run(4, trained)
