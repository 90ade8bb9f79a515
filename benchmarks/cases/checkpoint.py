"""Saving and loading a checkpoint, against torch's distributed checkpoint, plain files of safetensors, and ``dd``."""

from __future__ import annotations

import os
import tempfile

from benchmarks.ranks import launch
from benchmarks.report import Result
from benchmarks.timing import Effort

__all__ = ["run"]

#: Variables: MiB of the checkpoint, and a directory on the disk that is measured.
_SIZE, _PLACE = "CHECKPOINT_MIB", "CHECKPOINT_DIRECTORY"


def run(effort: Effort) -> Result:
    """Measure with 4 ranks."""
    full = effort.rounds > 50
    megabytes = int(os.environ.get(_SIZE, "2048" if full else "256"))
    with tempfile.TemporaryDirectory(dir=os.environ.get(_PLACE)) as place:
        return launch(
            "benchmarks.checkpoint_rank",
            4,
            "5" if full else "2",
            str(megabytes),
            place,
            environment={"HYPER_PARALLEL_PLATFORM": "torch-cpu", "OMP_NUM_THREADS": "1"},
        )[0]
