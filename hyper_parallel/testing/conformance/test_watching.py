"""Messages to the log and the profiler: a line for each plan, and the names of modules and collectives."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hyper_parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate
from hyper_parallel.core.communication import recorder
from hyper_parallel.debug import ProfilerRanges
from hyper_parallel.platform.contract.autograd import BACKWARD_WRAPPERS
from hyper_parallel.platform.logs import LOG, VARIABLE
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.comparisons import floats
from hyper_parallel.testing.spmd import on_mesh

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def listening(call: Callable[[], Any]) -> list[str]:
    """Return the log messages of a call."""
    handler, before = _Lines(), LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    try:
        call()
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(before)
    return handler.lines


def step(model: Any) -> None:
    adapter = get_adapter()
    adapter.value_and_grads(lambda x: (adapter.sum(adapter.call(model, x)), x), [floats(2, 4)])


@on_mesh(names=("tp",))
def of_a_plan(mesh: Any) -> tuple[list[str], list[str]]:
    adapter = get_adapter()
    model = adapter.load(adapter.Mlp(4, 8), np.random.default_rng(3))
    said = listening(lambda: parallelize_module(model, mesh, PLAN))
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "collectives"
    try:
        recorder.watch_as_told()
        recorder.watch_as_told()  # once is enough
    finally:
        os.environ.pop(VARIABLE)
        os.environ.update({} if before is None else {VARIABLE: before})
    try:
        return said, listening(lambda: step(model))
    finally:
        recorder.LISTENERS.remove(recorder.as_line)
        BACKWARD_WRAPPERS.remove(recorder.attributed)
        assert not recorder.LISTENERS and not BACKWARD_WRAPPERS


def test_lines_of_a_plan_and_of_its_collectives(pool: Any) -> None:
    for rank, (said, collectives) in enumerate(pool.run(2, of_a_plan)):
        (line,) = said
        level = "DEBUG" if rank else "INFO"
        assert line.startswith(
            f"{level} parallelize_module: a plan of 2 keys, 2 modules (1 ColwiseParallel, 1 RowwiseParallel) on "
        )
        # up (8, 4) and (8,), down (4, 8) and (4,): half of all but the last.
        assert line.endswith("mesh tp=2: 0.00016 of 0.000304 MB of parameters and buffers on this rank"), line
        forward, backward = collectives
        assert forward.startswith("INFO all_reduce over tp, down, forward: 32 bytes, (2, 4) of "), forward
        assert backward.startswith("INFO all_reduce over tp, up, backward: 32 bytes, (2, 4) of "), backward


@on_mesh(names=("dp",))
def of_data_parallelism(mesh: Any) -> tuple[list[str], list[str], list[str]]:
    adapter = get_adapter()
    shard, whole = (adapter.load(adapter.linear_module(4, 4), np.random.default_rng(3)) for _ in range(2))
    replicated = listening(lambda: replicate(whole, mesh))
    sharded = listening(lambda: fully_shard(shard, mesh=mesh))
    return replicated, sharded, listening(lambda: [step(shard), step(shard)])


def test_lines_of_data_parallelism(pool: Any) -> None:
    for replicated, sharded, first_call in pool.run(2, of_data_parallelism):
        assert [line.partition(" on ")[0].split()[1] for line in replicated] == ["replicate"]
        assert replicated[0].endswith("mesh dp=2: 8e-05 of 8e-05 MB of parameters and buffers on this rank")
        # All units are there when the outermost one is called.
        assert not sharded and len(first_call) == 1 and "fully_shard on " in first_call[0]
        assert first_call[0].endswith("mesh dp=2: 4e-05 of 8e-05 MB of parameters and buffers on this rank")


@on_mesh(names=("tp",))
def ranges(mesh: Any) -> list[str]:
    """Return the started ranges, and check that each ends."""
    adapter, platform, seen, running = get_adapter(), mesh.platform, [], []
    model = parallelize_module(adapter.load(adapter.Mlp(4, 8), np.random.default_rng(3)), mesh, PLAN)

    def begin(name: str) -> Callable[[], None]:
        seen.append(name)
        running.append(name)
        return partial(running.remove, name)

    platform.profiler_range = begin
    try:
        with ProfilerRanges(model):
            step(model)
        assert not running and not recorder.LISTENERS
        with ProfilerRanges():
            step(model)
    finally:
        del platform.profiler_range
    end = platform.profiler_range("the backend's own")
    if end is not None:
        end()
    assert not running and not recorder.LISTENERS
    return seen


def test_ranges_of_modules_and_collectives(pool: Any) -> None:
    collectives = ["all_reduce over tp, down, forward", "all_reduce over tp, up, backward"]
    for seen in pool.run(2, ranges):
        assert seen == ["Mlp", "up", "down", *collectives, *collectives]
