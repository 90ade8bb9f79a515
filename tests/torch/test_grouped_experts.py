"""Experts as torchtitan has them: stacked weights, called with sorted tokens and the number for each expert.

Its plan is applied with the import lines swapped.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    DTensor,
    ExpertParallel,
    Shard,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.testing import spmd
from hyper_parallel.testing.extent import in_gate
from tests.torch.support import close

FEATURES, HIDDEN, EXPERTS, TOP_K, TOKENS = 8, 16, 5, 2, (6, 1, 4)


class GroupedExperts(nn.Module):
    """Gated layers of several experts, whose weights may be DTensors."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = num_experts, use_grouped_mm
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) * 0.3)
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) * 0.3)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) * 0.3)

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        if self.use_grouped_mm:
            ends = torch.cumsum(num_tokens_per_expert, 0, dtype=torch.int32)
            h = F.silu(torch._grouped_mm(x, w1.transpose(-2, -1), offs=ends))
            h = h * torch._grouped_mm(x, w3.transpose(-2, -1), offs=ends)
            return torch._grouped_mm(h, w2.transpose(-2, -1), offs=ends).type_as(x)
        parts = torch.split(x, [int(n) for n in num_tokens_per_expert.tolist()])
        out = [(F.silu(part @ w1[i].T) * (part @ w3[i].T)) @ w2[i].T for i, part in enumerate(parts)]
        return torch.cat(out)


class MoE(nn.Module):
    """A router, its bias, and the experts. Tokens are sorted by expert, and scaled before or after."""

    def __init__(self, use_grouped_mm: bool, scale_before: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, EXPERTS, bias=False)
        self.experts = GroupedExperts(FEATURES, HIDDEN, EXPERTS, use_grouped_mm)
        self.scale_before = scale_before
        self.register_buffer("expert_bias", torch.tensor([0.0, 3.0, 0.0, 0.0, -9.0]))  # one expert gets no token
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(self.gate(x))
        chosen = torch.topk(scores + self.expert_bias, TOP_K, dim=-1)[1]
        top_scores = scores.gather(1, chosen)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        order = torch.argsort(chosen.flatten(), stable=True)
        routed, scale = x[order // TOP_K], top_scores.flatten()[order].unsqueeze(-1)
        if self.scale_before:
            routed = routed * scale
        # As histograms give them, on some devices: numbers of another dtype.
        out = self.experts(routed, counts if self.scale_before else counts.to(x.dtype))
        if not self.scale_before:
            out = out * scale
        return torch.zeros_like(x).index_add(0, order // TOP_K, out)


@spmd.on_mesh()
def steps(mesh: Any, use_grouped_mm: bool, scale_before: bool, dtype: torch.dtype, how: str) -> None:
    """Outputs, gradients and steps of a plain batch on each rank, or of parts of one batch with summed losses."""
    torch.manual_seed(3)
    single = MoE(use_grouped_mm, scale_before).to(mesh.device_type, dtype)
    sharded, ranks = copy.deepcopy(single), mesh.size()
    style = ExpertParallel(input_layout=Shard(0)) if how == "sums" else ExpertParallel()
    parallelize_module(module=sharded.experts, device_mesh=mesh, parallelize_plan=style)
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in sharded.experts.parameters())
    if how == "replicate":
        replicate(sharded, mesh)
    elif how == "fully_shard":
        fully_shard(sharded, mesh=mesh)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-5 if dtype is torch.float32 else 0.05
    x = torch.randn(sum(TOKENS[:ranks]), FEATURES).to(mesh.device_type, dtype)
    mine = x.split(TOKENS[:ranks])[mesh.get_local_rank()]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (single, sharded)]
    for _ in range(2):
        y, got = single(x), sharded(mine)
        close(got, y.split(TOKENS[:ranks])[mesh.get_local_rank()], "output", tolerance)
        (y.square().sum() / (1 if how == "sums" else ranks)).backward()
        got.square().sum().backward()
        for (name, p), q in zip(sharded.named_parameters(), single.named_parameters(), strict=True):
            if how != "sums" or name.startswith("experts"):
                close(p.grad, q[1].grad, f"gradient of {name}", tolerance)
        for optimizer in optimizers[how == "sums" :]:
            optimizer.step()
            optimizer.zero_grad()
        if how == "sums":  # the router's gradients are those of this rank
            return
    if dtype is not torch.bfloat16:
        for (name, p), q in zip(sharded.named_parameters(), single.parameters(), strict=True):
            close(p, q, name, tolerance)


CASES = {
    "loop, float64": (False, True, torch.float64, "fully_shard"),
    "loop, counts of floats": (False, False, torch.float64, "replicate"),
    "loop, sums": (False, True, torch.float64, "sums"),
    "grouped, float32": (True, True, torch.float32, "replicate"),
    "grouped, float32, scaled after": (True, False, torch.float32, "fully_shard"),
    "grouped, bfloat16": (True, True, torch.bfloat16, "fully_shard"),
}


@pytest.mark.skipif(os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="kernels that other devices may lack")
@pytest.mark.parametrize("ranks", in_gate([2, 3], [3]))
@pytest.mark.parametrize("case", in_gate(CASES, ["loop, counts of floats", "grouped, float32"]))
def test_the_plan_of_torchtitan(pool: Any, case: str, ranks: int) -> None:
    use_grouped_mm, scale_before, dtype, how = CASES[case]
    pool.run(ranks, steps, use_grouped_mm, scale_before, dtype, how)
