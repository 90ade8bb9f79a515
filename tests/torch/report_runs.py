"""Outcomes of `tests.torch.reports` with one library, on a rank that a launcher started.

    torchrun --nproc-per-node 2 -m tests.torch.report_runs theirs out.json

runs the programs with `torch.distributed.tensor`, in a process that does not import HyperParallel. ``ours`` runs them
with HyperParallel. The first rank writes the outcomes of both ranks.
"""

from __future__ import annotations

import json
import sys
import warnings
from argparse import Namespace
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.torch.report_tools import Tools
from tests.torch.reports import REPORTS, Report

__all__ = ["combined", "library", "main", "outcome"]


def library(name: str) -> tuple[Any, Any]:
    """The library ``"ours"`` or ``"theirs"`` as a namespace, and its mesh over all ranks."""
    if name == "ours":
        import hyper_parallel

        return hyper_parallel, hyper_parallel.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    from torch.distributed import tensor
    from torch.distributed.tensor import parallel

    found = {key: getattr(module, key) for module in (tensor, parallel) for key in module.__all__}
    return Namespace(**found), dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def outcome(report: Report, api: Any, mesh: Any) -> str:
    """The outcome of a program on this rank.

    It is ``"right"``, ``"wrong: "`` and the wrong values, or ``"error: "`` and the error. With HyperParallel it may be
    ``"found: "`` and the finding in plain code.
    """
    wanted = report.program(Tools())
    own = hasattr(api, "check_plain_code")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tools = Tools(api, mesh)
            with api.check_plain_code(torch.nn.Module()) if own else nullcontext() as checked:
                tools.check = checked.gives if own else None
                found = report.program(tools)
            if own and checked.findings:
                return f"found: {checked.findings[0].text}"
            wrong = [name for name, value in wanted.items() if not _equal(found[name], value)]
        except Exception as error:
            return f"error: {type(error).__name__}: {' '.join(str(error).split())}"
    return f"wrong: {', '.join(wrong)}" if wrong else "right"


def _equal(found: Any, wanted: Any) -> bool:
    if found is None or wanted is None:
        return found is wanted
    found = (found.full_tensor() if hasattr(found, "full_tensor") else found).detach()
    wanted = wanted.detach()
    if found.shape != wanted.shape:
        return False
    return torch.allclose(found.to(torch.float64), wanted.to(torch.float64), rtol=1e-4, atol=1e-6)


def combined(ranks: list[str]) -> str:
    """The outcome of all ranks: the worst."""
    order = ("error", "wrong", "found", "right")
    return min(ranks, key=lambda text: order.index(text.split(":", maxsplit=1)[0]))


def main() -> None:
    name, path = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    api, mesh = library(name)
    found: dict[str, str] = {}
    for report in REPORTS:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, outcome(report, api, mesh))
        found[report.kind] = combined(ranks)
    if dist.get_rank() == 0:
        version = torch.__version__.partition("+")[0]
        Path(path).write_text(json.dumps({"torch": version, "outcomes": found}, indent=1))
    if name == "theirs":  # HyperParallel ends its own groups at exit
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
