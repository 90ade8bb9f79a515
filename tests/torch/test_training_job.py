"""The programs of docs/tutorials/training_job.md, which import its gpt_model.py.

A run of train_gpt.py on 2 x 2 ranks goes on with 2. The losses of train_sequence.py are those of one rank.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import loss_parallel, parallelize_module
from hyper_parallel.core.plain_code.first_call import VARIABLE
from hyper_parallel.testing import spmd
from tests.support.programs import ROOT, program_of

PAGE = ROOT / "docs" / "tutorials" / "training_job.md"


def run_in(folder: str, name: str, followed: bool = False) -> tuple[list[float], list[Any]]:
    """Run a program in a folder that has the model; return its losses and the ids that it writes.

    With ``followed`` the first call is, as it is outside of tests; a finding is an error.
    """
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            if followed:
                patch.setenv(VARIABLE, "1")
                warnings.filterwarnings("error", message="the first call of the model was checked")
            found = runpy.run_path(name)
    finally:
        os.chdir(before)
        sys.path.remove(folder)
        sys.modules.pop("gpt_model", None)
    return found["losses"], found["ids"].tolist() if "ids" in found else []


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the three programs."""
    for name in ("gpt_model.py", "train_gpt.py", "train_sequence.py"):
        (tmp_path / name).write_text(program_of(PAGE, name))
    return str(tmp_path)


@pytest.mark.nightly
def test_a_job_goes_on_with_fewer_ranks(pool: Any, folder: str) -> None:
    first, second = pool.run(4, run_in, folder, "train_gpt.py"), pool.run(2, run_in, folder, "train_gpt.py")
    assert sorted(path.name for path in Path(folder, "run").glob("step-*")) == ["step-30", "step-40"]
    assert all(ids == first[0][1] for _, ids in first) and all(ids == second[0][1] for _, ids in second)
    losses = [sum(losses) / len(losses) for losses in zip(*[losses for losses, _ in first], strict=True)]
    assert losses[-1] < 0.5 * losses[0]
    assert max(second[0][0]) < 1.3 * losses[-1], "the second run did not go on where the first one ended"
    assert second[0][0][-1] < 0.6 * losses[-1]


def test_a_distributed_batch_has_the_losses_of_one_rank(pool: Any, folder: str) -> None:
    (wanted, _), *_ = pool.run(1, run_in, folder, "train_sequence.py")
    assert wanted[-1] < wanted[0]
    for losses, _ in pool.run(4, run_in, folder, "train_sequence.py", True):
        assert losses == pytest.approx(wanted, rel=1e-4)


class Attention(nn.Module):
    """Attention that counts all heads, as nanoGPT does."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.n_head, self.n_embd = heads, features

    def forward(self, x: Any) -> Any:
        batch, length, features = x.size()
        parts = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(batch, length, self.n_head, features // self.n_head).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, features))


class GPT(nn.Module):
    """A model with the module paths of nanoGPT, one layer, which computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict({"ln_1": nn.LayerNorm(8), "attn": Attention(8, 4), "ln_2": nn.LayerNorm(8)})
        block["mlp"] = nn.ModuleDict({"c_fc": nn.Linear(8, 32), "c_proj": nn.Linear(32, 8)})
        names = {"wte": nn.Embedding(13, 8), "wpe": nn.Embedding(6, 8), "h": nn.ModuleList([block])}
        self.transformer = nn.ModuleDict({**names, "ln_f": nn.LayerNorm(8)})
        self.lm_head = nn.Linear(8, 13, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Any, targets: Any) -> Any:
        t = self.transformer
        x = t.wte(ids) + t.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in t.h:
            x = x + block.attn(block.ln_1(x))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x))))
        logits = self.lm_head(t.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@spmd.on_mesh()
def nanogpt(mesh: Any, source: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    torch.manual_seed(0)
    single = GPT().to(mesh.device_type)
    torch.manual_seed(0)
    model = parallelize_module(GPT().to(mesh.device_type), mesh, names["plan_of"](4))
    ids, targets = (torch.arange(i, 12 + i, device=mesh.device_type).reshape(2, 6) for i in (0, 1))
    wanted = single(ids, targets)
    wanted.backward()
    with loss_parallel():
        loss = model(ids, targets)
        loss.backward()
    torch.testing.assert_close(loss.full_tensor(), wanted)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        gradient = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        torch.testing.assert_close(gradient, q.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_plan_for_nanogpt(pool: Any, world_size: int) -> None:
    pool.run(world_size, nanogpt, program_of(PAGE, "nanogpt.py"))
