"""MindSpore's transforms of functions: those that compile refuse what is distributed; `vjp` is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
    register_sharding,
)
from hyper_parallel.platform.mindspore.op_table import PASS_THROUGH, VARIANTS
from hyper_parallel.testing.spmd import on_mesh

TRANSFORMS: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "vmap": lambda f, x: ms.vmap(f)(x),
    "ops.vmap": lambda f, x: ops.vmap(f)(x),
    "jvp": lambda f, x: ms.jvp(f, x, x),
    "jacfwd": lambda f, x: ms.jacfwd(f)(x),
    "jacrev": lambda f, x: ms.jacrev(f)(x),
}


class Block(nn.Cell):
    """Linear, tanh, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(4, 6, weight_init="ones", bias_init="zeros")
        self.down = nn.Dense(6, 4, weight_init="ones", bias_init="zeros")

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.tanh(self.up(x)))


@on_mesh(2)
def transform(mesh: Any) -> dict[str, str]:
    x = Tensor(np.arange(8, dtype=np.float32).reshape(2, 4) / 10)
    block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    found = {}
    for name, apply in TRANSFORMS.items():
        for what, (f, given) in {
            "DTensor": (ops.tanh, distribute_tensor(x, mesh, [Shard(0)])),
            "module": (block, x),
        }.items():
            with CommDebugMode() as comm, pytest.raises(RuntimeError) as refused:
                apply(f, given)
            assert not comm.get_total_counts()
            found[f"{name} of {what}"] = str(refused.value).splitlines()[0]
    gradients = []
    for f in (block, Block()):
        got = ms.vjp(f, x)[1](x)
        gradients.append((got[0] if isinstance(got, tuple) else got).asnumpy())
    assert np.allclose(*gradients, atol=1e-5)
    return found


def test_transforms_that_compile_are_refused(pool: Any) -> None:
    first, second = pool.run(2, transform)
    assert first == second
    assert all("distributed tensors work in PyNative mode, without jit" in said for said in first.values()), first


def test_rules_that_would_never_be_asked_are_refused() -> None:
    for name in (*PASS_THROUGH, *VARIANTS):
        with pytest.raises(ValueError, match=r"has a sharding rule already|would never be called: the backend asks it"):
            register_sharding(name, lambda shapes, static_args: None)
