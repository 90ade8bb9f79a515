"""Ten steps of training with the features of loops besides an optimizer equal those of the unsharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hyper_parallel import (
    ColwiseParallel,
    CommDebugMode,
    DTensor,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
)
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.decoder import UNEVEN, Sizes, batch, decoder, plan
from tests.torch.support import close, device, full
from tests.torch.test_against_torch import OURS

STEPS = 10
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


#: How the decoder calls its block.
WRAPS: dict[str, Any] = {
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(
        block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep_products)
    ),
    "saved elsewhere": lambda block, x: saved_on_cpu(block, x),
}


def saved_on_cpu(block: nn.Module, x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


@dataclass(frozen=True)
class Features:
    """Options of a training loop.

    Attributes:
        wrap: how the block is called, by its name in `WRAPS`.
        micro_batches: over how many gradients are accumulated.
        frozen: parameters whose name starts with one of these are frozen before the model is parallelised.
        groups: whether norms and biases are a parameter group of their own, without weight decay.
        scheduler: makes a learning rate scheduler.
        clip: maximal norm of the gradients.
        clip_value: maximal value of the gradients.
        keep_zeros: whether gradients are set to zero, not to None.
        copy_at: step before which the model is replaced with a deep copy, and the optimizer with a new one that takes
            over its state.
        average: whether an exponential moving average of the model is trained along; then the average is compared.
        autocast: dtype of `torch.autocast`.
        scale: initial scale of a `GradScaler`; the loss of step 3 is infinite.
    """

    wrap: str | None = None
    micro_batches: int = 1
    frozen: tuple[str, ...] = ()
    groups: bool = False
    scheduler: Callable[[Any], Any] | None = None
    clip: float | None = None
    clip_value: float | None = None
    keep_zeros: bool = False
    copy_at: int | None = None
    average: bool = False
    autocast: torch.dtype | None = None
    scale: float | None = None


FEATURES = {
    **{f"checkpointing, {name}": Features(wrap=name) for name in WRAPS},
    "accumulation": Features(micro_batches=3, clip=0.5),
    "frozen": Features(frozen=("embedding", "block.attention.wq", "block.norm1", "block.feed_forward.down")),
    "groups, one cycle": Features(
        groups=True, scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.05, 0.01], total_steps=STEPS)
    ),
    "cosine after warm-up, zeros": Features(
        keep_zeros=True,
        scheduler=lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
            ],
            milestones=[4],
        ),
    ),
    "clipped by value": Features(clip_value=0.02),
    "copied in the middle": Features(copy_at=5),
    "averaged": Features(average=True),
    "loss scaling": Features(scale=64.0, clip=0.5),
}
EVERYTHING = Features(
    wrap="not reentrant",
    micro_batches=2,
    frozen=("block.attention.wk",),
    groups=True,
    scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    clip=0.5,
    copy_at=4,
)


def build(sizes: Sizes, features: Features, dtype: torch.dtype) -> nn.Module:
    model = decoder(sizes, dtype, wrap=WRAPS[features.wrap] if features.wrap else None)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(features.frozen) if features.frozen else True)
    return model


def make_optimizer(model: nn.Module, name: str, groups: bool) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not groups:
        return OPTIMIZERS[name](parameters)
    matrices, vectors = ([p for p in parameters if (p.dim() == 2) is wanted] for wanted in (True, False))
    return OPTIMIZERS[name]([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])


def train(model: nn.Module, sizes: Sizes, name: str, features: Features) -> tuple[list[float], nn.Module]:
    """Losses (the sum over micro batches in each step) and the trained model."""
    optimizer = make_optimizer(model, name, features.groups)
    scheduler = features.scheduler(optimizer) if features.scheduler else None
    scaler = torch.amp.GradScaler(device().type, init_scale=features.scale or 1.0, enabled=features.scale is not None)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if features.average else None
    losses = []
    for step in range(STEPS):
        if step == features.copy_at:
            state = copy.deepcopy(optimizer.state_dict())
            model = copy.deepcopy(model)
            optimizer = make_optimizer(model, name, features.groups)
            optimizer.load_state_dict(state)
            scheduler = features.scheduler(optimizer) if features.scheduler else None
        optimizer.zero_grad(set_to_none=not features.keep_zeros)
        total = 0.0
        for micro_batch in range(features.micro_batches):
            with torch.autocast(device().type, features.autocast, enabled=features.autocast is not None):
                loss = model(*batch(sizes, 7 * step + micro_batch)) / features.micro_batches
            if features.scale and step == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            total += float(full(loss))
        losses.append(total)
        scaler.unscale_(optimizer)
        if features.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), features.clip)
        if features.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), features.clip_value)
        scaler.step(optimizer)
        scaler.update()
        if scheduler is not None:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
    if features.scale:
        assert scaler.get_scale() == features.scale / 2
    return losses, model if average is None else average.module


def compare_with_plain(mesh: Any, sizes: Sizes, name: str, features: Features, what: str) -> None:
    wanted_losses, wanted = train(build(sizes, features, torch.float64), sizes, name, features)
    assert abs(wanted_losses[0] - wanted_losses[-1]) > 1e-3, f"{what}: nothing was trained"
    sharded = parallelize_module(build(sizes, features, torch.float64), mesh, plan(OURS))
    placements = {n: p.placements for n, p in sharded.named_parameters()}
    losses, got = train(sharded, sizes, name, features)
    close(torch.tensor(losses).double(), torch.tensor(wanted_losses).double(), f"{what}: losses", 1e-6)
    start = dict(decoder(sizes).named_parameters())
    for (path, p), q in zip(wanted.named_parameters(), got.parameters(), strict=True):
        assert isinstance(q, DTensor) and q.placements == placements[path], f"{what}: {path}"
        assert q.requires_grad is p.requires_grad
        close(q, p, f"{what}: {path}", 1e-9)
        if path.startswith(features.frozen or "nothing"):
            assert q.grad is None and torch.equal(full(q), start[path].detach()), f"{what}: {path} was frozen"


@on_mesh()
def one_feature(mesh: Any, what: str) -> None:
    for name in OPTIMIZERS:
        compare_with_plain(mesh, Sizes(), name, FEATURES[what], f"{name}, {what}")


@pytest.mark.parametrize("what", FEATURES)
def test_feature(pool: Any, what: str) -> None:
    pool.run(2, one_feature, what)


@on_mesh()
def everything_at_once(mesh: Any) -> None:
    for name in OPTIMIZERS:
        compare_with_plain(mesh, UNEVEN, name, EVERYTHING, f"{name}, everything")


@on_mesh()
def autocast(mesh: Any) -> None:
    """bfloat16 rounds differently on shards, so the ways that the two runs go are compared."""
    for name in OPTIMIZERS:
        for wrap in (None, "not reentrant"):
            features = Features(autocast=torch.bfloat16, wrap=wrap)
            wanted_losses, wanted = train(build(UNEVEN, features, torch.float32), UNEVEN, name, features)
            sharded = parallelize_module(build(UNEVEN, features, torch.float32), mesh, plan(OURS))
            losses, got = train(sharded, UNEVEN, name, features)
            close(torch.tensor(losses), torch.tensor(wanted_losses), f"{name}: losses", 2e-2)
            start = dict(decoder(UNEVEN, torch.float32).named_parameters())
            apart = moved = 0.0
            for (path, p), q in zip(wanted.named_parameters(), got.parameters(), strict=True):
                assert q.dtype is torch.float32 and q.grad.dtype is torch.float32
                apart += float((full(q) - p.detach()).square().sum())
                moved += float((p.detach() - start[path].detach()).square().sum())
            assert apart**0.5 <= 0.1 * moved**0.5, f"{name}, {wrap}: {apart**0.5 / moved**0.5}"


# ---------------------------------------------------------------------- clipping


@on_mesh()
def clipping(mesh: Any) -> None:
    """All-reduces are counted: one for all parameters, however many are sharded."""
    parts = {
        "everything is distributed": plan(OURS),
        "some parameters are plain": {
            "block.attention.w[qkv]": ColwiseParallel(),
            "block.attention.wo": RowwiseParallel(),
            "block.feed_forward.gate": ColwiseParallel(),
            "block.feed_forward.up": ColwiseParallel(),
            "block.feed_forward.down": RowwiseParallel(),
        },
    }
    for what, styles in parts.items():
        models = decoder(UNEVEN), parallelize_module(decoder(UNEVEN), mesh, styles)
        for model in models:
            model(*batch(UNEVEN, 0)).backward()
        kept = [[p.grad for p in model.parameters()] for model in models]
        for foreach in (None, True, False):
            for order in (2.0, 1.0, 3.0, float("inf"), 0.0):
                norms, counts = [], []
                for model, grads in zip(models, kept, strict=True):
                    for p, g in zip(model.parameters(), grads, strict=True):
                        p.grad = g.clone()
                    with CommDebugMode() as comm:
                        norms.append(
                            nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=order, foreach=foreach)
                        )
                    counts.append(comm.get_comm_counts())
                where = f"{what}, norm {order}, foreach={foreach}"
                close(norms[1], norms[0], where, 1e-12)
                for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    close(q.grad, p.grad, where, 1e-12)
                assert counts[1] == {"all_reduce": 1}, where
        with CommDebugMode() as comm:
            norms = [nn.utils.get_total_norm([p.grad for p in model.parameters()]) for model in models]
        close(norms[1], norms[0], what, 1e-12)
        assert comm.get_comm_counts() == {"all_reduce": 1}
        for model, norm in zip(models, norms, strict=True):
            nn.utils.clip_grads_with_norm_(model.parameters(), float(full(norms[0])) / 2, norm)
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            close(q.grad, p.grad, what, 1e-12)


@on_mesh()
def norms_that_are_not_finite(mesh: Any) -> None:
    """One rank's infinity is an error on all ranks."""
    model = parallelize_module(decoder(), mesh, plan(OURS))
    model(*batch(Sizes(), 0)).backward()
    if mesh.get_local_rank() == 1:
        model.head.weight.grad.to_local()[0, 0] = float("inf")
    for foreach in (None, True, False):
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True, foreach=foreach)


@pytest.mark.parametrize(
    ("job", "world_size"),
    [(everything_at_once, 3), (autocast, 2), (clipping, 2), (clipping, 3), (norms_that_are_not_finite, 2)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_jobs(pool: Any, job: Any, world_size: int) -> None:
    pool.run(world_size, job)


@on_mesh()
def integers_saved(mesh: Any, use_reentrant: bool) -> None:
    """Indices that operations save are plain when they are noted first, and DTensors when they are compared."""

    def best(x: Any) -> Any:
        values, places = (x * 1.5).topk(2)
        return values.softmax(-1) * x.gather(1, places)

    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(mesh.device_type)
    whole, part = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    best(whole).square().sum().backward()
    checkpoint(best, part, use_reentrant=use_reentrant).square().sum().backward()
    close(part.grad, whole.grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_what_saves_integers(pool: Any, use_reentrant: bool) -> None:
    pool.run(3, integers_saved, use_reentrant)
