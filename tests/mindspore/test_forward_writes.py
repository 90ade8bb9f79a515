"""What a forward writes to parameters under `fully_shard` arrives, however a cell of MindSpore writes it."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import check_ranks, fully_shard, replicate
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
    """Backward reads the weights of a norm to which the forward wrote, in models of several kinds one after the other:
    what MindSpore keeps of a tensor depends on those before."""
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
