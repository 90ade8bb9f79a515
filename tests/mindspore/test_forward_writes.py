"""What a forward writes to parameters under `fully_shard` arrives, however a cell of MindSpore writes it."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import check_ranks, fully_shard
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import on_ranks


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
def follows(mesh: Any, reshard: bool) -> None:
    single, model = Writing(), Writing()
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
    for reshard in (False, True):
        pool.run(world_size, follows, reshard)
