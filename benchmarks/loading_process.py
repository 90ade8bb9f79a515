"""One way of loading, in a fresh process: ``python -m benchmarks.loading_process RANK RANKS FOLDER WEIGHTS WAY``."""

from __future__ import annotations

import gc
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.plans import whole_llama_plan
from benchmarks.ranks import write_result
from benchmarks.report import Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.torch_groups import fake_group
from benchmarks.torch_models import Llama
from benchmarks.torch_versions import HYPER_PARALLEL, LIBRARIES, TORCH

__all__ = ["LAYERS", "RANKS", "SIZES", "VOCABULARY", "WAYS"]

RANKS = 4
SIZES = LlamaSizes(features=1024, hidden=2816, heads=16)
LAYERS, VOCABULARY = 4, 16000


@dataclass(frozen=True)
class _Task:
    """The model and the values to load.

    Attributes:
        build: makes the model.
        layers: number of its blocks.
        read: name of a parameter -> the whole tensor, in memory of its own; pages of a mapped file would count as that
            of this process.
    """

    build: Callable[[], nn.Module]
    layers: int
    read: Callable[[str], torch.Tensor]


def _on_meta(library: Any, task: _Task) -> nn.Module:
    with torch.device("meta"):
        model = task.build()
    mesh, plan = library.init_device_mesh("cpu", (RANKS,)), whole_llama_plan(library, task.layers)
    return library.parallelize_module(model, mesh, plan).to_empty(device="cpu")


def _meta_hyper_parallel(task: _Task) -> nn.Module:
    model = _on_meta(LIBRARIES[HYPER_PARALLEL], task)
    for name, _ in model.named_parameters():
        model.load_state_dict({name: task.read(name)}, strict=False)
    return model


def _meta_torch(task: _Task) -> nn.Module:
    library = LIBRARIES[TORCH]
    model = _on_meta(library, task)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(library.distribute_tensor(task.read(name), p.device_mesh, p.placements, src_data_rank=None))
    return model


def _whole_first(task: _Task) -> nn.Module:
    library = LIBRARIES[HYPER_PARALLEL]
    model = task.build()
    for name, _ in model.named_parameters():
        model.load_state_dict({name: task.read(name)}, strict=False)
    mesh, plan = library.init_device_mesh("cpu", (RANKS,)), whole_llama_plan(library, task.layers)
    return library.parallelize_module(model, mesh, plan, src_data_rank=None)


WAYS: dict[str, Callable[[_Task], nn.Module]] = {
    f"meta, {HYPER_PARALLEL}": _meta_hyper_parallel,
    f"meta, {TORCH}": _meta_torch,
    f"whole model first, {HYPER_PARALLEL}": _whole_first,
}


def _memory(key: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {key}"
    return int(found[1]) * 1024


def _warm_up(way: Callable[[_Task], nn.Module]) -> None:
    """The same with a tiny model, so that nothing is imported while it counts."""
    sizes = LlamaSizes()
    shapes = {name: p.shape for name, p in Llama(sizes, 8, 1).named_parameters()}
    way(_Task(lambda: Llama(sizes, 8, 1), 1, lambda name: torch.zeros(shapes[name])))


def main(folder: str, weights: str, way: str) -> None:
    """Load, and write bytes of own shards, peak and seconds."""
    warnings.simplefilter("ignore")
    with fake_group(RANKS):
        _warm_up(WAYS[way])
        task = _Task(
            lambda: Llama(SIZES, VOCABULARY, LAYERS),
            LAYERS,
            lambda name: torch.from_numpy(np.load(f"{weights}/{name}.npy")),
        )
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # from now on, VmHWM is the peak of the code below
        before, start = _memory("VmRSS"), time.perf_counter()
        model = WAYS[way](task)
        seconds, peak = time.perf_counter() - start, _memory("VmHWM") - before
        own = sum(p.to_local().numel() * p.to_local().element_size() for p in model.parameters())
        for name, p in model.named_parameters():
            assert bool((p.to_local() == np.float32(0.01)).all()), f"{name} was not loaded"
    write_result(folder, [Result("loading", way, [Table(way, [], [[own, peak, seconds]])])])


if __name__ == "__main__":
    main(*sys.argv[3:6])
