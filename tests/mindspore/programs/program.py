"""Programs, the ways in which they run, and the comparison of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from hyper_parallel import Shard, distribute_tensor, fully_shard, parallelize_module, replicate
from hyper_parallel.core.communication.collectives import all_gather_object
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import everything
from tests.mindspore.nets import whole

__all__ = ["SAMPLES", "STEPS", "WAYS", "Job", "Program", "compare", "run"]

#: Steps of a program, and how many of them the gate takes: every moment has been used after two.
STEPS, STEPS_IN_GATE = 5, 3
SAMPLES = 8
#: Way -> the shape of its mesh.
WAYS: dict[str, tuple[int, ...]] = {
    "tensor parallel": (2,),
    "fully_shard": (2,),
    "replicate": (2,),
    "2 x 2": (2, 2),
}


class Job:
    """One run of a program on this rank.

    Attributes:
        net: the cell, whose call with a batch gives the loss.
        batches: a batch for each step: this rank's part.
        losses: of each step.
        gradients: of each step that tells them: name of a parameter -> its gradient, whole.
    """

    def __init__(self, net: nn.Cell, batches: list[tuple[Any, ...]]) -> None:
        self.net, self.batches = net, batches
        self.losses: list[float] = []
        self.gradients: list[dict[str, np.ndarray]] = []

    @property
    def parameters(self) -> list[Any]:
        return list(self.net.trainable_params())

    def differentiate(self, batch: tuple[Any, ...], loss: Callable[..., Any] | None = None) -> tuple[Any, ...]:
        """The gradients of a step, which are kept, and so is the loss."""
        parameters = self.parameters
        value, gradients = value_and_grad(loss or self.net, None, parameters)(*batch)
        self.keep(value, parameters, gradients)
        return tuple(gradients)

    def keep(self, value: Any, parameters: list[Any], gradients: Any) -> None:
        self.losses.append(float(whole(value)))
        self.gradients.append({p.name: whole(g).astype(np.float32) for p, g in zip(parameters, gradients, strict=True)})


def step_by_step(make: Callable[[list[Any]], Any]) -> Callable[[Job], None]:
    """Training by an optimizer, as most programs do it."""

    def train(job: Job) -> None:
        optimizer = make(job.parameters)
        for batch in job.batches:
            optimizer(job.differentiate(batch))

    return train


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        says: the feature that others do not have, for the page.
        make: gives the cell. Its weights are set afterwards.
        batch: gives the arrays of a batch of `SAMPLES` samples. The loss is a mean over the samples.
        plan: gives the plan for tensor parallelism.
        train: runs the steps.
        is_distributed: whether data-parallel ways give DTensors, of which a loss sees the batch of all ranks.
        refused: way -> how the error begins that all ranks raise.
        tolerance: relative, of losses, gradients and parameters.
    """

    says: str
    make: Callable[[], nn.Cell]
    batch: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    plan: Callable[[], dict[str, Any]]
    train: Callable[[Job], None] = field(default_factory=lambda: step_by_step(lambda p: nn.SGD(p, 0.1)))
    is_distributed: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-3


@dataclass(frozen=True)
class Record:
    """Losses and gradients of the steps of a run, and all parameters afterwards."""

    losses: list[float]
    gradients: list[dict[str, np.ndarray]]
    parameters: dict[str, np.ndarray]


def run(program: Program, way: str | None = None, mesh: Any = None) -> Record:
    """Run a program on one device, or in a way on a mesh of that shape."""
    ms.set_seed(3)
    net, rng = program.make(), np.random.default_rng(5)
    for _, p in net.parameters_and_names():
        if "moving" not in p.name and p.dtype == ms.float32:
            p.set_data(Tensor((rng.standard_normal(p.shape) * 0.4).astype(np.float32)))
    net.set_train()
    tp, dp = mesh, mesh
    if way == "2 x 2":
        dp, tp = mesh["dp"], mesh["tp"]
    if way in ("tensor parallel", "2 x 2"):
        parallelize_module(net, tp, program.plan())
    if way in ("fully_shard", "2 x 2"):
        fully_shard(net, mesh=dp)
    if way == "replicate":
        replicate(net, dp)
    is_cut = way not in (None, "tensor parallel")
    batches = [program.batch(rng) for _ in range(STEPS if everything() else STEPS_IN_GATE)]
    job = Job(net, [tuple(_given(x, program, dp if is_cut else None) for x in batch) for batch in batches])
    program.train(job)
    losses = job.losses
    if is_cut and not program.is_distributed:
        losses = [float(np.mean(each)) for each in zip(*all_gather_object(losses, dp, 0), strict=True)]
    return Record(losses, job.gradients, {p.name: whole(p).astype(np.float32) for p in net.get_parameters()})


def _given(x: np.ndarray, program: Program, dp: Any) -> Tensor:
    if dp is None:
        return Tensor(x)
    if program.is_distributed:
        return distribute_tensor(Tensor(x), dp, [Shard(0)], src_data_rank=None)
    part = len(x) // dp.size()
    return Tensor(np.ascontiguousarray(x[dp.get_local_rank() * part :][:part]))


def compare(got: Record, wanted: Record, tolerance: float) -> list[str]:
    """Name the losses, gradients and parameters that differ."""

    def near(a: Any, b: Any) -> bool:
        return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=tolerance, atol=tolerance * 0.1)

    found = [
        f"loss {i}: {a}, wanted {b}"
        for i, (a, b) in enumerate(zip(got.losses, wanted.losses, strict=True))
        if not near(a, b)
    ]
    for i, (ours, theirs) in enumerate(zip(got.gradients, wanted.gradients, strict=True)):
        if ours.keys() != theirs.keys():
            found.append(f"gradients of {sorted(ours)}, wanted {sorted(theirs)}")
        found += [f"gradient {i} of {name}" for name in ours if name in theirs and not near(ours[name], theirs[name])]
    if got.parameters.keys() != wanted.parameters.keys():
        found.append(f"parameters {sorted(got.parameters)}, wanted {sorted(wanted.parameters)}")
    found += [f"parameter {name}" for name, p in wanted.parameters.items() if not near(got.parameters.get(name), p)]
    return found
