"""One row of the table of `tests.support.data_parallel_table`, on torch."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel.testing.spmd import device_mesh
from tests.support.data_parallel_table import settle
from tests.torch.decoder import UNEVEN, Decoder, Sizes, batch, plan
from tests.torch.support import close, device

__all__ = ["run", "settle"]

SIZES = {"even": Sizes(), "uneven": UNEVEN}
SAMPLES = 2


class Model(Decoder):
    """A decoder with a parameter without dimensions, a module without parameters and one that is not called."""

    def __init__(self, row: dict[str, Any]) -> None:
        kind = row["checkpoint"]
        # Recomputed are units, or modules inside of units, by which modules are units.
        wrap = lambda block, x: checkpoint(block, x, use_reentrant=kind == "reentrant")  # noqa: E731
        super().__init__(SIZES[row["sizes"]], wrap=None if kind == "none" else wrap)
        self.nothing, self.idle = nn.Identity(), nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.tensor(0.7)) if row["scalar"] else None

    def forward(self, ids: Any, targets: Any) -> Any:
        x = self.nothing(self.wrap(self.block, self.embedding(ids)))
        logits = self.head(self.norm(x)).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, targets.flatten())
        return loss if self.gain is None else loss * self.gain


def run(row: dict[str, Any]) -> None:
    """Two steps of AdamW, with gradients and parameters as on a single device."""
    dp, tp = _meshes(row["mesh"])
    single = _build(row)
    sharded = copy.deepcopy(single)
    if tp is not None:
        hp.parallelize_module(sharded, tp, _plan(row))
    _shard(sharded, dp, row)
    size, exact = dp.size(), row["lower"] == "no"
    tolerance = 1e-6 if exact else 6e-2
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 1e-3) for m in (single, sharded)]
    for step in range(2):
        micro = 2 if row["accumulate"] else 1
        for i in range(micro):
            ids, targets = batch(SIZES[row["sizes"]], 10 * step + i, SAMPLES * size)
            sharded.set_requires_gradient_sync(i == micro - 1)
            _backward(single, ids, targets, row, False)
            _backward(sharded, *_given(dp, ids, targets, row), row, True)
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert q.grad.placements == q.placements, name
                close(q.grad, p.grad, f"gradient of {name} at step {step}", tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if exact:
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            close(q, p, f"{name} at the end", tolerance)


def _meshes(name: str) -> tuple[Any, Any]:
    """The mesh of data parallelism, and that of tensor parallelism or None."""
    if name == "dp":
        return device_mesh(4, names=("dp",)), None
    if name == "replicate x shard":
        return device_mesh(2, 2, names=("dp_replicate", "dp_shard")), None
    if name == "dp x tp":
        mesh = device_mesh(2, 2, names=("dp", "tp"))
        return mesh["dp"], mesh["tp"]
    mesh = device_mesh(2, 1, 2, names=("dp_replicate", "dp_shard", "tp"))
    return mesh["dp_replicate", "dp_shard"], mesh["tp"]


def _build(row: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    model = Model(row).to(device(), torch.float64 if row["lower"] == "no" else torch.float32)
    if row["tied"]:
        model.head.weight = model.embedding.weight
    if row["frozen"]:
        model.block.attention.wq.weight.requires_grad_(False)
        model.block.norm1.weight.requires_grad_(False)
    return model


def _plan(row: dict[str, Any]) -> dict[str, Any]:
    styles = plan(hp)
    part = hp.Shard(1) if row["sequence"] else hp.Replicate()
    if not row["sequence"]:
        for name in ("block.norm1", "block.norm2", "norm", "block.attention", "block.feed_forward"):
            del styles[name]
        styles["embedding"] = hp.RowwiseParallel(input_layouts=hp.Replicate())
        for name in ("block.attention.wo", "block.feed_forward.down"):
            styles[name] = hp.RowwiseParallel()
    if row["loss_parallel"]:
        styles["head"] = hp.ColwiseParallel(input_layouts=part, use_local_output=False)
    else:
        styles["head"] = hp.ColwiseParallel(input_layouts=part, output_layouts=hp.Replicate())
    return styles


def _shard(model: Any, mesh: Any, row: dict[str, Any]) -> None:
    options = {"mesh": mesh, "reshard_after_forward": row["reshard"]}
    if row["offload"]:
        options["offload_policy"] = hp.CPUOffloadPolicy(pin_memory=False)
    policy, outermost = {}, {}
    if row["lower"] == "policy":
        policy["mp_policy"] = hp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        outermost["mp_policy"] = hp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    if row["units"] == "nested":
        hp.fully_shard(model.block.attention, **options, **policy)
        hp.fully_shard(model.block.feed_forward, **options, **policy)
    if row["units"] != "root":
        hp.fully_shard(model.block, **options, **policy)
    if row["empty"]:
        hp.fully_shard(model.nothing, **options)
    if row["idle"]:
        hp.fully_shard(model.idle, **options)
    hp.fully_shard(model, **options, **outermost)


def _given(dp: Any, ids: Any, targets: Any, row: dict[str, Any]) -> tuple[Any, Any]:
    """The inputs of the model on this rank."""
    if row["distributed"]:
        layout = [hp.Shard(0)] * dp.ndim
        return tuple(hp.distribute_tensor(x, dp, layout, src_data_rank=None) for x in (ids, targets))  # type: ignore
    rank = int((dp.ranks.reshape(-1) == dp.get_rank()).argmax())
    mine = slice(SAMPLES * rank, SAMPLES * (rank + 1))
    return ids[mine], targets[mine]


def _backward(model: Any, ids: Any, targets: Any, row: dict[str, Any], is_sharded: bool) -> None:
    sharded_loss = is_sharded and row["loss_parallel"]
    lower = torch.autocast(device().type, torch.bfloat16, enabled=row["lower"] == "autocast")
    with lower, hp.loss_parallel() if sharded_loss else contextlib.nullcontext():
        loss = sum(model(ids, targets) for _ in range(row["calls"]))
    with contextlib.ExitStack() as stack:
        if sharded_loss:
            stack.enter_context(hp.loss_parallel())
        if is_sharded and row["coalesce"]:
            stack.enter_context(hp.coalesce_gradients())
        loss.backward()
