"""Dry runs with MindSpore, which computes nothing on its device meta: real tensors on the CPU, and nothing sent."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Tensor, nn, ops

from examples.train_llama.config import LlamaConfig
from examples.train_llama.model_mindspore import LlamaForCausalLM
from examples.train_llama.plan import spread, tensor_parallel_plan
from hyper_parallel import ColwiseParallel, CommTrace, explain, get_platform
from hyper_parallel.planning import dry_run
from hyper_parallel.platform.mindspore.gradients.local_gradients import LocalGradients
from hyper_parallel.testing.conformance.test_explain import facts
from hyper_parallel.testing.spmd import on_mesh

TOKENS = np.arange(2 * 16, dtype=np.int32).reshape(2, 16)
PLAN = tensor_parallel_plan()


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


def test_a_dry_run() -> None:
    """A dry run of MindSpore reports everything that needs no knowledge of single operations."""
    found = dry_run(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2)), {"dp": 64, "tp": 2}, PLAN, Tensor(TOKENS))
    memory = found.memory
    assert memory.parameters == memory.gradients > 0 and memory.gathered > 0
    assert memory.activations is memory.peak is found.seconds is found.seconds_overlapped is found.fits is None
    assert found.traffic["tp"].bytes > 0 and found.traffic["dp"].counts == {"all_gather": 5, "reduce_scatter": 3}
    assert "time: unknown" in str(found) and '"traffic"' in found.to_json()


class Drops(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Dense(4, 8), nn.Dropout(p=0.5)

    def construct(self, x: Any) -> Any:
        return ops.dropout(self.drop(self.up(x)), 0.5) * Tensor(np.random.rand(1), ms.float32)


def test_what_a_dry_run_leaves_behind() -> None:
    """Other ranks may have no dry run: later random numbers and gradients are taken as without it."""
    platform, x = get_platform(), Tensor(np.ones((2, 4), np.float32))
    ms.set_seed(4)
    model = Drops().set_train()
    ops.dropout(x, 0.5)
    before, parts, of_datasets = platform.get_rng_state(), LocalGradients.parts, ds.config.get_seed()
    explain(model, 2, {"up": ColwiseParallel()}, x)
    after = platform.get_rng_state()
    assert after[1:3] == before[1:3] and (after[0] == before[0]).all() and (after[3][1] == before[3][1]).all()
    assert LocalGradients.parts is parts and ds.config.get_seed() == of_datasets
    ds.config.set_seed(77)
    platform.set_rng_state(before)
    assert ds.config.get_seed() == 77
    ds.config.set_seed(of_datasets)
