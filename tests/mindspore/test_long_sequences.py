"""Cut sequences under both kinds of recomputation of MindSpore."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import ContextParallel, DTensor, Partial, parallelize_module, shard_sequence
from hyper_parallel.experimental import context_parallel
from hyper_parallel.mindspore import scaled_dot_product_attention, value_and_grad
from hyper_parallel.testing import spmd
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.conformance.test_long_sequences import causal_with_mask

FEATURES, LENGTH = 12, 8


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = mint.nn.Linear(FEATURES, FEATURES), mint.nn.Linear(FEATURES, FEATURES)

    def construct(self, x: Any) -> Any:
        q = self.query(x).reshape((x.shape[0], x.shape[1], 4, 3)).swapaxes(1, 2)
        y = scaled_dot_product_attention(q, q, q, is_causal=True).swapaxes(1, 2)
        return self.out(y.reshape(x.shape))


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mix = Attention(), mint.nn.Linear(FEATURES, FEATURES)

    def construct(self, x: Any) -> Any:
        return x + self.mix(ops.tanh(x + self.attention(x)))


def fresh() -> Block:
    block, rng = Block(), np.random.default_rng(1)
    for p in block.get_parameters():
        p.set_data(Tensor(0.3 * rng.standard_normal(p.shape).astype(np.float32)))
    return block


def gradients(block: Block, x: Tensor, weights: Tensor) -> Any:
    _, grads = value_and_grad(lambda x: (block(x) * weights).sum(), None, list(block.get_parameters()))(x)
    return grads


@spmd.on_mesh()
def recomputed(mesh: Any) -> None:
    rng = np.random.default_rng(0)
    x, weights = (Tensor(rng.standard_normal((2, LENGTH, FEATURES)), ms.float32) for _ in range(2))
    wanted = gradients(fresh(), x, weights)
    batch = shard_sequence({"x": x, "weights": weights}, mesh)
    for styled in (False, True):
        for options in ({}, {"use_reentrant": False}):
            block = fresh()
            if styled:
                parallelize_module(block, mesh, {"attention": ContextParallel()})
            block.recompute(**options)
            with nullcontext() if styled else context_parallel(mesh, length=LENGTH):
                found = gradients(block, batch["x"], batch["weights"])
            for own, whole in zip(found, wanted, strict=True):
                total = DTensor.from_local(own, mesh, [Partial()]).full_tensor()
                same(total.asnumpy(), whole.asnumpy(), f"style {styled}, {options}", 1e-4)


def test_recomputation(pool: Any) -> None:
    pool.run(2, recomputed)


def test_a_query_whose_keys_are_all_masked(pool: Any) -> None:
    """Zeros, as from torch's kernel, on one device and on shards."""
    pool.run(3, causal_with_mask, 7, True)
