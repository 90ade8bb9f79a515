"""Experts under torch's activation checkpointing, autocast and `MixedPrecisionPolicy`, against a single device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from hyper_parallel import CommDebugMode, ExpertParallel, MixedPrecisionPolicy, fully_shard, parallelize_module
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
        with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else nullcontext():
            one_step(single, sharded, mesh["ep"], how, 0.05)
        for p in sharded.parameters():
            assert p.dtype is p.grad.dtype is torch.float32


def test_low_precision(pool: Any) -> None:
    pool.run(2, in_low_precision)
