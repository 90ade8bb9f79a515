"""The programs of docs/other_programs.md: with torch's names they print the same; models of others on a single process
have the same gradients."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel
from hyper_parallel.testing.spmd import on_mesh
from tests.support.pages import blocks_of
from tests.support.programs import ROOT, program_of, run_ranks
from tests.torch.support import close, device

pytestmark = pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="the programs are for processes on CPUs"
)

PAGE = "docs/other_programs.md"
_STYLES = "ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel"
#: The import lines of a program, and those of torch.
IMPORTS = {
    "from hyper_parallel import MixedPrecisionPolicy, fully_shard": (
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
    ),
    "from hyper_parallel import ColwiseParallel, PrepareModuleInput, Replicate, RowwiseParallel, "
    "SequenceParallel, Shard": (
        "from torch.distributed.tensor import Replicate, Shard\n"
        f"from torch.distributed.tensor.parallel import {_STYLES}"
    ),
    "from hyper_parallel import fully_shard, parallelize_module": (
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.distributed.tensor.parallel import parallelize_module"
    ),
}


def losses_of(folder: Path, source: str) -> dict[str, float]:
    folder.mkdir()
    script = folder / "program.py"
    script.write_text(source)
    ended = run_ranks([script], 4, cwd=folder)
    assert [rank.status for rank in ended] == [0] * 4, ended
    lines = [line for rank in ended for line in re.findall(r"^(rank \d, step \d+): ([\d.]+)$", rank.out, re.MULTILINE)]
    return {place: float(loss) for place, loss in lines}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "tolerance"), [("fsdp2.py", 2e-2), ("tensor_parallel.py", 1e-4)])
def test_programs_print_what_they_print_with_torch(tmp_path: Path, name: str, tolerance: float) -> None:
    """In bfloat16 sums of other order differ by as much."""
    source = theirs = program_of(ROOT / PAGE, name)
    for ours, of_torch in IMPORTS.items():
        theirs = theirs.replace(ours, of_torch)
    assert "hyper_parallel" not in theirs
    got, wanted = losses_of(tmp_path / "ours", source), losses_of(tmp_path / "theirs", theirs)
    assert len(got) == 12 and got == pytest.approx(wanted, abs=tolerance)


class Attention(nn.Module):
    """Reads all of its sizes from itself and its input, as nanoGPT's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x: Any) -> Any:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.c_fc, self.c_proj = (
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.Linear(4 * config.n_embd, config.n_embd),
        )

    def forward(self, x: Any) -> Any:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), Attention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), Mlp(config)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        wte, wpe = nn.Embedding(17, config.n_embd), nn.Embedding(8, config.n_embd)
        h = nn.ModuleList(Block(config) for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": wte, "wpe": wpe, "h": h, "ln_f": nn.LayerNorm(config.n_embd)})
        self.lm_head = nn.Linear(config.n_embd, 17, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Any) -> Any:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1], device=ids.device))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class FastAttention(nn.Module):
    """Splits by its own attributes, as gpt-fast's, with fewer heads of keys and values."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        total = (config.n_head + 2 * config.n_local_heads) * config.head_dim
        self.wqkv, self.wo = nn.Linear(config.dim, total, bias=False), nn.Linear(config.dim, config.dim, bias=False)
        self.n_head, self.head_dim, self.dim = config.n_head, config.head_dim, config.dim
        self.n_local_heads = config.n_local_heads

    def forward(self, x: Any) -> Any:
        b, t, _ = x.shape
        size = self.n_local_heads * self.head_dim
        q, k, v = self.wqkv(x).split([self.dim, size, size], dim=-1)
        q = q.view(b, t, self.n_head, self.head_dim).transpose(1, 2)
        k, v = (y.view(b, t, self.n_local_heads, self.head_dim).transpose(1, 2) for y in (k, v))
        k, v = (y.repeat_interleave(self.n_head // self.n_local_heads, dim=1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, self.dim))


class FeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(config.dim, 24, bias=False), nn.Linear(config.dim, 24, bias=False)
        self.w2 = nn.Linear(24, config.dim, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FastLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention, self.feed_forward = FastAttention(config), FeedForward(config)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class GptFast(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(17, config.dim)
        self.layers = nn.ModuleList(FastLayer(config) for _ in range(2))
        self.norm, self.output = nn.RMSNorm(config.dim), nn.Linear(config.dim, 17, bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


MODELS: dict[str, tuple[type[nn.Module], dict[str, int], str]] = {
    "nanogpt": (NanoGpt, {"n_embd": 16, "n_head": 4}, "mesh = init_device_mesh"),
    "gpt-fast": (GptFast, {"dim": 16, "n_head": 4, "n_local_heads": 2, "head_dim": 4}, "mesh, config = "),
}


@on_mesh()
def as_on_the_page(mesh: Any, name: str) -> None:
    """Run the lines of the page on a model, and compare a step with that of a copy."""
    make, sizes, begin = MODELS[name]
    torch.manual_seed(0)
    config = SimpleNamespace(**sizes)
    model = make(config).double().to(device())
    single = copy.deepcopy(model)
    block = next(block for block in blocks_of(PAGE) if block.startswith(begin))
    names = {name: getattr(hyper_parallel, name) for name in hyper_parallel.__all__}
    names["init_device_mesh"] = lambda **how: mesh  # the pool may have more ranks
    exec(block, {**names, "model": model, "config": config})
    ids = torch.randint(17, (3, 8), generator=torch.Generator().manual_seed(1)).to(device())
    results = [one(ids) for one in (single, model)]
    for y in results:
        F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
    close(results[1], results[0], "logits", 1e-10)
    sharded = 0
    for (path, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        close(p.grad, q.grad, path, 1e-10)
        sharded += getattr(p, "placements", None) is not None and p.placements[0].is_shard()
    assert sharded >= 8


@pytest.mark.parametrize("name", MODELS)
def test_lines_of_the_page(pool: Any, name: str) -> None:
    pool.run(2, as_on_the_page, name)
