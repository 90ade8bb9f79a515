"""MindSpore's own collectives on DTensors: they act on the local tensors, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from mindspore.mint import distributed as dist

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    RowwiseParallel,
    Shard,
    check_plain_code,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.spmd import on_mesh

on_2_by_2 = on_mesh(2, 2, names=("dp", "tp"))
BATCH = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)


def make_model() -> Any:
    rng = np.random.default_rng(0)
    model = ms.nn.SequentialCell(mint.nn.Linear(6, 5), mint.nn.ReLU(), mint.nn.Linear(5, 6))
    for p in model.get_parameters():
        p.set_data(Tensor(rng.normal(size=p.shape).astype(np.float32)))
    return model


def gradients_of(model: Any, batch: np.ndarray) -> tuple:
    loss = value_and_grad(lambda x: model(x).square().mean(), None, list(model.get_parameters()))
    return loss(Tensor(batch))[1]


@on_2_by_2
def loop(mesh: Any, way: str) -> None:
    wanted = gradients_of(make_model(), BATCH)
    model = parallelize_module(make_model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    group = mesh["dp"].get_group()
    got = list(gradients_of(model, BATCH[2 * mesh.get_local_rank("dp") :][:2]))
    if way == "mint":
        for gradient in got:
            dist.all_reduce(gradient, group=group)
    elif way == "awaited":
        handles = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in got]
        for handle in handles:
            if handle is not None:
                handle.wait()
    else:
        got = [ops.AllReduce(group=group)(gradient) for gradient in got]
    for gradient, whole in zip(got, wanted, strict=True):
        assert isinstance(gradient, DTensor)
        assert np.allclose(gradient.asnumpy() / 2, whole.asnumpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", ["mint", "awaited", "primitive"])
def test_data_parallel_loop(pool: Any, way: str) -> None:
    """Two data-parallel ranks, each of two tensor-parallel ones, get the single device's gradients."""
    pool.run(4, loop, way)


@on_2_by_2
def from_first(mesh: Any) -> None:
    dp = mesh["dp"]
    x = distribute_tensor(
        Tensor(np.full((3, 2), mesh.get_rank(), np.float32)), mesh["tp"], [Shard(0)], src_data_rank=None
    )
    dist.broadcast(x, int(dp.ranks[0]), dp.get_group())
    assert (x.to_local().asnumpy() == mesh.get_local_rank("tp")).all()
    y = distribute_tensor(Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)), mesh["tp"], [Shard(1)]).T
    dist.all_reduce(y, group=dp.get_group())  # not contiguous
    assert np.array_equal(y.asnumpy(), 2 * np.arange(6).reshape(2, 3).T)


def test_broadcast_and_views(pool: Any) -> None:
    pool.run(4, from_first)


def placed(mesh: Any, placement: Any) -> Any:
    return distribute_tensor(Tensor(np.ones((4, 4), np.float32)), mesh["tp"], [placement])


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "shards": (lambda m: dist.all_reduce(placed(m, Shard(0))), ValueError, r"different shards.*'dp'"),
    "primitive": (
        lambda m: ops.AllReduce(group=m["tp"].get_group())(placed(m, Shard(0))),
        ValueError,
        "different shards",
    ),
    "partial": (
        lambda m: dist.all_reduce(placed(m, Partial()), group=m["tp"].get_group()),
        ValueError,
        r"partial sum.*redistribute\(\)",
    ),
    "largest": (
        lambda m: dist.all_reduce(placed(m, Partial()), "max", m["dp"].get_group()),
        ValueError,
        r"call redistribute\(\) first",
    ),
    "joined": (
        lambda m: dist.all_gather([placed(m, Shard(0)) for _ in range(2)], placed(m, Shard(0)), m["dp"].get_group()),
        TypeError,
        r"concatenate or split the shards.*to_local\(\)",
    ),
    "joined by a primitive": (
        lambda m: ops.AllGather(group=m["dp"].get_group())(placed(m, Shard(0))),
        TypeError,
        r"concatenate or split the shards.*to_local\(\)",
    ),
}


@on_2_by_2
def refuse(mesh: Any, case: str) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=f"(?s){message}"):
        call(mesh)


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(pool: Any, case: str) -> None:
    pool.run(4, refuse, case)


@on_mesh(names=("tp",))
def followed(mesh: Any) -> None:
    """A sum over features of which each rank has a part, which the program makes whole itself."""
    model = ms.nn.SequentialCell(mint.nn.Linear(6, 8), mint.nn.ReLU(), mint.nn.Linear(8, 6))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def run(x: Any) -> Any:
        y = model[0](x)
        total = ops.stop_gradient(y).sum(-1, keepdims=True) * 1.0
        dist.all_reduce(total, group=mesh.get_group())
        return model[2](y * total.tanh())

    x = Tensor(BATCH)
    wanted = run(x)
    with check_plain_code(model) as checked:
        found = run(x)
    np.testing.assert_allclose(found.asnumpy(), wanted.asnumpy(), rtol=1e-6)
    assert not checked.findings and checked.unknown == {"DistCommAllReduce": 1}, checked


def test_in_a_program_that_is_followed(pool: Any) -> None:
    pool.run(2, followed)
