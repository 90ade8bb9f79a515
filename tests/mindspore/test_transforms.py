"""MindSpore's transforms of functions: those that compile refuse DTensors; of styled modules they are right."""

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
    Replicate,
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


def _listed(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@on_mesh(2)
def transform(mesh: Any) -> dict[str, str]:
    x = Tensor(np.arange(8, dtype=np.float32).reshape(2, 4) / 10)
    block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    gathered = parallelize_module(Block(), mesh, {"up": ColwiseParallel(output_layouts=Replicate())})
    distributed, found = distribute_tensor(x, mesh, [Shard(0)]), {}
    for name, apply in TRANSFORMS.items():
        with CommDebugMode() as comm, pytest.raises(RuntimeError) as refused:
            apply(ops.tanh, distributed)
        assert not comm.get_total_counts()
        found[name] = str(refused.value).splitlines()[0]
        # Tensors between modules with styles are plain, and graphs can hold them. MindSpore's own errors end
        # derivatives through a gathering cell: "The func graph is empty", "vmap currently not support the side effect
        # op".
        for f in (block, gathered) if "vmap" in name else (block,):
            pairs = zip(_listed(apply(f, x)), _listed(apply(Block(), x)), strict=True)
            assert all(np.allclose(a.asnumpy(), b.asnumpy(), atol=1e-5) for a, b in pairs), name
    gradients = []
    for f in (block, Block()):
        got = ms.vjp(f, x)[1](x)
        gradients.append((got[0] if isinstance(got, tuple) else got).asnumpy())
    assert np.allclose(*gradients, atol=1e-5)
    return found


def test_transforms_that_compile(pool: Any) -> None:
    first, second = pool.run(2, transform)
    assert first == second
    assert all("distributed tensors work in PyNative mode, without jit" in said for said in first.values()), first


def test_rules_that_would_never_be_asked_are_refused() -> None:
    for name in (*PASS_THROUGH, *VARIANTS):
        with pytest.raises(
            ValueError, match=r"has a sharding rule already|would never be called: the backend reads this"
        ):
            register_sharding(name, lambda shapes, static_args: None)
