"""Following the plain code of a model: the cost of the one forward that is followed."""

from __future__ import annotations

import time

import torch

import hyper_parallel
from benchmarks.plans import llama_plan
from benchmarks.report import Goal, Result, Table
from benchmarks.sizes import LlamaSizes
from benchmarks.timing import Effort, Step, interleaved, spread
from benchmarks.torch_groups import fake_group
from benchmarks.torch_models import Blocks, rotary_tables

__all__ = ["run"]

RANKS, LAYERS = 4, 8
USUAL, FOLLOWED = "usual", "followed"


def run(effort: Effort) -> Result:
    """The forward of several blocks, as it is and followed."""
    sizes = LlamaSizes()
    result = Result(
        "plain_code",
        f"Forward of {LAYERS} Llama blocks ({sizes}), {RANKS} ranks of a fake process group, processor time. A program "
        "that is followed begins with no verdict in its cache, and takes the longer way through its styles.",
    )
    with fake_group(RANKS):
        mesh = hyper_parallel.init_device_mesh("cpu", (RANKS,))
        model = Blocks(sizes, LAYERS)
        for layer in model.layers:
            plan = llama_plan(hyper_parallel, sequence_parallel=False, dtensors=False)
            hyper_parallel.parallelize_module(layer, mesh, plan)
        x = torch.randn(sizes.batch, sizes.sequence, sizes.features)
        inputs = (x, *rotary_tables(sizes.sequence, sizes.head_size))
        asked = [0]

        def followed() -> None:
            with hyper_parallel.check_plain_code(model) as checked:
                model(*inputs)
            assert not checked.findings, checked
            asked[0] = checked.asked

        steps = {USUAL: Step(lambda: model(*inputs)), FOLLOWED: Step(followed)}
        times = interleaved(steps, effort, time.process_time_ns)
    per_operation = [(b - a) / asked[0] for a, b in zip(times[USUAL], times[FOLLOWED], strict=True)]
    table = Table("forward", ["way", "microseconds"])
    table.rows = [[name, spread(values)] for name, values in times.items()]
    table.rows.append([f"more for each of {asked[0]} operations", spread(per_operation)])
    result.tables.append(table)
    median = sorted(per_operation)[len(per_operation) // 2]
    result.goals.append(Goal("plain code: microseconds for each operation asked", median, 100.0))
    return result
