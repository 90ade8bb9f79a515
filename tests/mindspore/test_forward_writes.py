"""Writes of a forward to parameters under `fully_shard` arrive, however a cell of MindSpore writes."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import DTensor, Shard, check_ranks, distribute_tensor, fully_shard, replicate
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.fuzz.training import models
from hyper_parallel.testing.fuzz.training.programs import Model


class Writing(nn.Cell):
    """A layer with counters, a running mean and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        weight = np.linspace(-1, 1, 35).reshape(7, 5).astype(np.float32)
        self.weight, self.teacher = Parameter(Tensor(weight)), Parameter(Tensor(weight * 2), requires_grad=False)
        self.steps = Parameter(Tensor(0, ms.int64), requires_grad=False, name="steps")
        self.total = Parameter(Tensor(0.0, ms.float32), requires_grad=False, name="total")
        self.mean = Parameter(ops.zeros((7,), ms.float32), requires_grad=False, name="mean")
        self.last = Parameter(ops.zeros((7,), ms.float32), requires_grad=False, name="last")

    def construct(self, x: Any) -> Any:
        self.steps += 1
        self.total.set_data(self.total + 0.5)
        y = mint.nn.functional.linear(x, self.weight)
        new = ops.stop_gradient(self.weight.sum(1))
        ops.assign(self.mean, self.mean * 0.9 + new)
        self.last = new * self.total
        self.teacher = ops.stop_gradient(self.teacher * 0.5 + self.weight * 0.5)
        return (y - mint.nn.functional.linear(x, self.teacher) + self.mean).square() * self.total


@spmd.on_mesh()
def follows(mesh: Any, reshard: bool | None) -> None:
    single, model = Writing(), Writing()
    if reshard is None:
        replicate(model, mesh)
    else:
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    taken = {p.name: p.to_local() for p in model.get_parameters()}
    for step in range(4):
        x = Tensor(np.random.default_rng(step).standard_normal((2, 5)).astype(np.float32))
        if step == 3:
            with check_ranks(mesh):
                np.testing.assert_allclose(model(x).asnumpy(), single(x).asnumpy(), rtol=1e-4)
        for cell in (single, model):
            optimizer = nn.SGD(cell.trainable_params(), 0.01)
            _, grads = ms.value_and_grad(lambda x, cell=cell: cell(x).sum(), None, optimizer.parameters)(x)
            optimizer(grads)
    for p, q in zip(single.get_parameters(), model.get_parameters(), strict=True):
        np.testing.assert_allclose(q.full_tensor().asnumpy(), p.asnumpy(), rtol=1e-4, err_msg=p.name)
        np.testing.assert_array_equal(taken[q.name].asnumpy(), q.to_local().asnumpy(), err_msg=p.name)


@on_ranks(1, 2, 3)
def test_writes_arrive(pool: Any, world_size: int) -> None:
    for reshard in (False, True, None):
        pool.run(world_size, follows, reshard)


@spmd.on_mesh()
def reads_what_it_wrote(mesh: Any) -> None:
    """Backward reads the weights of a norm to which the forward wrote, in models of several kinds in turn.
    MindSpore's caches of a tensor depend on the models before."""
    adapter = get_adapter()
    x = np.random.default_rng(3).standard_normal((4, 2, 3)).astype(np.float32)
    wanted: dict[tuple[str, int], np.ndarray] = {}
    for shard in 10 * (None, replicate, fully_shard):
        for writer in ("counter", "", "teacher"):
            model = models.build(Model(3, 2, ("rms",), bias=False, writer=writer, dtype="float32"))
            if shard is not None:
                shard(model, mesh=mesh) if shard is fully_shard else shard(model, mesh)

            def loss(x: Any, model: Any = model) -> Any:
                y = adapter.tanh(adapter.call(model, x))
                return adapter.sum(y * y), y

            for step in range(2):
                _, _, grads = adapter.model_value_and_grads(model, loss, x)
                found = adapter.numpy(grads["block0.weight"])
                np.testing.assert_allclose(found, wanted.setdefault((writer, step), found), rtol=1e-4)


def test_backward_reads_what_forward_wrote(pool: Any) -> None:
    pool.run(1, reads_what_it_wrote)


def _replace_data(p: Any, new: Any) -> None:
    p.data = new


#: Ways to give a parameter a value, each as a function of the parameter and nine tenths of it. On CPU MindSpore's
#: arithmetic in place, such as `mul_`, changes no parameter.
WAYS = {
    "set_data": lambda p, new: p.set_data(new),
    "assign": ops.assign,
    "Assign": lambda p, new: ops.Assign()(p, new),
    "assign_add": lambda p, new: ops.assign_add(p, new - p),
    "assign_sub": lambda p, new: ops.assign_sub(p, p - new),
    "assign_value": lambda p, new: p.assign_value(new),
    "copy_": lambda p, new: p.copy_(new),
    "data": _replace_data,
}


class Shrinking(nn.Cell):
    """A layer, and a frozen one whose parameters shrink by a tenth from the fourth call on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.frozen, self.way, self.calls = nn.Dense(4, 3), nn.Dense(3, 5), WAYS[way], 0
        for cell in (self.layer, self.frozen):
            cell.weight.set_data(Tensor(np.linspace(-1, 1, cell.weight.size).reshape(cell.weight.shape), ms.float32))
            cell.bias.set_data(Tensor(np.linspace(1, 2, cell.bias.size), ms.float32))
        for p in self.frozen.get_parameters():
            p.requires_grad = False

    def construct(self, x: Any) -> Any:
        self.calls += 1
        for p in self.frozen.get_parameters() if self.calls > 3 else ():
            self.way(p, ops.stop_gradient(p * 0.9))
        return self.frozen(self.layer(x))


@spmd.on_mesh()
def shrinks(mesh: Any) -> list[str]:
    """Each way to write, under `fully_shard` and `replicate`, with plain and distributed batches; gives the faults."""
    faults = []
    x = Tensor(np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32))
    for way in WAYS:
        single = Shrinking(way)
        wanted = [single(x).asnumpy() for _ in range(5)][-1]
        for shard in (fully_shard, replicate):
            for batch in (x, distribute_tensor(x, mesh, [Shard(0)])):
                model = shard(Shrinking(way), mesh=mesh) if shard is fully_shard else shard(Shrinking(way), mesh)
                what = f"{way}, {shard.__name__}, {type(batch).__name__}"
                try:
                    y = [model(batch) for _ in range(5)][-1]
                except Exception as error:
                    faults.append(f"{what}: {error}")
                    continue
                found = y.full_tensor() if isinstance(y, DTensor) else y
                pairs = zip(single.get_parameters(), model.get_parameters(), strict=True)
                values = [(p.asnumpy(), q.full_tensor().asnumpy()) for p, q in pairs] + [(wanted, found.asnumpy())]
                faults += [f"{what}: {a} in place of {b}" for b, a in values if not np.allclose(a, b, rtol=1e-5)]
    return faults


@on_ranks(1, 3)
def test_each_way_to_write(pool: Any, world_size: int) -> None:
    for faults in pool.run(world_size, shrinks):
        assert not faults, "\n".join(faults)


#: Operations whose writes MindSpore does not count, as functions of a parameter, indices and values.
UNCOUNTED = {
    "scatter_update": ops.scatter_update,
    "scatter_nd_update": lambda p, at, x: ops.scatter_nd_update(p, at.reshape(-1, 1), x),
    "scatter_add": ops.scatter_add,
    "index_add": lambda p, at, x: ops.index_add(p, at, x, 0),
}


class Queue(nn.Cell):
    """A layer, statistics of one channel, which one rank holds, and a queue: each call writes rows of one rank."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.norm, self.way, self.calls = nn.Dense(4, 3), nn.BatchNorm1d(1), UNCOUNTED[way], 0
        self.layer.weight.set_data(Tensor(np.linspace(-1, 1, 12).reshape(3, 4), ms.float32))
        self.layer.bias.set_data(ops.ones((3,), ms.float32))
        self.queue = Parameter(ops.zeros((8, 3), ms.float32), requires_grad=False, name="queue")

    def construct(self, x: Any) -> Any:
        y = self.layer(x)
        loss = mint.matmul(y, self.queue.T).square().sum() + self.norm(y[:, :1]).square().sum()
        if self.training:
            row = 2 * (self.calls % 4)
            self.way(self.queue, Tensor([row, row + 1], ms.int32), ops.stop_gradient(y)[:2])
            self.calls += 1
        return loss


@spmd.on_mesh()
def fills(mesh: Any, way: str, keep: bool) -> None:
    """Forwards that evaluate come first: a unit looks for values of uncounted writes in its first two forwards."""
    single, model = Queue(way), fully_shard(Queue(way), mesh=mesh, reshard_after_forward=not keep)
    model.set_reshard_after_backward(not keep)
    for step in range(7):
        x = Tensor(np.random.default_rng(step).standard_normal((6, 4)).astype(np.float32))
        found = []
        for cell in (single, model):
            cell.set_train(step > 2)
            weights = cell.trainable_params()
            found.append(ms.value_and_grad(lambda x, cell=cell: cell(x), None, weights)(x)[0].asnumpy())
        np.testing.assert_allclose(*found, rtol=1e-4)
    for p, q in zip(single.get_parameters(), model.get_parameters(), strict=True):
        np.testing.assert_allclose(q.full_tensor().asnumpy(), p.asnumpy(), rtol=1e-4, err_msg=p.name)


@on_ranks(2, 3, gate=(2,))
def test_writes_that_nothing_counts(pool: Any, world_size: int) -> None:
    for i, way in enumerate(UNCOUNTED):
        pool.run(world_size, fills, way, i % 2 == 1)
