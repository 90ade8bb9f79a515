"""`fully_shard` with all that may be around it: a table in which each pair of choices meets."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel.testing.spmd import device_mesh
from tests.torch.decoder import Sizes, batch, decoder, plan
from tests.torch.support import close, device

CHOICES: dict[str, tuple[Any, ...]] = {
    "mesh": ("dp", "dp x tp", "replicate x shard"),
    "units": ("blocks", "nested", "root"),
    "reshard": (None, True, False),
    "checkpoint": ("none", "non-reentrant", "reentrant"),
    "tied": (False, True),
    "frozen": (False, True),
    "autocast": (False, True),
    "coalesce": (False, True),
    "accumulate": (False, True),
    "loss_parallel": (False, True),
    "calls": (1, 2),
    "sizes": (Sizes(), Sizes(vocabulary=11, features=12, hidden=10, heads=6)),
}


def pairs_of(row: dict[str, Any]) -> set[tuple]:
    return set(itertools.combinations(sorted((k, repr(v)) for k, v in row.items()), 2))


def table() -> list[dict[str, Any]]:
    """Rows in which each pair of choices occurs; the same on every machine."""
    rng = random.Random(0)
    missing = set()
    for (a, xs), (b, ys) in itertools.combinations(CHOICES.items(), 2):
        missing |= {tuple(sorted([(a, repr(x)), (b, repr(y))])) for x in xs for y in ys}
    rows = []
    while missing:
        candidates = [{k: rng.choice(v) for k, v in CHOICES.items()} for _ in range(60)]
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        covered = pairs_of(best) & missing
        if covered:
            missing -= covered
            rows.append(best)
    return rows


def build(row: dict[str, Any]) -> Any:
    kind = row["checkpoint"]
    # What is computed again is a unit, or in one, by which modules are units.
    wrap = None
    if kind != "none":
        wrap = lambda block, x: checkpoint(block, x, use_reentrant=kind == "reentrant")  # noqa: E731
    model = decoder(row["sizes"], torch.float32 if row["autocast"] else torch.float64, wrap=wrap)
    if row["tied"]:
        model.head.weight = model.embedding.weight
    if row["frozen"]:
        model.block.attention.wq.weight.requires_grad_(False)
        model.block.norm1.weight.requires_grad_(False)
    return model


def shard(model: Any, mesh: Any, row: dict[str, Any]) -> None:
    options = {"mesh": mesh, "reshard_after_forward": row["reshard"]}
    if row["units"] == "nested":
        hp.fully_shard(model.block.attention, **options)
        hp.fully_shard(model.block.feed_forward, **options)
    if row["units"] != "root":
        hp.fully_shard(model.block, **options)
    hp.fully_shard(model, **options)


def meshes(row: dict[str, Any]) -> tuple[Any, Any]:
    """That of data parallelism, and that of tensor parallelism or None."""
    if row["mesh"] == "dp":
        return device_mesh(4, names=("dp",)), None
    if row["mesh"] == "replicate x shard":
        return device_mesh(2, 2, names=("dp_replicate", "dp_shard")), None
    mesh = device_mesh(2, 2, names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def steps(row: dict[str, Any]) -> None:
    dp, tp = meshes(row)
    single = build(row)
    sharded = copy.deepcopy(single)
    if tp is not None:
        styles = plan(hp)
        if row["loss_parallel"]:
            styles["head"] = hp.ColwiseParallel(input_layouts=hp.Shard(1), use_local_output=False)
        hp.parallelize_module(sharded, tp, styles)
    shard(sharded, dp, row)
    size, tolerance = dp.size(), 6e-2 if row["autocast"] else 1e-6
    rank = int((dp.ranks.reshape(-1) == dp.get_rank()).argmax())
    sharded_loss = tp is not None and row["loss_parallel"]
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-3) for m in (single, sharded)]
    for step in range(2):
        micro = 2 if row["accumulate"] else 1
        for i in range(micro):
            ids, targets = batch(row["sizes"], 10 * step + i, 2 * size)
            if row["accumulate"]:
                sharded.set_requires_gradient_sync(i == micro - 1)
            mine = slice(2 * rank, 2 * rank + 2)
            with torch.autocast(device().type, torch.bfloat16, enabled=row["autocast"]):
                wanted = sum(single(ids, targets) for _ in range(row["calls"]))
                with hp.loss_parallel() if sharded_loss else contextlib.nullcontext():
                    loss = sum(sharded(ids[mine], targets[mine]) for _ in range(row["calls"]))
            wanted.backward()
            with contextlib.ExitStack() as stack:
                if sharded_loss:
                    stack.enter_context(hp.loss_parallel())
                if row["coalesce"]:
                    stack.enter_context(hp.coalesce_gradients())
                loss.backward()
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert q.grad.placements == q.placements, name
                close(q.grad, p.grad, f"gradient of {name} at step {step}", tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if not row["autocast"]:
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            close(q, p, f"{name} at the end", tolerance)


@pytest.mark.parametrize(
    "row", table(), ids=lambda row: "-".join(str(v) for v in row.values() if not isinstance(v, Sizes))
)
def test_pairs(pool: Any, row: dict[str, Any]) -> None:
    pool.run(4, steps, row)
