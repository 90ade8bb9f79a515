"""The MLP and the Llama block in MindSpore, on real processes."""

from __future__ import annotations

import socket

from benchmarks.ranks import launch
from benchmarks.report import Result
from benchmarks.timing import Effort

__all__ = ["run"]

RANKS = 2


def run(effort: Effort) -> Result:
    """Compare with hand-written MindSpore code."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = {"HYPER_PARALLEL_PLATFORM": "mindspore", "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    return launch("benchmarks.mindspore_rank", RANKS, str(port), str(effort.rounds), environment=environment)[0]
