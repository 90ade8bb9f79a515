"""Norms on shards of the sequence, without dispatch: values and gradients are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from hyper_parallel import CommDebugMode, SequenceParallel, get_platform, parallelize_module
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.comparisons import same
from hyper_parallel.testing.spmd import on_mesh

FEATURES = 6


class Scale(nn.Cell):
    """A norm of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Parameter(Tensor(np.ones(FEATURES, np.float32)))

    def construct(self, x: Any) -> Any:
        return x * self.scale / (x.square().mean(-1, keep_dims=True) + 1).sqrt()


# mint.nn.LayerNorm has no kernel for CPU.
NORMS: dict[str, Callable[[], Any]] = {"of MindSpore": lambda: nn.LayerNorm((FEATURES,)), "registered": Scale}


@on_mesh()
def norm(mesh: Any, name: str) -> None:
    get_platform().register_norm_module(Scale)
    rng = np.random.default_rng(0)
    single = NORMS[name]()
    for p in single.get_parameters():
        p.set_data(Tensor(rng.standard_normal(p.shape).astype(np.float32)))
    sharded = parallelize_module(copy.deepcopy(single), mesh, SequenceParallel(use_local_output=True))
    x, cotangent = (rng.standard_normal((2, 3 * mesh.size(), FEATURES)).astype(np.float32) for _ in range(2))

    def run(model: Any, part: slice) -> list[Any]:
        """Output, gradient of the input, gradients of the parameters."""

        def loss(x: Any) -> tuple[Any, Any]:
            y = model(x)
            return (y * Tensor(np.ascontiguousarray(cotangent[:, part]))).sum(), y

        weights = list(model.trainable_params())
        step = value_and_grad(loss, 0, weights or None, has_aux=True)
        (_, y), gradients = step(Tensor(np.ascontiguousarray(x[:, part])))
        of_x, of_weights = gradients if weights else (gradients, ())
        return [y, of_x, *of_weights]

    mine = slice(3 * mesh.get_local_rank(), 3 * mesh.get_local_rank() + 3)
    with CommDebugMode() as comm:
        got = run(sharded, mine)
    wanted = run(single, slice(None))
    assert len(got) == len(wanted)
    assert comm.get_total_counts() == (len(got) - 2 if mesh.size() > 1 else 0), "one all-reduce a parameter"
    for value, single_value in zip(got[:2], wanted[:2], strict=True):
        same(value.asnumpy(), single_value.asnumpy()[:, mine], "output and gradient of the input")
    for value, single_value in zip(got[2:], wanted[2:], strict=True):
        same(value.full_tensor().asnumpy(), single_value.asnumpy(), "gradient of a parameter")


@pytest.mark.parametrize("name", NORMS)
def test_norm(pool: Any, name: str) -> None:
    for world_size in (1, 2, 3):
        pool.run(world_size, norm, name)
