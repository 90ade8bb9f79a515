"""`search` and `dry_run` with experts over a part of the data-parallel ranks, and over those of tensor parallelism."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import ColwiseParallel, ExpertParallel, Replicate, RowwiseParallel
from hyper_parallel.planning import dry_run, search

pytestmark = pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="dry runs are the same for all devices"
)


class Experts(nn.Module):
    """Experts of equal numbers of tokens, as dry runs have them."""

    def __init__(self, count: int, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(count, hidden, 2 * size))
        self.down = nn.Parameter(torch.empty(count, size, hidden))

    def forward(self, x: Any, indices: Any, weights: Any) -> Any:
        gate, up = torch.bmm(x.view(self.gate_up.shape[0], -1, x.shape[1]), self.gate_up).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down).view_as(x)


class Layer(nn.Module):
    """Attention, a shared expert, and experts."""

    def __init__(self, hidden: int, heads: int, size: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen, self.head = chosen, hidden // heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up, self.down = nn.Linear(hidden, size, bias=False), nn.Linear(size, hidden, bias=False)
        self.experts = Experts(experts, hidden, size)

    def forward(self, x: Any) -> Any:
        y = self.norm1(x)
        q, k, v = (w(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        weights, indices = self.router(y.flatten(0, 1)).softmax(-1).topk(self.chosen)
        return x + self.down(F.silu(self.up(y))) + self.experts(y.flatten(0, 1), indices, weights).view_as(x)


class Model(nn.Module):
    def __init__(self, layers: int, vocabulary: int, hidden: int, *sizes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, *sizes) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN = {
    "layers.*.[qkv]": ColwiseParallel(),
    "layers.*.o": RowwiseParallel(),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
}
EXPERTS = {"layers.*.experts": ExpertParallel(input_layout=Replicate(), tp_dim="tp")}


def meta(*sizes: int) -> Model:
    with torch.device("meta"):
        return Model(*sizes)


def test_experts_over_parts_of_the_ranks() -> None:
    """Parameters and messages of a rank, worked out by hand."""
    model, ids = meta(2, 32, 16, 4, 8, 8, 2), torch.zeros(1, 32, dtype=torch.int64, device="meta")
    whole = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    rest = sum(p.numel() for name, p in model.named_parameters()) - whole
    for dp, ep in ((4, 1), (2, 2), (1, 4)):
        run = dry_run(model, {"dp": dp, "ep": ep, "tp": 1}, None, ids, experts=EXPERTS)
        # Over all four both are cut, experts by ep and then by dp: as many bytes on each rank.
        assert run.memory.parameters == 4 * (whole + rest) // 4, (dp, ep)
        exchanged = sum(t.counts.get("all_to_all", 0) for t in run.traffic.values())
        assert exchanged == (0 if ep == 1 else 2 * 2 * 2)  # there and back, of two layers, forward and backward
    two = dry_run(model, {"dp": 1, "ep": 2, "tp": 2}, PLAN, ids, experts=EXPERTS, data_parallel=None)
    assert two.memory.parameters < 4 * (rest + whole // 4 + 1)
    replicated = dry_run(model, {"dp": 2, "ep": 2, "tp": 1}, None, ids, experts=EXPERTS, data_parallel="replicate")
    assert replicated.memory.parameters == 4 * (rest + whole // 2)


def test_search_knows_experts() -> None:
    model, ids = meta(5, 32, 16, 4, 8, 8, 2), torch.zeros(16, 32, dtype=torch.int64, device="meta")
    found = search(model, 8, {"tp": PLAN}, ids, tensor_parallel=[1, 2], experts=EXPERTS, recompute=[False])
    ways = {(c.dp, c.tp, c.ep) for c in found.candidates}
    assert ways == {*((8, 1, ep) for ep in (1, 2, 4, 8)), *((4, 2, ep) for ep in (2, 4, 8))}
    assert found.best is not None and all(c.run is not None for c in found.candidates), str(found)
    assert " ep " in str(found) and found.as_dict()["candidates"][0]["ep"] >= 1
    some = search(model, 8, {"tp": PLAN}, ids, tensor_parallel=[1], experts=EXPERTS, expert_parallel=[3, 4])
    assert [c.error for c in some.candidates if c.ep == 3] == [
        "8 data-parallel ranks do not divide into groups of 3 for experts"
    ] * 2
    inside = {"layers.*.experts": ExpertParallel()}
    found = search(model, 8, {"tp": PLAN}, ids, tensor_parallel=[2], experts=inside, recompute=[False])
    assert {c.ep for c in found.candidates} == {1, 2, 4}
    with pytest.raises(ValueError, match=r"experts='layer.*' matches no module"):
        search(model, 8, {"tp": PLAN}, ids, experts={"layer.*": ExpertParallel()})
    with pytest.raises(ValueError, match="experts need a mesh with the dimensions 'dp' and 'ep'"):
        dry_run(model, {"dp": 8, "tp": 1}, None, ids, experts=EXPERTS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sizes",
    [(48, 202048, 5120, 40, 8192, 128, 1), (61, 129280, 7168, 56, 2048, 256, 8)],
    ids=["as Llama 4 Maverick", "as DeepSeek-V3"],
)
def test_hundreds_of_ranks(sizes: tuple[int, ...]) -> None:
    model, ids = meta(*sizes), torch.zeros(512, 4096, dtype=torch.int64, device="meta")
    found = search(
        model,
        512,
        {"tp": PLAN},
        ids,
        tensor_parallel=[1, 2, 4, 8],
        experts=EXPERTS,
        expert_parallel=[8, 16, 32, 64, 128],
        recompute=[True],
        mixed_precision=True,
    )
    assert len(found.candidates) == 20 and all(c.run is not None for c in found.candidates), str(found)
    # More ranks with other experts send as much, and each gathers fewer of them.
    for tp in (1, 2, 4, 8):
        times = [c.run.seconds for c in sorted(found.candidates, key=lambda c: c.ep) if c.tp == tp and c.run]
        assert times == sorted(times, reverse=True)
