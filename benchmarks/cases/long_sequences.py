"""An attention block over a cut sequence: memory over lengths, and the host's time next to hand-written code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import Goal, Result, Table
from benchmarks.timing import Effort, Step, interleaved, ratios, spread
from benchmarks.torch_groups import fake_group
from benchmarks.torch_memory import peak_bytes
from benchmarks.torch_sequences import Block, Heads, hand_written_ring, hand_written_ulysses

__all__ = ["run"]

RANKS = 4
LARGE, SMALL = Heads(16, 8, 32), Heads(8, 4, 16)
LENGTHS, SHORT = (1024, 2048, 4096, 8192, 16384), (16, 64)
SINGLE, WAYS = "single device", ("gather", "exchange", "ring")
#: way -> the hand-written code that it is compared with.
RIVALS = {"exchange": "hand-written Ulysses", "ring": "hand-written ring"}
BY_HAND = {"hand-written Ulysses": hand_written_ulysses, "hand-written ring": hand_written_ring}


def _step(kind: str, heads: Heads, length: int, mesh: Any) -> Callable[[], None]:
    """Forward and backward of a block with ``length`` positions on this rank. Gradients of weights are there before."""
    from hyper_parallel import ContextParallel, parallelize_module

    block = Block(heads, BY_HAND[kind]) if kind in BY_HAND else Block(heads)
    if kind in WAYS:
        parallelize_module(block, mesh, ContextParallel(method=kind, balance=kind != "exchange"))
    for p in block.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(1, length, heads.queries * heads.features, requires_grad=True)

    def run() -> None:
        y = block(x)
        y.backward(torch.ones_like(y))
        x.grad = None

    return run


def _memory(effort: Effort, mesh: Any) -> tuple[Table, list[Goal]]:
    """Peaks at each length, and the most that they may be."""
    columns = ["length", SINGLE, *WAYS, "one piece of keys and values"]
    table, goals = Table("peak memory of a block's step, MiB", columns), []
    for length in LENGTHS[:2] if effort.rounds <= 10 else LENGTHS:
        steps = {way: _step(way, LARGE, length if way == SINGLE else length // RANKS, mesh) for way in (SINGLE, *WAYS)}
        _step("ring", LARGE, 64, mesh)()
        peaks = {way: peak_bytes(step) / 2**20 for way, step in steps.items()}
        piece = 2 * LARGE.keys * LARGE.features * 4 * length / RANKS / 2**20
        table.rows.append([str(length), *peaks.values(), piece])
    for way in WAYS:
        most = peaks[SINGLE] / RANKS + piece * (RANKS if way == "gather" else 1)
        text = "all keys and values" if way == "gather" else "one piece of keys and values"
        what = f"{way}: peak memory at {length} positions, of a {RANKS}th of the single device's and {text}"
        goals.append(Goal(what, peaks[way] / most, 1.0))
    return table, goals


def _host_time(effort: Effort, length: int, mesh: Any) -> tuple[Table, list[Goal]]:
    kinds = (*WAYS, *BY_HAND)
    times = interleaved({kind: Step(_step(kind, SMALL, length, mesh)) for kind in kinds}, effort, time.process_time_ns)
    table, goals = Table(f"{length} positions a rank", ["way", "microseconds", "ratio to hand-written code"]), []
    for kind in kinds:
        rival = RIVALS.get(kind)
        ratio = None if rival is None else spread(ratios(times, rival)[kind])
        table.rows.append([kind, spread(times[kind]), ratio if ratio is not None else ""])
        if ratio is not None:
            goals.append(Goal(f"{kind}: host time of {rival}, {length} positions a rank", ratio["median"], 1.2))
    return table, goals


def run(effort: Effort) -> Result:
    """Peak memory at each length, and time of short sequences, of which arithmetic is little."""
    from hyper_parallel import init_device_mesh

    large, small = (f"{h.queries} heads, {h.keys} of keys, {h.features} features" for h in (LARGE, SMALL))
    result = Result(
        "long_sequences",
        "An attention block: projections to queries, keys and values, causal attention, a projection. Forward and "
        f"backward on rank 0 of {RANKS} of a fake process group, float32, balanced parts; with exchange, consecutive "
        f"ones. Memory ({large}) is the most that one step has allocated beyond its input and gradients of weights. "
        f"Host time ({small}) is the processor time of a step.",
    )
    with fake_group(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        for table, goals in (_memory(effort, mesh), *(_host_time(effort, length, mesh) for length in SHORT)):
            result.tables.append(table)
            result.goals += goals
    return result
