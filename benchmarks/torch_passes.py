"""Versions of a model timed side by side, pass by pass."""

from __future__ import annotations

import time

import torch

from benchmarks.report import Goal, Table
from benchmarks.timing import Effort, Step, interleaved, ratios, spread
from benchmarks.torch_versions import DTENSORS, HYPER_PARALLEL, TEXTBOOK, TUNED, Version

__all__ = ["FORWARD", "FORWARD_AND_BACKWARD", "NO_GRAD", "limits", "step_of", "time_pass"]

FORWARD, FORWARD_AND_BACKWARD, NO_GRAD = "forward", "forward and backward", "forward under no_grad"


def step_of(version: Version, name: str, device: str = "cpu") -> Step:
    """One run of a pass, as it is timed."""
    run = version.forward_and_backward if name == FORWARD_AND_BACKWARD else version.forward
    if device == "cpu":
        # Gradients have to be cleared after each backward.
        return Step(run, version.clear, 1 if name == FORWARD_AND_BACKWARD else 10)

    def run_on_device() -> None:
        run()
        torch.cuda.synchronize()

    return Step(run_on_device, version.clear)


def time_pass(title: str, name: str, versions: list[Version], effort: Effort, device: str = "cpu") -> Table:
    """One table: microseconds of each version, and ratios to the hand-written ones.

    On CPU it is the processor time of the process. On a device it is wall time until the device is done.
    """
    clock = time.process_time_ns if device == "cpu" else time.perf_counter_ns
    steps = {version.name: step_of(version, name, device) for version in versions}
    with torch.set_grad_enabled(name != NO_GRAD):
        times = interleaved(steps, effort, clock)
    to_textbook, to_tuned = ratios(times, TEXTBOOK), ratios(times, TUNED)
    table = Table(f"{title}: {name}", ["version", "microseconds", "ratio to textbook", "ratio to tuned"])
    for version in times:
        table.rows.append([version, *(spread(column[version]) for column in (times, to_textbook, to_tuned))])
    return table


def limits(table: Table, textbook: float | None, tuned: float | None, dtensors: float | None = None) -> list[Goal]:
    """The goals of a table: ratios of hyper_parallel to hand-written code, and with DTensors to tuned code."""
    medians = {row[0]: (row[2]["median"], row[3]["median"]) for row in table.rows}
    wanted = [
        (f"{HYPER_PARALLEL} to textbook", medians[HYPER_PARALLEL][0], textbook),
        (f"{HYPER_PARALLEL} to tuned", medians[HYPER_PARALLEL][1], tuned),
        (f"{DTENSORS} to tuned", medians[DTENSORS][1], dtensors),
    ]
    return [Goal(f"{table.title}: {what}", value, limit) for what, value, limit in wanted if limit is not None]
