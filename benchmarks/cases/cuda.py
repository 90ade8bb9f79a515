"""The cases `mlp`, `llama` and `optimizer` on a CUDA device, and CUDA graphs, where there is one."""

from __future__ import annotations

import torch

from benchmarks.ranks import launch
from benchmarks.report import Result
from benchmarks.timing import Effort

__all__ = ["run"]


def run(effort: Effort) -> Result:
    """Measure in a separate process, because this one has chosen its platform."""
    if not torch.cuda.is_available():
        return Result("cuda", "Not measured: this machine has no CUDA device.")
    arguments = (str(effort.rounds), str(effort.turn))
    return launch("benchmarks.cuda_process", 1, *arguments, environment={"HYPER_PARALLEL_PLATFORM": "torch-cuda"})[0]
