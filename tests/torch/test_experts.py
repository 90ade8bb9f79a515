"""Experts under torch's activation checkpointing, autocast and `MixedPrecisionPolicy`, against a single device."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColumns
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    CommDebugMode,
    DeviceMesh,
    ExpertParallel,
    MixedPrecisionPolicy,
    Shard,
    distribute_tensor,
    fully_shard,
    parallelize_module,
)
from hyper_parallel.integrations.huggingface import full_state_dict, parallelize_model
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter, torch_adapter
from hyper_parallel.testing.conformance.test_expert_training import (
    EXPERTS,
    FEATURES,
    HEAD,
    HIDDEN,
    LENGTH,
    VOCABULARY,
    Case,
    Run,
    compare,
    distribute,
    near,
)
from hyper_parallel.testing.extent import in_gate
from tests.torch.huggingface_jobs import precise, trained_alike, units_of
from tests.torch.huggingface_models import SPARSE


class Recomputed(torch_adapter.SparseModel):
    """A model whose blocks are computed again in backward; None as ``reentrant`` leaves that out."""

    reentrant: bool | None = None

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def build(dtype: Any) -> Any:
    model = Recomputed(VOCABULARY, FEATURES, HIDDEN, HEAD, EXPERTS, 2, True)
    return get_adapter().load(model, np.random.default_rng(5), dtype)


def one_step(single: Any, sharded: Any, dp: Any, what: str, tolerance: float) -> None:
    """Compare outputs and gradients of a plain batch, of which ranks have one or two sequences."""
    shares = [1 + rank % 2 for rank in range(dp.size())]
    rank = int(np.argwhere(dp.ranks.ravel() == dp.get_rank())[0][0])
    end = sum(shares[: rank + 1])
    mine = slice(end - shares[rank], end)
    runs = Run(single, ..., None, dp.size()), Run(sharded, mine, None, 1)
    rng = np.random.default_rng(1)
    ids, targets = (rng.integers(0, VOCABULARY, (sum(shares), LENGTH)).astype(np.int64) for _ in range(2))
    (_, y), (_, got) = (run.backward(ids, targets) for run in runs)
    near(got.double(), y.double(), f"output, {what}", tolerance, mine)
    grads = {name: g.double() for name, g in (runs[0].grads or {}).items()}
    compare(runs[1].grads or {}, grads, f"gradient, {what}", tolerance)


@spmd.on_mesh(2, 2, names=("rest", "ep"))
def computed_again(mesh: Any) -> None:
    for how in ("fully_shard", "replicate"):
        for reentrant in (False, True):
            single, sharded = build(np.float64), build(np.float64)
            dp = distribute(sharded, mesh, Case((2, 2), how))
            single.reentrant = sharded.reentrant = reentrant
            with CommDebugMode() as comm:
                one_step(single, sharded, dp, f"{how}, {reentrant=}", 1e-12)
            # Two for each of two blocks: in forward, in the forward that comes again, and in backward.
            assert comm.get_comm_counts()["all_to_all"] == 2 * 2 * 3


def test_blocks_that_are_computed_again(pool: Any) -> None:
    pool.run(4, computed_again)


@spmd.on_mesh(1, 2, names=("rest", "ep"))
def in_low_precision(mesh: Any) -> None:
    for how in ("policy", "autocast"):
        single, sharded = build(np.float32), build(np.float32)
        parallelize_module(sharded, mesh["ep"], {"layers.*.experts": ExpertParallel()})
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if how == "policy" else None)
        for layer in sharded.layers:
            fully_shard(layer.experts, mesh=mesh["rest"], mp_policy=policy)  # one rank, which casts
            fully_shard(layer, mesh=mesh["ep"], mp_policy=policy)
        fully_shard(sharded, mesh=mesh["ep"], mp_policy=policy)
        if how == "policy":
            single.bfloat16()
        with torch.autocast(mesh.device_type, torch.bfloat16) if how == "autocast" else nullcontext():
            one_step(single, sharded, mesh["ep"], how, 0.05)
        for p in sharded.parameters():
            assert p.dtype is p.grad.dtype is torch.float32


def test_low_precision(pool: Any) -> None:
    pool.run(2, in_low_precision)


class Stacked(nn.Module):
    """The class of the page: experts of a list as one module with stacked parameters."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.names, self.expert = [name for name, _ in experts[0].named_parameters()], (experts[0],)
        for name in self.names:
            stacked = torch.stack([expert.get_parameter(name).detach() for expert in experts])
            self.register_parameter(name.replace(".", "_"), nn.Parameter(stacked))

    def forward(self, x: Any, counts: Any) -> Any:
        y = []
        for rows, *weights in zip(x.split(counts.tolist()), *self._parameters.values(), strict=True):
            y.append(functional_call(self.expert[0], dict(zip(self.names, weights, strict=True)), rows))
        return torch.cat(y)


@spmd.on_mesh()
def stacked_list(mesh: Any) -> None:
    """Experts with biases, of which none of a rank, or one, has tokens."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3))
    experts = experts.double().to(mesh.device_type)
    with pytest.raises(ValueError, match="For a list with one module for each expert, stack the weights"):
        parallelize_module(experts, mesh, ExpertParallel())
    sharded = parallelize_module(Stacked(experts), mesh, ExpertParallel())
    numbers = torch.tensor([[2, 0, 1], [0, 0, 3]])
    xs, rank = torch.randn(2, 3, 4, dtype=torch.float64).to(mesh.device_type), mesh.get_local_rank()
    for x, counts in zip(xs, numbers, strict=True):
        y = [expert(rows) for expert, rows in zip(experts, x.split(counts.tolist()), strict=True)]
        (torch.cat(y).square().sum() / 2).backward()
    sharded(xs[rank], numbers[rank]).square().sum().backward()
    for name, p in sharded.named_parameters():
        wanted = torch.stack([expert.get_parameter(name.replace("_", ".")).grad for expert in experts])
        torch.testing.assert_close(p.grad.full_tensor(), wanted, rtol=1e-12, atol=1e-14)


def test_a_list_of_experts(pool: Any) -> None:
    pool.run(2, stacked_list)


#: Mesh ("dp", "tp"), and dimensions over which the experts lie.
OVER = {"both": ((2, 2), ("dp", "tp")), "cut inside": ((2, 2), ("dp",)), "dp alone": ((2, 1), ("dp",))}


def of_transformers(case: str, over: str) -> None:
    """Losses, gradients, clipping and steps, of data-parallel ranks with samples of their own."""
    shape, dims = OVER[over]
    mesh = spmd.device_mesh(*shape, names=("dp", "tp"))
    if mesh is None:
        return
    single = precise(case)
    if case != "llama 4":
        single.set_experts_implementation("eager")  # the grouped kernels have no double precision
    ep = mesh["dp", "tp"]._flatten("ep") if len(dims) > 1 else mesh["dp"]
    model = parallelize_model(copy.deepcopy(single), mesh["tp"], expert_parallel=ep)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    cut = over == "cut inside" and case != "gpt oss"  # whose plan cuts no expert
    assert experts and all(p.device_mesh.ndim == (2 if cut else 1) for p in experts)
    units_of(model, fully_shard, mesh["dp"])
    trained_alike(single, model, 2, mesh.get_local_rank("dp"))
    saved, wanted = full_state_dict(model), single.state_dict()
    assert list(saved) == list(wanted)
    for name, x in wanted.items():
        torch.testing.assert_close(saved[name], x, rtol=1e-4, atol=1e-4)


def of_transformers_meshes(size: int) -> None:
    """Experts over the mesh that transformers makes for experts. Dense layers are on its other mesh."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    _, meshes = initialize_distributed_mesh(DistributedConfig(tp_size=2, fsdp_size=2, ep_size=size))
    single = precise("mixtral")
    single.set_experts_implementation("eager")
    tp, data = meshes.get_mesh("tp"), meshes.get_mesh("fsdp")
    model = parallelize_model(copy.deepcopy(single), tp, expert_parallel=meshes.get_mesh("ep"))
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert experts and all(p.device_mesh.size() == size for p in experts)
    units_of(model, fully_shard, data)
    trained_alike(single, model, 2, data.get_local_rank())
    with pytest.raises(ValueError, match="is not a 1-D slice"):
        parallelize_model(precise("mixtral"), tp, expert_parallel=meshes.get_mesh(("efsdp", "ep")))
    with pytest.raises(TypeError, match="needs a hyper_parallel DeviceMesh, got"):
        parallelize_model(precise("mixtral"), tp, expert_parallel="ep")
    model = torch_parallelize(precise("mixtral"), tp, {"lm_head": TorchColumns()})
    with pytest.raises(TypeError, match=r"'lm_head.weight' is a DTensor of torch. Load the model without tp_plan"):
        parallelize_model(model, tp)


@spmd.on_mesh()
def of_transformers_by_hand(mesh: Any, case: str) -> None:
    single = precise(case)
    model = parallelize_module(copy.deepcopy(single), mesh, {"model.layers.*.mlp.experts": ExpertParallel()})
    units_of(model, fully_shard, mesh)
    trained_alike(single, model, mesh.size(), mesh.get_local_rank())


@spmd.on_mesh(2, 2, names=("dp", "tp"))
def refused_meshes(mesh: Any) -> None:
    other = DeviceMesh(None, np.arange(4).reshape(2, 2))
    for tp, over in ((mesh["tp"], mesh), (mesh["tp"], other), (other[1], other[0])):
        with pytest.raises(ValueError, match="is not a 1-D slice"):
            parallelize_model(precise("mixtral"), tp, expert_parallel=over)
    with pytest.raises(ValueError, match="has no expert parallelism"):
        parallelize_model(precise("mixtral"), mesh["tp"], expert_parallel=mesh["dp"], plan=WITHOUT)
    with pytest.raises(ValueError, match="tokens cannot be sent to ranks of their experts"):
        parallelize_model(precise("llama 4"), mesh["tp"], expert_parallel=True)
    model = parallelize_model(precise("llama 4"), mesh["tp"], expert_parallel=mesh["dp"])
    experts, like = model.model.layers[0].feed_forward.experts, {"dtype": torch.float64, "device": mesh.device_type}
    with pytest.raises(ValueError, match=r"is called with a DTensor.*a plain batch on each rank"):
        experts(distribute_tensor(torch.ones(8, 32, **like), mesh["dp"], [Shard(0)]))
    with pytest.raises(ValueError, match="the arguments are neither"):
        experts(torch.ones(7, 32, **like))


WITHOUT = {"model.layers.*.mlp.experts": None, "model.layers.*.mlp.experts.*": None}
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None or os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu",
    reason="transformers is not installed, or the device has no double precision",
)


@needs_transformers
@pytest.mark.parametrize(
    "case_and_over",
    in_gate(
        [(case, over) for case in ("mixtral", "qwen3 moe", "deepseek 2", *SPARSE) for over in OVER],
        [("mixtral", "both"), ("mixtral", "cut inside"), ("llama 4", "dp alone")],
    ),
    ids=", ".join,
)
def test_models_of_transformers(pool: Any, case_and_over: tuple[str, str]) -> None:
    case, over = case_and_over
    pool.run(int(np.prod(OVER[over][0])), of_transformers, case, over)


@needs_transformers
@pytest.mark.parametrize("size", in_gate([2, 4], [4]))
def test_meshes_of_transformers(pool: Any, size: int) -> None:
    pool.run(4, of_transformers_meshes, size)


@needs_transformers
def test_models_of_transformers_by_hand(pool: Any) -> None:
    pool.run(2, of_transformers_by_hand, "mixtral")
    pool.run(4, refused_meshes)
