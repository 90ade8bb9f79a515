"""Dry runs on the device meta: of a Llama, of any size."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.train_llama.config import LlamaConfig
from examples.train_llama.model_torch import LlamaForCausalLM
from examples.train_llama.plan import spread, tensor_parallel_plan
from hyper_parallel import ColwiseParallel, CommTrace, RowwiseParallel, explain, get_platform, init_device_mesh
from hyper_parallel.explain import DryStep, DryStepError
from hyper_parallel.platform.dry import dry_world
from hyper_parallel.testing.conformance.test_explain import facts
from hyper_parallel.testing.spmd import on_mesh

TOKENS = torch.arange(2 * 16).reshape(2, 16)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2))


@on_mesh(2, 2, names=("dp", "tp"))
def a_llama(mesh: Any) -> tuple[list[tuple], list[tuple]]:
    """Tensor and sequence parallel, its parameters sharded over data-parallel ranks, on meta and on four ranks."""
    model, rank = llama(), mesh.get_rank()
    foreseen = explain(copy.deepcopy(model).to("meta"), mesh, spread, TOKENS, rank=rank)
    spread(model, mesh)
    with CommTrace(model) as trace:
        torch.sum(model(TOKENS)).backward()
    assert {"wire_bytes", "seconds", "module"} <= trace.as_dict()["collectives"][0].keys()
    return facts(foreseen.collectives), facts(trace.collectives)


def test_a_llama(pool: Any) -> None:
    for foreseen, seen in pool.run(4, a_llama):
        assert foreseen == seen and len(seen) > 30


def test_cost_does_not_depend_on_the_number_of_ranks() -> None:
    model, times = llama().to("meta"), []
    for ranks in (4, 4, 16384):
        began = time.perf_counter()
        found = explain(model, {"dp": ranks // 4, "tp": 4}, spread, TOKENS)
        times.append(time.perf_counter() - began)
        assert found.mesh == {"dp": ranks // 4, "tp": 4} and len(str(found)) < 20_000
    assert times[2] < 3 * times[1] + 0.5


def test_a_world_ends() -> None:
    with dry_world(8, rank=3) as platform, platform.without_data():
        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
        assert mesh.get_coordinate() == (0, 3) and get_platform() is platform and mesh["tp"].size() == 4
        assert torch.ones(2).is_meta
        with pytest.raises(RuntimeError, match="a dry run has no process groups"):
            mesh.get_group("tp")
    assert get_platform() is not platform and not torch.ones(2).is_meta
    with pytest.raises(RuntimeError, match="the dry run is over"):
        mesh.get_rank()
    with pytest.raises(ValueError, match="no rank 8"), dry_world(8, rank=8):
        raise AssertionError


class Reads(nn.Module):
    """Decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) if x.sum() > 0 else x


def test_what_cannot_be_foreseen_is_an_error() -> None:
    with pytest.raises(DryStepError, match="does not run with tensors that have no data"):
        explain(Reads(), 2, {"up": ColwiseParallel()}, torch.ones(2, 4))
    model = nn.Sequential(nn.Linear(4, 4))
    with dry_world(2) as platform:
        applied = DryStep(model, 2, {"0": ColwiseParallel()}).model
    assert platform.world() is None
    with pytest.raises(ValueError, match="'0' is parallelised already"):
        DryStep(applied, 2, None)
    with pytest.raises(TypeError, match="a Module of the platform"):
        DryStep("model", 2, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="all are at least 1"):
        DryStep(model, (0, 2), None)
    with pytest.raises(ValueError, match='is called "tp"'):
        DryStep(model, {"a": 2, "b": 2}, {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match="without floating point tensors"):
        explain(Integers(), 2, None, torch.ones(2, dtype=torch.int64))


class Integers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Attends(nn.Module):
    """Attention with all that it may be given, a constant, and a tensor that is a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.scale = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = (self.project(x) * self.scale).view(2, 4, 2, 4).transpose(1, 2)
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, q, q, mask)
        y = y + F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(y, q, q, dropout_p=0.5)


def test_attention_keeps_no_scores() -> None:
    step = DryStep(Attends(), 2, None)
    usage = step.platform.usage()
    assert usage is not None
    with usage as used:
        step.run(torch.ones(2, 4, 8))
    names = [name for name, *_ in used.operations]
    assert sum("flash_attention_for_cpu" in name for name in names) >= 2
    assert used.live >= 0 and used.peak > 0 and used.mark() == used.live


def test_unmatched_and_untouched_are_shown() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "layer": ColwiseParallel()}
    found = explain(model, 4, plan, torch.ones(2, 4))
    assert list(found.unmatched) == ["layer"] and found.untouched == ["2"]
    text = str(found)
    assert "! the plan's 'layer' matches no module" in text and "not in the plan, whole on every rank: 2" in text
    assert "weight (8, 4) -> (2, 4) float32, Shard(0) on tp: 32 B" in text
    assert "forward: all_reduce over tp, 32 B" in text
    assert found.to_svg().startswith("<svg") and '"untouched"' in found.to_json()
    forward_only = explain(model, 4, None, torch.ones(2, 4), backward=False)
    assert not forward_only.collectives and "backward" not in str(forward_only)


def test_plan_of_the_example_on_one_rank() -> None:
    assert explain(llama(), 1, tensor_parallel_plan(), TOKENS).collectives == []
