"""Parallelising a model that was built on meta, and loading this rank's shards: time and peak memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.loading_process import LAYERS, RANKS, SIZES, VOCABULARY, WAYS
from benchmarks.ranks import launch
from benchmarks.report import Goal, Result, Table
from benchmarks.timing import Effort, spread
from benchmarks.torch_models import Llama
from benchmarks.torch_versions import HYPER_PARALLEL

__all__ = ["run"]

#: Megabytes that modules, Python's objects and the allocator may take besides.
SLACK = 2.0


def _save(folder: Path) -> tuple[int, int]:
    """Write every parameter to a file of its own; bytes of all, and of the largest."""
    with torch.device("meta"):
        model = Llama(SIZES, VOCABULARY, LAYERS)
    sizes = []
    for name, p in model.named_parameters():
        np.save(folder / f"{name}.npy", np.full(tuple(p.shape), 0.01, np.float32))
        sizes.append(p.numel() * 4)
    return sum(sizes), max(sizes)


def _launch(folder: str, way: str) -> list[float]:
    """Bytes of own shards, bytes of the peak, seconds."""
    # Else malloc keeps freed memory for later, the more of it the larger the tensors were.
    environment = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    results = launch("benchmarks.loading_process", 1, folder, way, environment=environment)
    row: list[float] = results[0].tables[0].rows[0]
    return row


def run(effort: Effort) -> Result:
    """Each way in processes of its own, several times."""
    repeats = 5 if effort.rounds > 50 else 2
    with tempfile.TemporaryDirectory() as folder:
        whole, largest = _save(Path(folder))
        megabyte = 1e6
        result = Result(
            "loading",
            f"Llama of {LAYERS} blocks, features {SIZES.features}, hidden {SIZES.hidden}, vocabulary {VOCABULARY}: "
            f"{whole / megabyte:.1f} MB in float32, the largest tensor {largest / megabyte:.1f} MB; rank 0 of {RANKS} "
            "of a fake process group. Peak: how much the resident set of a fresh process grew, at most.",
        )
        table = Table("Loading", ["way", "own shards, MB", "peak, MB", "beyond own shards, MB", "seconds"])
        for name in WAYS:
            runs = [_launch(folder, name) for _ in range(repeats)]
            own = runs[0][0] / megabyte
            peaks = [peak / megabyte for _, peak, _ in runs]
            beyond = [peak - own for peak in peaks]
            table.rows.append([name, own, spread(peaks), spread(beyond), spread([seconds for _, _, seconds in runs])])
            if name == f"meta, {HYPER_PARALLEL}":
                what = "peak beyond own shards and the largest tensor, MB"
                result.goals.append(Goal(what, max(beyond) - largest / megabyte, SLACK))
    result.tables.append(table)
    return result
