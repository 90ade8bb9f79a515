"""Programs that differ in how they step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from hyper_parallel.mindspore import value_and_grad
from tests.mindspore.programs.cells import classified, mlp, mlp_plan, scored
from tests.mindspore.programs.program import Job, Program, step_by_step

__all__ = ["PROGRAMS"]


def schedule_by_scheduler(job: Job) -> None:
    optimizer = ms.experimental.optim.SGD(job.parameters, 0.1, momentum=0.9)
    scheduler = ms.experimental.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for batch in job.batches:
        optimizer(job.differentiate(batch))
        scheduler.step()


def averaged(job: Job) -> None:
    """A moving average of the parameters, which takes their place at the end."""
    optimizer, average = nn.SGD(job.parameters, 0.1), [p * 1 for p in job.parameters]
    for batch in job.batches:
        optimizer(job.differentiate(batch))
        average = [0.8 * a + 0.2 * p for a, p in zip(average, job.parameters, strict=True)]
    for p, a in zip(job.parameters, average, strict=True):
        ops.assign(p, a)


def centralised(job: Job) -> None:
    """Gradients of matrices without their mean along the input."""
    optimizer = nn.Momentum(job.parameters, 0.1, 0.9)
    for batch in job.batches:
        gradients = job.differentiate(batch)
        optimizer(tuple(g - g.mean(1, True) if g.ndim > 1 else g for g in gradients))


def by_hand(job: Job) -> None:
    """Assign parameters without an optimizer."""
    for batch in job.batches:
        for p, g in zip(job.parameters, job.differentiate(batch), strict=True):
            ops.assign_sub(p, 0.1 * g)


def accumulated(job: Job) -> None:
    """Two micro batches of a step."""
    optimizer = nn.SGD(job.parameters, 0.1)
    for batch in job.batches:
        half, parameters = batch[0].shape[0] // 2, job.parameters
        total, gradients = 0.0, None
        for part in (slice(None, half), slice(half, None)):
            loss, new = value_and_grad(job.net, None, parameters)(*(x[part] for x in batch))
            gradients = new if gradients is None else tuple(a + b for a, b in zip(gradients, new, strict=True))
            total = total + loss / 2
        gradients = tuple(g / 2 for g in gradients)
        job.keep(total, parameters, gradients)
        optimizer(gradients)


def clipped(clip: Callable[[tuple], Any]) -> Callable[[Job], None]:
    def train(job: Job) -> None:
        optimizer = nn.SGD(job.parameters, 0.1)
        for batch in job.batches:
            optimizer(clip(job.differentiate(batch)))

    return train


def frozen_midway(job: Job) -> None:
    """The first layer is frozen from the third step on."""
    optimizer = nn.SGD(job.parameters, 0.1)
    for step, batch in enumerate(job.batches):
        if step == 2:
            job.net.trainable_params()[0].requires_grad = False
            optimizer = nn.SGD(job.parameters, 0.1)
        optimizer(job.differentiate(batch))


def _grouped(p: list[Any]) -> nn.Optimizer:
    """Weights and biases with decays and rates of their own."""
    weights, biases = [x for x in p if len(x.shape) > 1], [x for x in p if len(x.shape) < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.02}, {"order_params": p}]
    return nn.AdamWeightDecay(groups, 0.01)


def _with(says: str, train: Callable[[Job], None], tolerance: float = 1e-3) -> Program:
    return Program(says, lambda: scored(mlp()), classified, mlp_plan, train, tolerance=tolerance)


PROGRAMS: dict[str, Program] = {
    "Adam": _with("`nn.Adam`", step_by_step(lambda p: nn.Adam(p, 0.01, eps=1e-3))),
    "Adam with decay": _with("`nn.AdamWeightDecay`, in groups", step_by_step(_grouped), 5e-3),
    "AdamW": _with(
        "`experimental.optim.AdamW`", step_by_step(lambda p: ms.experimental.optim.AdamW(p, 0.01, eps=1e-3))
    ),
    "momentum, schedule in a list": _with(
        "`nn.Momentum` with a rate for each step",
        step_by_step(lambda p: nn.Momentum(p, nn.cosine_decay_lr(0.01, 0.1, 10, 5, 2), 0.9)),
    ),
    "schedule in a cell": _with(
        "`nn.SGD` with `nn.ExponentialDecayLR`", step_by_step(lambda p: nn.SGD(p, nn.ExponentialDecayLR(0.1, 0.5, 2)))
    ),
    "schedule by a scheduler": _with("`lr_scheduler.StepLR`", schedule_by_scheduler),
    "RMSProp": _with("`nn.RMSProp`", step_by_step(lambda p: nn.RMSProp(p, 0.01, epsilon=1e-3))),
    "Adagrad": _with("`nn.Adagrad`", step_by_step(lambda p: nn.Adagrad(p, 0.05))),
    "FTRL": _with("`nn.FTRL`", step_by_step(lambda p: nn.FTRL(p, learning_rate=0.05)), 5e-3),
    "moving average": _with("an average of the parameters, kept by the program", averaged),
    "centralised gradients": _with("gradients without their means", centralised),
    "no optimizer": _with("`ops.assign_sub`", by_hand),
    "accumulated": _with("micro batches by slices, gradients added", accumulated),
    "clipped by the norm of all": _with(
        "`ops.clip_by_global_norm`", clipped(lambda gradients: ops.clip_by_global_norm(gradients, 0.5))
    ),
    "clipped by each norm": _with(
        "`ops.clip_by_norm`", clipped(lambda gradients: tuple(ops.clip_by_norm(g, 0.2) for g in gradients))
    ),
    "clipped by value": _with(
        "`ops.clip_by_value`", clipped(lambda gradients: tuple(ops.clip_by_value(g, -0.05, 0.05) for g in gradients))
    ),
    "frozen midway": _with("a layer that is frozen after two steps, a new optimizer", frozen_midway),
}
