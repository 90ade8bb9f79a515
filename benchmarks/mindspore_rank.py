"""One rank of the case `mindspore`: ``python -m benchmarks.mindspore_rank RANK RANKS FOLDER PORT ROUNDS``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn
from mindspore.mint import distributed as dist

import hyper_parallel
from benchmarks import machine
from benchmarks.mindspore_models import (
    LlamaBlock,
    Mlp,
    RmsNorm,
    all_reduce,
    hand_written_block,
    hand_written_mlp,
    tables,
)
from benchmarks.plans import llama_plan, mlp_plan
from benchmarks.ranks import wall_times, write_result
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes, MlpSizes
from benchmarks.timing import Step, ratios, spread
from benchmarks.traffic import Traffic, differences
from hyper_parallel.mindspore import value_and_grad

UNSHARDED, HAND_WRITTEN = "unsharded", "hand-written"
HYPER_PARALLEL, DTENSORS = "hyper_parallel", "hyper_parallel, DTensors between modules"
TOLERANCE = 1e-4


@dataclass
class Version:
    """A model with its inputs and its cotangent. The other fields say how its gradients are completed, and in which
    context it runs."""

    name: str
    model: nn.Cell
    inputs: tuple[Any, ...]
    cotangent: Tensor
    finish: Callable[[tuple], tuple] | None = None
    block: Callable[[], AbstractContextManager] = nullcontext

    def __post_init__(self) -> None:
        differentiate = value_and_grad if "hyper" in self.name else ms.value_and_grad
        self._gradients = differentiate(self._loss, 0, self.model.trainable_params())

    def _loss(self, *inputs: Any) -> Tensor:
        y = self.model(*inputs)
        if isinstance(y, hyper_parallel.DTensor):
            y = y.to_local()
        return (y * self.cotangent).sum()

    def forward(self) -> Any:
        """The output."""
        return self.model(*self.inputs)

    def forward_and_backward(self) -> tuple[Any, tuple]:
        """Gradients of the first input and of the parameters."""
        with self.block():
            _, (of_input, of_parameters) = self._gradients(*self.inputs)
        if self.finish is not None:
            of_parameters = self.finish(of_parameters)
        return of_input, of_parameters


def _filled(model: nn.Cell) -> nn.Cell:
    """The same weights in every version."""
    generator = np.random.default_rng(1)
    for p in model.trainable_params():
        p.set_data(Tensor(generator.normal(0, 0.2, p.shape).astype(np.float32)))
    return model


def _mlp_versions(sizes: MlpSizes, ranks: int) -> list[Version]:
    generator = np.random.default_rng(2)
    x, cotangent = (Tensor(generator.normal(size=(sizes.batch, sizes.features)).astype(np.float32)) for _ in range(2))
    mesh = hyper_parallel.init_device_mesh(mesh_shape=(ranks,))
    models = {UNSHARDED: _filled(Mlp(sizes)), HAND_WRITTEN: hand_written_mlp(_filled(Mlp(sizes)))}
    for name, dtensors in ((HYPER_PARALLEL, False), (DTENSORS, True)):
        plan = mlp_plan(hyper_parallel, dtensors)
        models[name] = hyper_parallel.parallelize_module(_filled(Mlp(sizes)), mesh, plan)
    return [Version(name, model, (x,), cotangent) for name, model in models.items()]


def _llama_versions(sizes: LlamaSizes, sequence_parallel: bool, rank: int, ranks: int) -> list[Version]:
    generator = np.random.default_rng(2)
    shape = (sizes.batch, sizes.sequence, sizes.features)
    x, cotangent = (generator.normal(size=shape).astype(np.float32) for _ in range(2))
    mesh = hyper_parallel.init_device_mesh(mesh_shape=(ranks,))
    plain = tables(sizes.sequence, sizes.head_size)

    def part(array: np.ndarray) -> Tensor:
        return Tensor(np.ascontiguousarray(np.split(array, ranks, 1)[rank]) if sequence_parallel else array)

    def summed(gradients: tuple) -> tuple:
        """Sum the gradients of the norms in one all-reduce."""
        mine = {i: g for i, g in enumerate(gradients) if len(g.shape) == 1}
        flat = all_reduce(mint.cat(list(mine.values())))
        parts = dict(zip(mine, mint.split(flat, sizes.features), strict=True))
        return tuple(parts.get(i, g) for i, g in enumerate(gradients))

    hand_written = hand_written_block(_filled(LlamaBlock(sizes)), sequence_parallel)
    versions = [
        Version(UNSHARDED, _filled(LlamaBlock(sizes)), (Tensor(x), *plain), Tensor(cotangent)),
        Version(HAND_WRITTEN, hand_written, (part(x), *plain), part(cotangent), summed if sequence_parallel else None),
    ]
    for name, dtensors in ((HYPER_PARALLEL, False), (DTENSORS, True)):
        plan = llama_plan(hyper_parallel, sequence_parallel, dtensors, tables=3)
        model = hyper_parallel.parallelize_module(_filled(LlamaBlock(sizes)), mesh, plan)
        given: tuple[Any, ...] = plain
        if dtensors:
            given = tuple(hyper_parallel.DTensor.from_local(t, mesh, [hyper_parallel.Replicate()]) for t in plain)
            if not sequence_parallel:
                for norm in (model.attention_norm, model.ffn_norm):
                    hyper_parallel.distribute_module(norm, mesh)
        block = hyper_parallel.coalesce_gradients if sequence_parallel else nullcontext
        versions.append(Version(name, model, (part(x), *given), part(cotangent), block=block))
    return versions


def _error(version: Version, unsharded: Version, rank: int, ranks: int) -> float:
    """Largest error of output, gradient of the input and gradients of parameters, relative to the norm of each."""

    def values(v: Version) -> list[np.ndarray]:
        of_input, of_parameters = v.forward_and_backward()
        found = [v.forward(), of_input, *of_parameters]
        return [(x.full_tensor() if isinstance(x, hyper_parallel.DTensor) else x).asnumpy() for x in found]

    errors = []
    for mine, whole in zip(values(version), values(unsharded), strict=True):
        for dim, (a, b) in enumerate(zip(mine.shape, whole.shape, strict=True)):
            if a != b:
                whole = np.split(whole, ranks, dim)[rank]
        errors.append(float(np.linalg.norm(mine - whole) / np.linalg.norm(whole)))
    return max(errors)


@contextmanager
def _count_collectives() -> Iterator[Traffic]:
    """All calls of `mindspore.mint.distributed`, the library's as well as hand-written ones."""
    traffic, originals = Traffic(), {"all_reduce": dist.all_reduce, "all_gather": dist.all_gather}

    def watched(name: str, given: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            traffic.record(name, args[given].nbytes)
            return originals[name](*args, **kwargs)

        return call

    dist.all_reduce, dist.all_gather = watched("all_reduce", 0), watched("all_gather", 1)
    try:
        yield traffic
    finally:
        dist.all_reduce, dist.all_gather = originals["all_reduce"], originals["all_gather"]


def _count(version: Version) -> tuple[Traffic, Traffic]:
    """Collectives in forward, and in forward and backward."""
    with _count_collectives() as forward:
        version.forward()
    with _count_collectives() as both:
        version.forward_and_backward()
    return forward, both


def _slowest(numbers: list[float]) -> list[float]:
    return all_reduce(Tensor(np.array(numbers, np.float32)), "max").asnumpy().tolist()


def main(rank: int, ranks: int, folder: str, port: str, rounds: int) -> None:
    """Check and time every version."""
    warnings.simplefilter("ignore")
    machine.pin(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    platform = hyper_parallel.get_platform()
    platform.init_process_group()
    platform.register_norm_module(RmsNorm)  # a class of ours: MindSpore has no cell for it
    mlp, llama = MlpSizes(), LlamaSizes()
    result = Result(
        "mindspore",
        f"MindSpore on CPU, {ranks} processes; wall time of the slowest. MLP {mlp}; Llama block: {llama}. Backward is "
        "value_and_grad of the sum of the output times a constant.",
    )
    for title, versions in (
        ("MLP", _mlp_versions(mlp, ranks)),
        ("Llama block", _llama_versions(llama, False, rank, ranks)),
        ("Llama block, sequence parallel", _llama_versions(llama, True, rank, ranks)),
    ):
        error = max(_error(version, versions[0], rank, ranks) for version in versions[1:])
        what = f"{title}: largest relative error of outputs and gradients"
        result.goals.append(Goal(what, _slowest([error])[0], TOLERANCE, strict=True))
        counted = {version.name: _count(version) for version in versions}
        table = Table(f"{title}: collectives", ["version", "forward", "forward and backward"])
        table.rows = [[name, str(forward), str(both)] for name, (forward, both) in counted.items()]
        result.tables.append(table)
        for name in (HYPER_PARALLEL, DTENSORS):
            what = f"{title}: kinds of collectives that differ from hand-written, {name}"
            result.goals.append(Goal(what, differences(counted[name], counted[HAND_WRITTEN]), 0, strict=True))
        for name in ("forward", "forward and backward"):
            steps = {v.name: Step(v.forward if name == "forward" else v.forward_and_backward) for v in versions}
            times = wall_times(steps, rounds, lambda: _slowest([0.0]), _slowest)
            ratio = ratios(times, HAND_WRITTEN)
            table = Table(f"{title}: {name}", ["version", "milliseconds", "ratio to hand-written"])
            table.rows = [[version, spread(times[version]), spread(ratio[version])] for version in times]
            result.tables.append(table)
            if title == "MLP":
                measured = spread(ratio[HYPER_PARALLEL])["median"]
                result.goals.append(Goal(f"{table.title}: {HYPER_PARALLEL} to hand-written", measured, 1.15))
    if rank == 0:
        write_result(folder, [result])
    _slowest([0.0])
    platform.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
