"""Attention over a sequence that is cut: memory of forward and backward over lengths, and the host's time."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.report import Goal, Result, Table
from benchmarks.timing import Effort, Step, interleaved, ratios, spread
from benchmarks.torch_groups import fake_group
from benchmarks.torch_memory import peak_bytes

__all__ = ["run"]

RANKS, HEADS, SHARED, FEATURES = 4, 8, 4, 64
LENGTHS = (1024, 2048, 4096, 8192)
SHORT = 64
SINGLE, WAYS = "single device", ("gather", "exchange", "ring")


def _operands(length: int) -> list[torch.Tensor]:
    """Queries, keys and values, which need gradients."""
    return [torch.randn(1, heads, length, FEATURES, requires_grad=True) for heads in (HEADS, SHARED, SHARED)]


def _step(way: str, length: int, mesh: Any) -> Any:
    """Forward and backward of one call; the parts are rank 0's."""
    from hyper_parallel import DTensor, Shard
    from hyper_parallel.core.rules.sequence_cut import attention_method

    whole = way == SINGLE
    leaves = _operands(length if whole else length // RANKS)

    def run() -> None:
        xs = leaves if whole else [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in leaves]
        with attention_method(None if whole else way):
            y = F.scaled_dot_product_attention(*xs, is_causal=True, enable_gqa=True)
        y.backward(torch.ones_like(y))
        for x in leaves:
            x.grad = None

    return run


def run(effort: Effort) -> Result:
    """Peak memory at each length, and time of short sequences, of which arithmetic is little."""
    from hyper_parallel import init_device_mesh

    heads = f"{HEADS} heads, {SHARED} of keys, {FEATURES} features, float32"
    result = Result(
        "long_sequences",
        f"Causal attention, forward and backward, {heads}; rank 0 of {RANKS} of a fake process group, of consecutive "
        "parts. Memory is the most that one step has allocated beyond its operands.",
    )
    table = Table("peak memory of a step, MiB", ["length", SINGLE, *WAYS])
    with fake_group(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        for length in LENGTHS[:2] if effort.rounds <= 10 else LENGTHS:
            steps = {way: _step(way, length, mesh) for way in (SINGLE, *WAYS)}
            for step in steps.values():
                step()
            table.rows.append([str(length), *(peak_bytes(step) / 2**20 for step in steps.values())])
        result.tables.append(table)
        steps = {way: Step(_step(way, SHORT, mesh)) for way in (SINGLE, *WAYS)}
        times = interleaved(steps, effort, time.process_time_ns)
    ratio = ratios(times, SINGLE)
    short = Table(f"{SHORT} positions", ["way", "microseconds", f"ratio to {SINGLE}"])
    short.rows = [[way, spread(times[way]), spread(ratio[way])] for way in times]
    result.tables.append(short)
    last = table.rows[-1]
    for way, most in zip(WAYS, last[2:], strict=True):
        what = f"{way}: peak memory at {last[0]} positions, of the single device's"
        result.goals.append(Goal(what, most / last[1], 1.0, strict=True))
    return result
