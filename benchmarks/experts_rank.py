"""One rank of the case `experts`: ``python -m benchmarks.experts_rank RANK RANKS FOLDER ROUNDS``."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import machine
from benchmarks.gloo_rank import slowest
from benchmarks.ranks import wall_times, write_result
from benchmarks.report import Goal, Result, Table
from benchmarks.timing import Step, ratios, spread
from benchmarks.torch_experts import ByHand, Gathered, Mixture
from hyper_parallel import ExpertParallel, init_device_mesh, parallelize_module

#: Experts, how many a token is sent to, features, hidden units, and tokens of a rank.
SIZES = {"real": (8, 2, 512, 1024, 512), "small": (8, 2, 8, 16, 16)}
OURS, HAND, GATHERED = "HyperParallel", "dispatcher by hand", "gathered tokens"


def main(rank: int, ranks: int, folder: str, rounds: int) -> None:
    """Compare and time every version."""
    warnings.simplefilter("ignore")
    machine.pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    result = Result("experts", f"{ranks} processes over gloo, one thread each; wall time of the slowest rank.")
    for title, (*sizes, tokens) in SIZES.items():
        torch.manual_seed(0)
        whole = Mixture(*sizes)
        ours = parallelize_module(copy.deepcopy(whole), mesh, {"experts": ExpertParallel()})
        models = {OURS: ours, HAND: ByHand(whole), GATHERED: Gathered(whole)}
        x = torch.randn(ranks, tokens, sizes[2])[rank].requires_grad_()
        outputs = [model(x).detach() for model in models.values()]
        error = max(float((y - outputs[0]).norm() / outputs[0].norm()) for y in outputs[1:])
        result.goals.append(Goal(f"{title} sizes: largest relative error of outputs", error, 1e-5, strict=True))
        for passes in ("forward", "forward and backward"):
            steps = {name: Step(*_step(model, x, passes)) for name, model in models.items()}
            times = wall_times(steps, rounds, dist.barrier, slowest)
            columns = times, ratios(times, HAND), ratios(times, GATHERED)
            head = ["version", "milliseconds", "ratio to by hand", "ratio to gathered"]
            table = Table(f"{title} sizes (experts, best, features, hidden, tokens) {(*sizes, tokens)}: {passes}", head)
            table.rows = [[name, *(spread(column[name]) for column in columns)] for name in models]
            result.tables.append(table)
    if rank == 0:
        write_result(folder, [result])
    dist.barrier()
    dist.destroy_process_group()


def _step(model: nn.Module, x: Tensor, passes: str) -> tuple[Callable[[], object], Callable[[], object]]:
    def both() -> None:
        model(x).sum().backward()

    def clear() -> None:
        model.zero_grad()
        x.grad = None

    return (partial(model, x) if passes == "forward" else both), clear


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
