"""Gradients of gradients through `replicate` and `fully_shard`, by parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from hyper_parallel import DTensor, Shard, fully_shard, replicate
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.spmd import on_mesh

ROWS = 3


def model() -> Any:
    rng = np.random.default_rng(0)
    cells = [nn.Dense(4, 4) for _ in range(2)]
    for cell in cells:
        for p in (cell.weight, cell.bias):
            p.set_data(ms.Tensor(rng.standard_normal(p.shape).astype(np.float32)))
    return nn.SequentialCell(cells[0], nn.Tanh(), cells[1], nn.Tanh())


def penalty(module: Any) -> Callable[[Any], Any]:
    """The sum of squares of the gradient by the input, as WGAN-GP has it."""
    inner = ms.grad(lambda x: ops.square(module(x)).sum(), 0)
    return lambda x: ops.square(inner(x)).sum()


def of_parameters(module: Any) -> Callable[[Any], Any]:
    """The sum of squares of the gradients by parameters."""
    weights = tuple(module.trainable_params())

    def loss(x: Any) -> Any:
        grads = ms.grad(lambda x: ops.square(module(x)).sum(), None, weights)(x)
        return sum(ops.square(g.to_local() if hasattr(g, "to_local") else g).sum() for g in grads)

    return loss


@on_mesh()
def second_order(mesh: Any) -> None:
    """Right, or refused on all ranks."""
    size, rank = mesh.size(), mesh.get_local_rank(0)
    batch = np.random.default_rng(1).standard_normal((size * ROWS, 4)).astype(np.float32)
    x = ms.Tensor(batch[rank * ROWS : (rank + 1) * ROWS])
    single = model()
    wanted = ms.grad(penalty(single), None, tuple(single.trainable_params()))(ms.Tensor(batch))
    for apply in (lambda m: replicate(m, mesh), lambda m: fully_shard(m, mesh=mesh)):
        for loss in (penalty, of_parameters):
            module = apply(model())
            with pytest.raises(RuntimeError, match="second-order gradients through"):
                ms.grad(loss(module), None, tuple(module.trainable_params()))(x)
    # One batch of all ranks.
    module = replicate(model(), mesh)
    got = ms.grad(penalty(module), None, tuple(module.trainable_params()))(DTensor.from_local(x, mesh, [Shard(0)]))
    for g, w in zip(got, wanted, strict=True):
        same(g.asnumpy(), w.asnumpy(), "gradient of a penalty", 1e-4)


def test_second_order(pool: Any) -> None:
    pool.run(2, second_order)
