"""Dry runs with MindSpore, which computes nothing on its device meta: real tensors on the CPU, and nothing sent."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from examples.train_llama.config import LlamaConfig
from examples.train_llama.model_mindspore import LlamaForCausalLM
from examples.train_llama.plan import spread
from hyper_parallel import CommTrace, explain, get_platform
from hyper_parallel.testing.conformance.test_explain import facts
from hyper_parallel.testing.spmd import on_mesh

TOKENS = np.arange(2 * 16, dtype=np.int32).reshape(2, 16)


@on_mesh(2, 2, names=("dp", "tp"))
def a_llama(mesh: Any) -> tuple[list[tuple], list[tuple]]:
    """Tensor and sequence parallel, its parameters sharded over data-parallel ranks, foreseen and on four ranks."""
    ms.set_seed(0)
    model, platform = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2)), get_platform()
    foreseen = explain(model, mesh, spread, Tensor(TOKENS), rank=mesh.get_rank())
    spread(model, mesh)
    with CommTrace(model) as trace:
        platform.differentiate(lambda: model(Tensor(TOKENS)).sum(), list(model.trainable_params()))
    return facts(foreseen.collectives), facts(trace.collectives)


def test_a_llama(pool: Any) -> None:
    for foreseen, seen in pool.run(4, a_llama):
        assert foreseen == seen and len(seen) > 30
