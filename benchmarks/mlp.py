"""What tensor parallelism costs on top of the arithmetic: a small MLP in four versions, timed side by side.

    python benchmarks/mlp.py --out benchmarks/results/NAME

The process group is torch's fake one: collectives return at once and move nothing, so what is measured is the work of
the host, on one process that stands for rank 0. Results go to NAME.json and NAME.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform as machine
import random
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh as torch_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyper_parallel

RANKS, BATCH, FEATURES, HIDDEN = 4, 4, 16, 32
HAND_WRITTEN = "hand-written"
PASSES = ("forward", "forward and backward")


# ---------------------------------------------------------------------------------------------------- the four versions
class Mlp(nn.Module):
    """The model: all versions but the hand-written one are this module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class ReduceFromRanks(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class HandWrittenMlp(nn.Module):
    """One rank's share, with the collectives written out as in Megatron-LM."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN // RANKS)
        self.down = nn.Linear(HIDDEN // RANKS, FEATURES, bias=False)
        self.bias = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = CopyToRanks.apply(x)
        return ReduceFromRanks.apply(self.down(F.relu(self.up(x)))) + self.bias


def parallelized(library: Any, mesh: Any) -> nn.Module:
    """The model parallelised by the styles of ``library``: the same call for hyper_parallel and for torch."""
    return library.parallelize_module(Mlp(), mesh, {"up": library.ColwiseParallel(), "down": library.RowwiseParallel()})


def make_versions() -> dict[str, nn.Module]:
    """Name -> model."""
    return {
        "unsharded": Mlp(),
        HAND_WRITTEN: HandWrittenMlp(),
        "hyper_parallel": parallelized(hyper_parallel, hyper_parallel.init_device_mesh("cpu", (RANKS,))),
        "torch.distributed.tensor.parallel": parallelized(torch_parallel, torch_device_mesh("cpu", (RANKS,))),
    }


# --------------------------------------------------------------------------------------------------------- measurement
def make_step(model: nn.Module, backward: bool) -> tuple[Callable[[], Any], Callable[[], None]]:
    """What is timed, and what clears the gradients after it, which is not."""
    x = torch.randn(BATCH, FEATURES, requires_grad=True)
    cotangent = torch.ones(BATCH, FEATURES)
    parameters = list(model.parameters())

    def clear() -> None:
        for tensor in (x, *parameters):
            tensor.grad = None

    def forward_only() -> Any:
        y = model(x)
        if isinstance(y, AsyncCollectiveTensor):
            y.wait()  # torch's output is not ready before its first use
        return y

    def both() -> None:
        forward_only().backward(cotangent)

    return (both if backward else forward_only), clear


def microseconds_of(step: Callable[[], Any], clear: Callable[[], None], iterations: int) -> float:
    """Median over ``iterations``, in processor time: on a busy machine, wall time makes long steps look longer, because
    they are the ones that get interrupted."""
    times = []
    for _ in range(iterations):
        start = time.process_time_ns()
        step()
        times.append(time.process_time_ns() - start)
        clear()
    return statistics.median(times) / 1000


def collectives_of(model: nn.Module) -> dict[str, int]:
    """Collectives in forward, and in forward and backward, counted by torch."""
    counts = {}
    for name in PASSES:
        step, clear = make_step(model, name != "forward")
        with CommDebugMode() as comm:
            step()
        counts[name] = comm.get_total_counts()
        clear()
    return counts


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "lower_quartile": low, "upper_quartile": high}


def measure(versions: dict[str, nn.Module], rounds: int, iterations: int) -> dict[str, Any]:
    """Time every version once a round, in random order; ratios are taken within a round, where the machine is alike."""
    results: dict[str, Any] = {name: {"collectives": collectives_of(model)} for name, model in versions.items()}
    order = random.Random(0)
    for name_of_pass in PASSES:
        steps = {name: make_step(model, name_of_pass != "forward") for name, model in versions.items()}
        for step, clear in steps.values():
            microseconds_of(step, clear, iterations)  # warm up
        times: dict[str, list[float]] = {name: [] for name in versions}
        for _ in range(rounds):
            names = list(versions)
            order.shuffle(names)
            gc.collect()
            gc.disable()
            for name in names:
                times[name].append(microseconds_of(*steps[name], iterations))
            gc.enable()
        for name, own in times.items():
            ratios = [mine / theirs for mine, theirs in zip(own, times[HAND_WRITTEN], strict=True)]
            results[name][name_of_pass] = {"microseconds": spread(own), "ratio_to_hand_written": spread(ratios)}
    return results


# -------------------------------------------------------------------------------------------------------------- report
def revision() -> str:
    """Commit of the checkout, or unknown."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def processor() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else machine.processor() or "unknown"


def markdown(record: dict[str, Any]) -> str:
    """The record as a table."""
    where = record["environment"]
    lines = [
        f"MLP {BATCH}x{FEATURES}x{HIDDEN}, {RANKS} ranks, float32; fake process group, one thread on one core.",
        "Processor time of the process.",
        f"Median over {record['rounds']} rounds of the median of {record['iterations']} calls; in brackets the "
        "quartiles over rounds.",
        f"Ratios are to the {HAND_WRITTEN} version in the same round.",
        "",
    ]
    for name_of_pass in PASSES:
        lines += [f"| {name_of_pass} | collectives | microseconds | ratio |", "|---|---|---|---|"]
        for name, result in record["results"].items():
            time_, ratio = (result[name_of_pass][key] for key in ("microseconds", "ratio_to_hand_written"))
            lines.append(
                f"| {name} | {result['collectives'][name_of_pass]} "
                f"| {time_['median']:.1f} ({time_['lower_quartile']:.1f} to {time_['upper_quartile']:.1f}) "
                f"| {ratio['median']:.2f} ({ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f}) |"
            )
        lines.append("")
    lines += [f"- {key}: {value}" for key, value in where.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--out", type=Path, help="result files without suffix; default: print only")
    arguments = parser.parse_args()

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    results = measure(make_versions(), arguments.rounds, arguments.iterations)
    dist.destroy_process_group()

    record = {
        "benchmark": "mlp",
        "rounds": arguments.rounds,
        "iterations": arguments.iterations,
        "environment": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "load average at the start": round(load, 1),
            "system": f"{machine.system()} {machine.machine()}",
            "python": machine.python_version(),
            "torch": torch.__version__,
            "hyper_parallel": revision(),
        },
        "results": results,
    }
    text = markdown(record)
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        arguments.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
