"""Dry runs on the device meta: of a Llama, of any size."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from benchmarks.torch_sequences import Block, Heads
from examples.train_llama.config import LlamaConfig
from examples.train_llama.model_torch import LlamaForCausalLM
from examples.train_llama.plan import spread, tensor_parallel_plan
from hyper_parallel import (
    ColwiseParallel,
    CommTrace,
    ContextParallel,
    DTensor,
    ExpertParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    explain,
    fully_shard,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.planning import DryStep, DryStepError, dry_run, search
from hyper_parallel.platform.dry import dry_world
from hyper_parallel.platform.torch.basics.usage import UsageMode
from hyper_parallel.testing.conformance.test_explain import facts
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.support.counted_calls import calls_of
from tests.torch.support import device

TOKENS = torch.arange(2 * 16).reshape(2, 16)


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2))


def test_cut_sequences() -> None:
    """Styles on "cp" after those on "tp"; data parallelism over dp and cp."""
    model = Block(Heads(8, 8, 4))
    styles = {"[qkv]": "colwise", "o": "rowwise", "": ContextParallel(method="ring")}
    found = explain(model, {"cp": 4, "tp": 2}, styles, torch.ones(1, 16, 32), backward=False)
    shifts = [c for c in found.collectives if c.kind == "shift"]
    piece = 2 * 16 * 4 * 4 * 4  # keys and values of 16 positions, 4 heads, 4 features
    assert [(c.mesh_dim, c.bytes, c.wire_bytes) for c in shifts] == [("cp", piece, piece)] * 3
    run = dry_run(model, {"dp": 2, "cp": 4, "tp": 2}, styles, torch.ones(1, 16, 32))
    assert run.memory.parameters == 4 * 32 * 32 * 4 // 16
    only = dry_run(model, {"dp": 1, "cp": 4}, {"": ContextParallel()}, torch.ones(1, 16, 32))
    assert only.memory.parameters == 4 * 32 * 32 * 4 // 4


def test_search_over_cut_sequences() -> None:
    """Each rank's part is that of a dry run by hand; sizes that do not divide are not possible."""
    model, x = Block(Heads(8, 8, 4)), torch.ones(4, 16, 32)
    plan, style = {"[qkv]": "colwise", "o": "rowwise"}, {"": ContextParallel(method="gather")}
    found = search(model, 8, {"tp": plan}, x, tensor_parallel=[1, 2], sequences=style, recompute=[False])
    assert {(c.dp, c.cp, c.tp) for c in found.candidates if c.run} == {(4, 2, 1), (2, 4, 1), (1, 8, 1)} | {
        (4, 1, 2),
        (2, 2, 2),
        (1, 4, 2),
    }
    one = next(c for c in found.candidates if (c.dp, c.cp, c.tp) == (2, 2, 2))
    both = dry_run(model, {"dp": 2, "cp": 2, "tp": 2}, {**plan, **style}, torch.ones(2, 8, 32))
    assert one.run is not None and one.run.as_dict() == both.as_dict() and one.as_dict()["cp"] == 2
    assert {c.error for c in found.candidates if not c.run} == {
        "dimension 0 of a batch of shape (4, 16, 32) is not divisible by dp=8"
    }
    assert "cp" in str(found).splitlines()[0]
    uneven = search(
        model, 8, {"f": lambda m, mesh: m}, x[:, :9], tensor_parallel=[2], sequences=style, context_parallel=[2, 3]
    )
    assert {c.error.split(" of a batch")[0] for c in uneven.candidates} == {
        "4 ranks do not divide into groups of 3 for sequences",
        "sequences cannot be searched with a plan that is a function: pass a dict of styles by path",
    }
    short = search(model, 8, {"tp": plan}, x[:, :9], tensor_parallel=[1], sequences=style, context_parallel=[2])
    assert {c.error for c in short.candidates} == {
        "dimension 1 of a batch of shape (4, 9, 32) is not divisible by cp=2"
    }
    with pytest.raises(ValueError, match="either experts or sequences"):
        search(model, 8, {"tp": plan}, x, sequences=style, experts={"": ExpertParallel()})


@on_mesh(2, 2, names=("dp", "tp"))
def a_llama(mesh: Any) -> tuple[list[tuple], list[tuple]]:
    """Tensor and sequence parallel, its parameters sharded over data-parallel ranks, on meta and on four ranks."""
    model, rank = llama(), mesh.get_rank()
    foreseen = explain(copy.deepcopy(model).to("meta"), mesh, spread, TOKENS, rank=rank)
    spread(model.to(device()), mesh)
    with CommTrace(model) as trace:
        torch.sum(model(TOKENS.to(device()))).backward()
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
    with pytest.raises(RuntimeError, match="the dry run has ended"):
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


def test_an_input_with_data_may_want_a_gradient() -> None:
    """The gradient of such an input cannot go back to the device of the data."""
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8))
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1))}
    found = explain(model, 4, plan, torch.ones(2, 8, 16, requires_grad=True))
    assert {c.kind for c in found.collectives if c.direction == "backward"} == {"reduce_scatter", "all_reduce"}


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
    with pytest.raises(ValueError, match="Sizes are at least 1"):
        DryStep(model, (0, 2), None)
    with pytest.raises(ValueError, match='needs a mesh dimension "tp"'):
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


def test_attention_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count two products forward and five backward, also where torch has no formula for CPUs, as before 2.15."""
    for name in ("", "_backward"):
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}")
        monkeypatch.delitem(flop_registry, operator, raising=False)
    q, count = torch.zeros(2, 4, 16, 8, requires_grad=True), 2 * 2 * 4 * 16 * 16 * 8
    with UsageMode() as usage:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert sorted(flops for _, flops, _, _ in usage.operations if flops) == [2 * count, 5 * count]


def test_attention_keeps_no_scores() -> None:
    step = DryStep(Attends(), 2, None)
    usage = step.platform.usage()
    assert usage is not None
    with usage as used:
        step.run(torch.ones(2, 4, 8))
    names = [name for name, *_ in used.operations]
    assert sum("flash_attention_for_cpu" in name for name in names) >= 2
    assert 0 <= used.live <= used.peak


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


# ---------------------------------------------------------------------------------------------- memory, time, search
@on_mesh(2, 2, names=("dp", "tp"))
def real_bytes(mesh: Any, mixed: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of a real step, counted on the real tensors, and those of the dry run."""
    model = llama()
    foreseen = dry_run(model, mesh, tensor_parallel_plan(), TOKENS, rank=mesh.get_rank(), mixed_precision=mixed)
    parallelize_module(model.to(device()), mesh["tp"], tensor_parallel_plan())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    with CommTrace(model) as trace:
        torch.sum(model(TOKENS.to(device()))).backward()
    optimizer.step()

    def size(tensors: Any) -> int:
        return sum(x.to_local().nbytes if isinstance(x, DTensor) else x.nbytes for x in tensors)

    state = [x for held in optimizer.state.values() for x in held.values()]
    found = {
        "parameters": size(model.parameters()),
        "gradients": size(p.grad for p in model.parameters()),
        "optimizer": size(state),
        "buffers": size(model.buffers()),
        "tp": sum(c.bytes for c in trace.collectives if c.mesh_dim == "tp"),
        "dp": sum(c.bytes for c in trace.collectives if c.mesh_dim == "dp"),
    }
    memory = vars(foreseen.memory)
    return found, {**{k: memory[k] for k in list(found)[:4]}, **{d: foreseen.traffic[d].bytes for d in ("tp", "dp")}}


@pytest.mark.parametrize("mixed", [False, True])
def test_bytes_are_those_of_a_real_step(pool: Any, mixed: bool) -> None:
    for found, foreseen in pool.run(4, real_bytes, mixed):
        assert found == foreseen and min(found.values()) > 0


def real_memory(recomputes: bool) -> tuple[int, int]:
    """The peak memory that a real step on one rank adds, by its storages, and that of the dry run."""
    model, tokens = llama(), TOKENS.repeat(4, 1)
    foreseen = dry_run(model, 1, None, tokens, recompute=recomputes)
    if recomputes:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    with UsageMode() as used:
        torch.sum(model(tokens)).backward()
    memory = foreseen.memory
    assert memory.peak is not None and memory.optimizer is not None
    return used.peak, memory.peak - memory.parameters - memory.buffers - memory.optimizer


@pytest.mark.parametrize("recomputes", [False, True])
def test_peak_is_that_of_a_real_step(recomputes: bool) -> None:
    real, foreseen = real_memory(recomputes)
    assert abs(real - foreseen) <= 0.05 * real


def test_recomputing_takes_less_memory_and_more_time() -> None:
    assert real_memory(True)[1] < 0.8 * real_memory(False)[1]
    plain, again = (
        dry_run(llama(), {"dp": 4, "tp": 2}, tensor_parallel_plan(), TOKENS, recompute=r)
        for r in (False, "model.layers.*")
    )
    assert plain.flops and again.flops and plain.compute_seconds and again.compute_seconds
    assert plain.flops < again.flops and plain.compute_seconds < again.compute_seconds
    assert again.traffic["tp"].bytes > plain.traffic["tp"].bytes


def deep(layers: int) -> nn.Module:
    config = LlamaConfig(num_hidden_layers=layers, hidden_size=64, vocab_size=512)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.mark.parametrize("rank", in_gate([2, 4], []))
def test_search_foresees_deep_models_by_shallow_ones(rank: int) -> None:
    model, batch = deep(9), torch.zeros(16, 32, dtype=torch.int64, device="meta")
    found = search(model, 16, {"sequence": tensor_parallel_plan()}, batch, tensor_parallel=[1, rank], memory=1 << 30)
    assert len(found.candidates) == 4 and found.best is found.candidates[0]
    for c in found.candidates:
        assert c.run is not None, c.error
        plan = tensor_parallel_plan() if c.tp > 1 else None
        whole = dry_run(model, {"dp": c.dp, "tp": c.tp}, plan, batch[: 16 // c.dp], recompute=c.recompute)
        exact, approximate = whole.as_dict(), c.run.as_dict()
        for name in ("seconds", "seconds_overlapped", "compute_seconds", "communication_seconds"):
            assert approximate.pop(name) == pytest.approx(exact.pop(name))
        peak = exact["memory"].pop("peak")
        assert approximate["memory"].pop("peak") == pytest.approx(peak, rel=0.05)
        for traffic in (*exact["traffic"].values(), *approximate["traffic"].values()):
            traffic.pop("seconds")
        assert exact == approximate
    assert "recompute" in str(found) and found.to_svg().startswith("<svg") and '"candidates"' in found.to_json()


def test_search_says_what_is_not_possible() -> None:
    batch = torch.zeros(6, 32, dtype=torch.int64, device="meta")
    found = search(deep(2), 8, {"plan": tensor_parallel_plan()}, batch, tensor_parallel=[2, 4], recompute=[False])
    assert [(c.tp, c.run is None) for c in found.candidates] == [(4, False), (2, True)]
    assert "is not divisible by dp=4" in found.candidates[1].error and "not possible" in str(found)
    assert search(deep(2), 2, {"plan": tensor_parallel_plan()}, batch, memory=1.0).best is None
    with pytest.raises(ValueError, match="does not divide 8 ranks"):
        search(deep(2), 8, {"plan": None}, batch, tensor_parallel=[3])
    with pytest.raises(ValueError, match="at least one plan"):
        search(deep(2), 8, {}, batch)


def test_wrong_requests() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    with pytest.raises(ValueError, match="no machine is called 'H1'"):
        dry_run(model, 2, None, x, machine="H1")
    with pytest.raises(ValueError, match="data_parallel takes"):
        dry_run(model, 2, None, x, data_parallel="ddp")
    with pytest.raises(ValueError, match="no list of equal layers"):
        dry_run(model, 2, None, x, recompute=True)
    with pytest.raises(ValueError, match="matches no module"):
        dry_run(model, 2, None, x, recompute="layers")
    assert dry_run(model, 2, None, x, optimizer="None").memory.optimizer is None
    text = str(dry_run(model, {"dp": 16, "tp": 1}, None, x, machine="ascend-910b", data_parallel="replicate"))
    assert "one of 16 ranks, Ascend 910B" in text and "across nodes" in text and "all_reduce" in text
    assert "'nothing' matches no module" in str(dry_run(model, 2, {"nothing": ColwiseParallel()}, x))


def calls_of_a_dry_run(layers: int, ranks: int) -> int:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)) for _ in range(layers))
    )
    plan = {"*.0": ColwiseParallel(), "*.1": RowwiseParallel()}
    return calls_of(lambda: dry_run(model, {"dp": ranks // 2, "tp": 2}, plan, torch.ones(2, 8)))


def test_a_layer_costs_the_same_for_any_number_of_ranks() -> None:
    """Lists of all ranks are made for the mesh, and not for each parameter and each comparison of ranks."""
    few, many = 0, 0
    for ranks in (2_000, 20_000):
        calls_of_a_dry_run(3, ranks)  # fills the caches
        few, many = many, calls_of_a_dry_run(6, ranks) - calls_of_a_dry_run(3, ranks)
    assert many <= 1.1 * few, (few, many)
